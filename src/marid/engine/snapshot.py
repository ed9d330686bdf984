"""Copies of CPU tensors that keep all that belongs to the value."""

from __future__ import annotations

import ctypes

import torch

from marid.engine.pages import in_large_pages
from marid.graph.node import span_of

_LARGE = 1 << 20  # bytes


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same values and strides; to be called below all dispatch."""
    # Strides are part of the value, overlapping ones (expand) included; conjugate and negative bits are resolved.
    if tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.resolve_conj().resolve_neg()
    if torch._C._TensorBase.is_contiguous(tensor):
        return _copied(tensor) if tensor.nbytes >= _LARGE and tensor.is_cpu else tensor.clone()
    span = span_of(tensor.shape, tensor.stride())
    if span == tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(tensor)
    block = tensor.as_strided((span,), (1,)).clone()
    return block.as_strided(tensor.shape, tensor.stride(), 0)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """By one thread, while others go on: what waits for such a copy is hashing, a socket or another process, and the
    threads of a kernel would spin beside it."""
    made = in_large_pages(torch.empty_like(tensor))
    ctypes.memmove(made.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return made
