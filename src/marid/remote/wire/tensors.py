"""Tensors from bytes and bytes from tensors, on the worker: uploads and fetches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from marid.engine.pages import in_large_pages
from marid.errors import WireError
from marid.execute.accelerator import Accelerator
from marid.remote.wire.codec import SEGMENT_BYTES
from marid.remote.wire.packing import Packing

__all__ = ["bytes_of_number", "elements_of", "memory_of", "number_of", "segments_of", "tensor_of"]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense one-dimensional CPU tensor, as it stands in memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def segments_of(tensor: torch.Tensor) -> list[memoryview]:
    """The same in pieces that fit into segments."""
    data = memory_of(tensor)
    return [data[start : start + SEGMENT_BYTES] for start in range(0, len(data), SEGMENT_BYTES)]


def elements_of(pieces: Sequence[Any], nbytes: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
    """A new one-dimensional tensor of these bytes, on the host. Raises ``WireError`` unless they are ``nbytes``."""
    sizes = [memoryview(piece).nbytes for piece in pieces]
    if sum(sizes) != nbytes or nbytes % dtype.itemsize:
        raise WireError(f"a tensor of {nbytes} bytes came with {sum(sizes)}")
    block = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=pinned and nbytes > 0)
    if not pinned:
        in_large_pages(block)
    # Not through numpy, after which the memory could not be resized any more (residency.py does).
    target = memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr() if nbytes else 0)).cast("B")
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        target[start : start + size] = memoryview(piece).cast("B")
        start += size
    return block


def number_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor without dimensions on the host: ``tensor_of`` in the fewest calls, since a loop that reads a number
    at each step waits for this."""
    made = torch.empty((), dtype=dtype, device="cpu")
    ctypes.memmove(made.data_ptr(), data, dtype.itemsize)
    return made


def bytes_of_number(tensor: torch.Tensor) -> bytes:
    """Those of a tensor without dimensions on the host, its bits resolved."""
    return ctypes.string_at(tensor.data_ptr(), tensor.itemsize)


def tensor_of(pieces: Sequence[Any], packing: Packing, dtype: torch.dtype, where: Accelerator) -> torch.Tensor:
    """The tensor that was packed into these bytes, on a device. Raises ``WireError``."""
    return packing.unpack(where.to_device(elements_of(pieces, packing.nbytes, dtype, where.pins)))
