"""Specs as plain data, interned: equal specs are one object, as what compares them by identity expects."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Spec
from marid.remote.wire.codec import as_int, as_list, dtype_name, dtype_named

__all__ = ["matches", "sizes_from", "spec_from", "spec_of", "spec_to"]

_RANK = 64
_LONGEST = 1 << 46  # bytes of the memory a spec may reach
_interned: weakref.WeakValueDictionary[tuple[Any, ...], Spec] = weakref.WeakValueDictionary()


def spec_to(spec: Spec) -> list[Any]:
    """``[dtype, shape, stride, offset]``, and the conjugate and negative bits where one is set."""
    data = [dtype_name(spec.dtype), list(spec.shape), list(spec.stride), spec.offset]
    return [*data, spec.conj, spec.neg] if spec.conj or spec.neg else data


def spec_from(data: Any) -> Spec:
    """The spec of that data. Raises ``WireError``."""
    parts = as_list(data, 6, "a spec")
    if len(parts) not in (4, 6):
        raise WireError("a spec has four parts, or six")
    dtype = dtype_named(parts[0])
    shape, stride = sizes_from(parts[1], parts[2], dtype)
    offset = as_int(parts[3], 0, _LONGEST, "an offset")
    bits = [False, False, *parts[4:]][-2:]
    if any(type(bit) is not bool for bit in bits) or (
        True in bits and not dtype.is_complex and not dtype.is_floating_point
    ):
        raise WireError("a spec has bits that it cannot have")
    return _intern(shape, stride, offset, dtype, *bits)


def sizes_from(shape: Any, stride: Any, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a tensor that can be addressed. Raises ``WireError``."""
    sizes = [as_int(size, 0, _LONGEST, "a size") for size in as_list(shape, _RANK, "a shape")]
    steps = [as_int(step, 0, _LONGEST, "a stride") for step in as_list(stride, _RANK, "a stride")]
    if len(sizes) != len(steps):
        raise WireError("a shape and its stride differ in length")
    reach = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True) if size)
    if max(math.prod(sizes), reach + 1) * dtype.itemsize > _LONGEST:
        raise WireError("a tensor is too large to be addressed")
    return tuple(sizes), tuple(steps)


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a concrete tensor."""
    return _intern(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def matches(tensor: torch.Tensor, spec: Spec) -> bool:
    """Whether a tensor has that spec; strides of dimensions that are not stepped along say nothing."""
    return (
        tensor.shape == spec.shape
        and tensor.dtype is spec.dtype
        and (tensor.stride() == spec.stride or _steps_alike(tensor.stride(), spec))
        and tensor.storage_offset() == spec.offset
        and tensor.is_conj() == spec.conj
        and tensor.is_neg() == spec.neg
    )


def _steps_alike(stride: tuple[int, ...], spec: Spec) -> bool:
    return spec.numel == 0 or all(
        a == b for a, b, size in zip(stride, spec.stride, spec.shape, strict=True) if size != 1
    )


def _intern(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, conj: bool, neg: bool
) -> Spec:
    key = (shape, stride, offset, dtype, conj, neg)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Spec(shape, stride, offset, dtype, 0, conj, neg)
    return found
