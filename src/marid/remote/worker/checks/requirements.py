"""What checks say of arguments. Each raises ``ValueError`` where it does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marid.graph.node import span_of

Given = dict[str, Any]


def need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: the arguments do not belong together")


def within(index: Any, low: int, high: int, what: str) -> None:
    """All numbers of an index tensor are in ``range(low, high)``."""
    if index is None or not index.numel() or index.is_meta:
        return
    need(not index.is_floating_point() and not index.is_complex() and index.dtype is not torch.bool, what)
    least, most = torch.aminmax(index)
    need(low <= int(least) and int(most) < high, what)


def shaped(tensor: Any, shape: Sequence[int], what: str) -> None:
    """A tensor, if there is one, has that shape."""
    need(tensor is None or tuple(tensor.shape) == tuple(shape), what)


def alike(first: torch.Tensor, *others: Any) -> None:
    """Tensors, those that there are, have one dtype."""
    need(all(one is None or one.dtype is first.dtype for one in others), "types")


def is_long_enough(tensor: torch.Tensor) -> bool:
    """Whether as many elements as it has, one behind the other, lie in its memory, for kernels that ignore strides."""
    return tensor.numel() <= span_of(tensor.shape, tensor.stride())


def dimension(dim: int, rank: int) -> None:
    need(-max(rank, 1) <= dim < max(rank, 1), "a dimension")
