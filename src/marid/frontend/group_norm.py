"""What group normalisation returns, whose results lie in memory as its input does."""

from __future__ import annotations

from typing import Any

import torch

from marid.frontend.memory_layout import MemoryLayout, dense
from marid.frontend.rules import rule
from marid.graph.node import Spec, Value

__all__: list[str] = []

aten = torch.ops.aten

_PLAIN = torch.contiguous_format


def _fits(input: Spec, weight: Value | None, sizes: tuple[int, ...]) -> bool:
    """Whether the CPU surely takes these."""
    batch, channels, rest, groups = sizes
    of_weight = weight is None or (weight.spec is not None and weight.spec.shape == (channels,))
    fits = batch > 0 and rest > 0 and groups > 0 and channels > 0 and channels % groups == 0
    return fits and of_weight and input.shape[:2] == (batch, channels) and input.numel == batch * channels * rest


def _one_dtype(*values: Value | None) -> bool:
    dtypes = {value.spec.dtype for value in values if value is not None and value.spec is not None}
    return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)


def _in_form(of: Spec) -> MemoryLayout | None:
    """As a new tensor in the memory format of this one; None where it is not contiguous in that."""
    laid = MemoryLayout(of.shape, of.stride)
    memory_format = laid.suggested()
    return dense(of.shape, memory_format) if laid.contiguous(memory_format) is laid else None


def _described(laid: MemoryLayout, dtype: torch.dtype) -> Any:
    return laid.shape, laid.stride, 0, dtype, False, False


def _row(*shape: int) -> MemoryLayout:
    return dense(shape, _PLAIN)


@rule(aten.native_group_norm.default)
def _forward(input: Value, weight: Value | None, bias: Value | None, *options: Any) -> Any:
    of = input.spec
    assert of is not None
    *sizes, _ = options
    made = _in_form(of)
    if (
        made is None
        or not _one_dtype(input, weight, bias)
        or not all(_fits(of, v, tuple(sizes)) for v in (weight, bias))
    ):
        return NotImplemented
    statistics = _described(_row(sizes[0], sizes[3]), of.dtype)
    return [_described(made, of.dtype), statistics, statistics]


@rule(aten.native_group_norm_backward.default)
def _backward(grad: Value, input: Value, mean: Value, rstd: Value, weight: Value | None, *options: Any) -> Any:
    of = input.spec
    assert of is not None
    assert grad.spec is not None
    *sizes, wanted = options
    made, shape = _in_form(of), (sizes[0], sizes[3])
    fits = (
        _one_dtype(grad, input, mean, rstd, weight) and _fits(of, weight, tuple(sizes)) and grad.spec.shape == of.shape
    )
    fits = fits and all(value.spec is not None and value.spec.shape == shape for value in (mean, rstd))
    if made is None or not fits or _in_form(grad.spec) != made:
        return NotImplemented
    of_weight = _described(_row(sizes[1]), of.dtype)
    return [
        found if want else None
        for found, want in zip((_described(made, of.dtype), of_weight, of_weight), wanted, strict=True)
    ]
