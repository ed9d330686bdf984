"""Which operators a part of a program may have, given the types of its tensors; what is known of each is in its record
(``ops/facts.py``)."""

from __future__ import annotations

import torch

from marid.graph.node import Operation, Spec
from marid.ops.facts import base_name, facts_of

DTYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""Types that a part may have, with their numbers in ``c10::ScalarType``. Complex and quantised ones are left out."""


def admissible(op: Operation, dtypes: list[torch.dtype]) -> bool:
    """Whether a part may have ``op`` on tensors of these types, given those of its arguments and results."""
    facts = facts_of(op.func)
    if not facts.fusion or torch.Tag.nondeterministic_seeded in op.func.tags:
        return False
    if any(argument.is_out for argument in op.func._schema.arguments):
        return False
    if facts.is_foreach:
        return len(set(dtypes)) == 1 and dtypes[0].is_floating_point
    if facts.float_only and not all(dtype.is_floating_point for dtype in dtypes):
        return False
    if facts.fills and not all(dtype in (torch.float32, torch.float64, torch.bool) for dtype in dtypes):
        return False
    return all(dtype in DTYPES for dtype in dtypes)


def is_row_product(op: Operation, specs: list[Spec]) -> bool:
    """Whether ``op`` multiplies one row with the rows of a contiguous matrix, given the specs of its tensors.

    That reads every number of the matrix once, which BLAS does on one processor only.
    """
    name = base_name(op.name)
    if name not in ("mm", "linear") or len(specs) != 2:
        return False
    row, matrix = specs
    if row.dtype is not torch.float32 or len(matrix.shape) != 2 or not row.is_contiguous:
        return False
    width, depth = matrix.shape if name == "linear" else matrix.shape[::-1]
    stride = (depth, 1) if name == "linear" else (1, depth)
    return row.numel == depth > 1 < width and matrix.stride == stride


def lifted_arguments(op: Operation) -> set[str]:
    """Names of the arguments whose numbers become inputs of a part. Others are part of it, and guarded."""
    facts = facts_of(op.func)
    names = {facts.number} if facts.number else set()
    if facts.fusion == "pointwise":  # a number in the place of a tensor
        names |= {argument.name for argument in op.func._schema.arguments if str(argument.type) == "Tensor"}
    return names
