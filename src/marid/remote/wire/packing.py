"""Tensors as bytes: each element that a tensor has is sent once, in the order in which it lies in memory.

Strides are part of a value, so the receiver lays the elements out as the sender has them. What lies between the
elements of a slice is not sent (a column of a large matrix is as long as the column), and elements that a dimension of
stride 0 repeats are sent once. Only where strides overlap in another way is everything between the first and the last
element sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

__all__ = ["Packing", "packing_of"]

_REMEMBERED = 1024  # packings


class Packing:
    """How tensors of one shape, stride (elements) and item size (bytes) are packed. ``nbytes`` is what is sent;
    ``is_dense`` says that this is their memory as it is."""

    __slots__ = ("_core", "_order", "is_dense", "nbytes", "shape", "span", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> None:
        self.shape = shape
        self.stride = stride
        self._core = tuple([1 if step == 0 else size for size, step in zip(shape, stride, strict=True)])
        self.span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self._order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
        count = 0 if 0 in shape else math.prod(self._core)
        if not self._is_one_to_one():
            count = self.span
        self.is_dense = count == self.span
        self.nbytes = count * itemsize

    def _is_one_to_one(self) -> bool:
        """Whether no two indices of the core lead to one element, as far as sorted strides tell."""
        reach = 0
        for dim in reversed(self._order):
            if self._core[dim] > 1:
                if self.stride[dim] <= reach:
                    return False
                reach += (self._core[dim] - 1) * self.stride[dim]
        return True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of ``tensor`` in new memory of its device, one-dimensional; a snapshot. Its conjugate and
        negative bits must be resolved."""
        if self.nbytes == 0:
            return tensor.new_empty(0)
        if self.is_dense:
            return tensor.as_strided((self.span,), (1,)).clone()
        return self._ordered(tensor.as_strided(self._core, self.stride)).contiguous().reshape(-1).clone()

    def seen(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same without copying, where the elements lie side by side; else None."""
        return tensor.as_strided((self.span,), (1,)) if self.is_dense and self.nbytes else None

    def unpack(self, elements: torch.Tensor) -> torch.Tensor:
        """The tensor of these elements (one-dimensional), with this shape and stride, in the memory of ``elements`` if
        that may be. Between elements are zeros."""
        if self.nbytes == 0:
            return elements.new_empty(self.span).as_strided(self.shape, self.stride)
        if self.is_dense:
            return elements.as_strided(self.shape, self.stride)
        block = elements.new_zeros(self.span)
        target = self._ordered(block.as_strided(self._core, self.stride))
        target.copy_(elements.view(target.shape))
        return block.as_strided(self.shape, self.stride)

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(self._order)


def packing_of(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Packing:
    """The packing of tensors with this geometry."""
    return _packing(tuple(shape), tuple(stride), dtype.itemsize)


_packing = lru_cache(_REMEMBERED)(Packing)  # they do not change
