"""Which operators a part of a program may have: what Inductor compiles to what the ATen kernel computes.

The list names what is let in, never what is kept out. Not in it, because a compiled kernel would do something else than
raise the error that the ATen kernel raises: whatever looks at values to find memory (indexing, embeddings, gathers,
losses over class numbers), and division of integers. Not in it either: random operators, shapes that depend on data,
complex and quantised types, convolutions and attention (their ATen kernels are as good).
"""

from __future__ import annotations

import torch

from marid.graph.node import Operation, Spec
from marid.graph.operators import marked_name

__all__ = [
    "DTYPES",
    "FUSED_BY_PASSES",
    "FUSIBLE",
    "admissible",
    "base_name",
    "is_foreach",
    "is_row_product",
    "lifted_arguments",
]

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
"""Types that a part may have, with their numbers in ``c10::ScalarType``."""

_POINTWISE = set(
    "abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max "
    "clamp_min copysign cos cosh div elu elu_backward eq erf erfc exp exp2 expm1 fill floor frac ge gelu gelu_backward "
    "gt hardsigmoid hardswish hardtanh hardtanh_backward isinf isnan le leaky_relu leaky_relu_backward lerp log log10 "
    "log1p log2 logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul ne neg pow "
    "reciprocal relu round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus "
    "softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward trunc where xlogy zero "
    "_to_copy copy clone mse_loss_backward".split()
)
_REDUCTIONS = set(
    "sum mean amax amin var std var_mean logsumexp linalg_vector_norm native_layer_norm native_layer_norm_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data mse_loss any all".split()
)
_UNARY = ["sqrt", "rsqrt", "neg", "abs", "reciprocal", "sign", "exp", "zero", "copy"]
_BINARY, _TERNARY = ["add", "sub", "mul", "div"], ["addcmul", "addcdiv"]
_FOREACH = {
    *((f"_foreach_{name}", "default") for name in _UNARY),
    *((f"_foreach_{name}", overload) for name in _BINARY for overload in ("Scalar", "ScalarList", "List")),
    *((f"_foreach_{name}", overload) for name in _TERNARY for overload in ("Scalar", "ScalarList")),
    *(("_foreach_lerp", overload) for overload in ("Scalar", "List")),
    ("_foreach_maximum", "List"),
}
_OTHERS = set(
    "view t transpose permute expand squeeze unsqueeze slice select split split_with_sizes chunk unbind detach alias "
    "diagonal mm bmm addmm linear baddbmm zeros_like ones_like full_like cat stack constant_pad_nd tril triu".split()
)
_FLOAT_ONLY = {"div", "pow"}
"""Of integers, these raise errors that depend on values, or round by ``rounding_mode``."""

_FILLS = {"fill", "masked_fill", "full_like"}
"""These raise where a number does not fit into a type."""

FUSIBLE = _POINTWISE | _REDUCTIONS | {name for name, _ in _FOREACH}
"""What a part is made for: the rest is only let in between."""

FUSED_BY_PASSES = {"mm", "bmm"}
"""What ``marid.settings.fast_math`` fuses beside that."""

# Numbers that become inputs, by operator and overload: the argument's name.
_LIFTED: dict[tuple[str, str], str] = {
    **{(name, "Tensor"): "alpha" for name in ("add", "sub")},
    **{(name, "Scalar"): "other" for name in ("mul", "div", "eq", "ne", "lt", "le", "gt", "ge")},
    **{(name, "default"): "value" for name in ("addcmul", "addcdiv")},
    ("lerp", "Scalar"): "weight",
    ("fill", "Scalar"): "value",
    ("masked_fill", "Scalar"): "value",
    **{(f"_foreach_{name}", "Scalar"): "scalar" for name in _BINARY},
    **{(f"_foreach_{name}", "ScalarList"): "scalars" for name in (*_BINARY, *_TERNARY)},
    **{(f"_foreach_{name}", "Scalar"): "value" for name in _TERNARY},
    **{(f"_foreach_{name}", "List"): "alpha" for name in ("add", "sub")},
    ("_foreach_lerp", "Scalar"): "weight",
}


def base_name(op: Operation) -> str:
    """The operator's name without namespace, and without the underscore of in-place operators; for a view that does
    not say that it is one, the name of that which does."""
    name = marked_name(op.func).partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_foreach(name: str) -> bool:
    """Whether an operator of this name takes lists and works on them element by element."""
    return name.startswith("_foreach_")


def admissible(op: Operation, dtypes: list[torch.dtype]) -> bool:
    """Whether a part may have ``op`` on tensors of these types, given those of its arguments and results."""
    if not op.name.startswith("aten::") or torch.Tag.nondeterministic_seeded in op.func.tags:
        return False
    name, overload = base_name(op), op.func._overloadname
    if name not in FUSIBLE and name not in _OTHERS:
        return False
    if any(argument.is_out for argument in op.func._schema.arguments):
        return False
    if is_foreach(name):
        return (name, overload) in _FOREACH and len(set(dtypes)) == 1 and dtypes[0].is_floating_point
    if name in _FLOAT_ONLY and not all(dtype.is_floating_point for dtype in dtypes):
        return False
    if name in _FILLS and not all(dtype in (torch.float32, torch.float64, torch.bool) for dtype in dtypes):
        return False
    return all(dtype in DTYPES for dtype in dtypes)


def is_row_product(op: Operation, specs: list[Spec]) -> bool:
    """Whether ``op`` multiplies one row with the rows of a contiguous matrix, given the specs of its tensors.

    That reads every number of the matrix once, which BLAS does on one processor only.
    """
    name = base_name(op)
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
    name, overload = base_name(op), op.func._overloadname
    names = {_LIFTED[name, overload]} if (name, overload) in _LIFTED else set()
    if name in _POINTWISE:  # a number in the place of a tensor
        names |= {argument.name for argument in op.func._schema.arguments if str(argument.type) == "Tensor"}
    return names
