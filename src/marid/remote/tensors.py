"""Tensors from bytes and bytes from tensors, on the worker: uploads, fetches and files of weights."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from marid.errors import WireError
from marid.remote.packing import Packing, packing_of
from marid.remote.wire import SEGMENT_BYTES, dtype_named

__all__ = ["elements_of", "memory_of", "read_tensor", "segments_of", "tensor_of"]

_HEADER_BYTES = 64 << 20  # of a file of weights
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense one-dimensional CPU tensor, as it stands in memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def segments_of(tensor: torch.Tensor) -> list[memoryview]:
    """The same in pieces that fit into segments."""
    data = memory_of(tensor)
    return [data[start : start + SEGMENT_BYTES] for start in range(0, len(data), SEGMENT_BYTES)]


def elements_of(pieces: Sequence[Any], nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A new one-dimensional tensor of these bytes. Raises ``WireError`` unless they are ``nbytes``."""
    sizes = [memoryview(piece).nbytes for piece in pieces]
    if sum(sizes) != nbytes or nbytes % dtype.itemsize:
        raise WireError(f"a tensor of {nbytes} bytes came with {sum(sizes)}")
    block = torch.empty(nbytes, dtype=torch.uint8)
    # Not through numpy, after which the memory could not be resized any more (residency.py does).
    target = memoryview((ctypes.c_char * nbytes).from_address(block.data_ptr() if nbytes else 0)).cast("B")
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        target[start : start + size] = memoryview(piece).cast("B")
        start += size
    return block.view(dtype)


def tensor_of(pieces: Sequence[Any], packing: Packing, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor that was packed into these bytes, on ``device``. Raises ``WireError``."""
    return packing.unpack(elements_of(pieces, packing.nbytes, dtype).to(device))


def read_tensor(path: str, name: str, device: torch.device, room: Callable[[int], None]) -> torch.Tensor:
    """A tensor of a safetensors file: eight bytes with the length of a JSON header, the header, then raw elements.

    ``room`` is told the bytes before memory is taken for them. Raises ``WireError`` for what is no such file, and
    ``OSError``.
    """
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_HEADER_BYTES, len(data) - 8):
            raise WireError(f"{path} is no safetensors file")
        try:
            entry = json.loads(data[8 : 8 + length]).get(name)
        except (ValueError, AttributeError, RecursionError):
            raise WireError(f"{path} is no safetensors file") from None
        if name == "__metadata__" or type(entry) is not dict:
            raise WireError(f"there is no tensor {name!r} in {path}")
        shape, offsets = entry.get("shape", ()), entry.get("data_offsets", ())
        dtype = dtype_named(_DTYPES.get(str(entry.get("dtype")), entry.get("dtype")))
        if not _are_sizes(shape) or len(shape) > 64 or not _are_sizes(offsets) or len(offsets) != 2:
            raise WireError(f"tensor {name!r} in {path} is malformed")
        start, end = offsets
        packing = packing_of(shape, _contiguous(shape), dtype)
        if end - start != packing.nbytes or 8 + length + end > len(data):
            raise WireError(f"tensor {name!r} in {path} has more or fewer bytes than its elements take")
        room(packing.nbytes)
        view = memoryview(data)
        try:
            return tensor_of([view[8 + length + start : 8 + length + end]], packing, dtype, device)
        finally:
            view.release()


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def _contiguous(shape: Sequence[int]) -> list[int]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return stride[::-1]
