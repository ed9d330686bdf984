"""Tensors on the wire: their specs as plain data, their elements packed, and cut into segments or chunks.

Each element that a tensor has is sent once, in the order in which it lies in memory. Strides are part of a value, so
the receiver lays the elements out as the sender has them. What lies between the elements of a slice is not sent (a
column of a large matrix is as long as the column), and elements that a dimension of stride 0 repeats are sent once.
Only where strides overlap in another way is everything between the first and the last element sent.

Large tensors travel by content: in chunks, each named by the BLAKE3 of all of its bytes.
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import blake3
import torch

from marid.engine.pages import in_large_pages
from marid.errors import WireError
from marid.execute.accelerator import Accelerator
from marid.graph.node import Spec, span_of, strides_alike
from marid.remote.wire.codec import SEGMENT_BYTES


def matches(tensor: torch.Tensor, spec: Spec) -> bool:
    """Whether a tensor has that spec; strides of dimensions that are not stepped along say nothing."""
    return (
        tensor.shape == spec.shape
        and tensor.dtype is spec.dtype
        and (tensor.stride() == spec.stride or strides_alike(tensor.stride(), spec))
        and tensor.storage_offset() == spec.offset
        and tensor.is_conj() == spec.conj
        and tensor.is_neg() == spec.neg
    )


# --- elements as bytes -----------------------------------------------------------------------------------------------


_REMEMBERED = 1024  # packings


class Packing:
    """How tensors of one shape, stride (elements) and item size (bytes) are packed, whatever else their ``Spec`` says.
    ``nbytes`` is what is sent;
    ``is_dense`` says that this is their memory as it is."""

    __slots__ = ("_core", "_order", "is_dense", "nbytes", "shape", "span", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> None:
        self.shape = shape
        self.stride = stride
        self._core = tuple([1 if step == 0 else size for size, step in zip(shape, stride, strict=True)])
        self.span = span_of(shape, stride)
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


# --- bytes in segments -----------------------------------------------------------------------------------------------


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
    # Not through numpy, after which the memory could not be resized any more (execute/residency.py does).
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


# --- bytes in chunks -------------------------------------------------------------------------------------------------


CHUNK_BYTES = 4 << 20
"""The length of every chunk of a tensor but the last."""


def chunks_of(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The chunks of some bytes, in order: digest and bytes. Hashing releases the interpreter's lock."""
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        yield blake3.blake3(piece).digest(), piece


def file_pieces(path: str, offset: int, nbytes: int) -> Iterator[bytes]:
    """Bytes of a file, cut like chunks. Raises ``OSError`` when they are not there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would make us wait
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < offset + nbytes:
            raise OSError(f"{path} is no file with {offset + nbytes} bytes")
        for start in range(offset, offset + nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, offset + nbytes - start)
            piece = os.pread(descriptor, size, start)
            if len(piece) != size:
                raise OSError(f"{path} was cut short, or cannot be read at once")
            yield piece
    finally:
        os.close(descriptor)
