"""Files of weights in the safetensors format: the length of a JSON header (8 bytes), the header, raw elements."""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Entry", "read_file"]

_HEADER_BYTES = 100_000_000  # what the format allows
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, as the file is mapped, and where in the file it begins."""

    tensor: torch.Tensor
    offset: int


def read_file(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of a file, by name; nothing is read yet but the header.

    Raises ``ValueError`` for what is no such file, and ``OSError``.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is no safetensors file: it ends before its header does")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
        if type(header) is not dict:
            raise ValueError(f"{path} is no safetensors file: its header is no map in JSON")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, data, 8 + length) for name, entry in header.items()}


def _entry(path: Any, name: str, entry: Any, data: mmap.mmap, start: int) -> Entry:
    if type(entry) is not dict:
        raise ValueError(f"tensor {name!r} in {path} is malformed")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    kind = str(entry.get("dtype"))[:40]
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise ValueError(f"tensor {name!r} in {path} has elements of {kind!r}, which are not known here")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} in {path} is malformed")
    count = math.prod(shape)
    if offsets[1] - offsets[0] != count * dtype.itemsize or start + offsets[1] > len(data):
        raise ValueError(f"tensor {name!r} in {path} has more or fewer bytes than its elements take")
    offset = start + offsets[0]
    empty = torch.empty(0, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=offset) if count else empty
    return Entry(tensor.view(shape), offset)


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
