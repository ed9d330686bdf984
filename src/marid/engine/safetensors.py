"""Files of weights in the safetensors format: the length of a JSON header (8 bytes), the header, raw elements.

The header's entry ``__metadata__`` is a map of texts.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


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
        header, start = _header(path, file)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop(_METADATA, None)
    return {name: _entry(path, name, entry, data, start) for name, entry in header.items()}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a file. Raises as ``read_file``."""
    with Path(path).open("rb") as file:
        found = _header(path, file)[0].get(_METADATA, {})
    if type(found) is not dict or not all(type(value) is str for value in found.values()):
        raise ValueError(f"{path} is no safetensors file: its metadata is no map of texts")
    return found


def write_file(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors of the CPU. What was at ``path`` is replaced once all is written.

    Raises ``ValueError`` for a dtype that the format does not have or a header longer than it allows, and ``OSError``.
    """
    header: dict[str, Any] = {_METADATA: metadata}
    offset = 0
    ordered = sorted(tensors.items(), key=lambda one: -one[1].itemsize)  # so that all are aligned
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"safetensors has no elements of {tensor.dtype} ({name})")
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is longer than safetensors allows ({_HEADER_BYTES})")
    target = Path(path)
    written = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with written.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in ordered:
                if tensor.numel():
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)


def _header(path: Any, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where the elements begin."""
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
    return header, 8 + length


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
    if math.prod(max(size, 1) for size in shape) >= 1 << 63:  # PyTorch's limit, also where one of them is 0
        raise ValueError(f"tensor {name!r} in {path} has a shape that no tensor can have")
    if offsets[1] - offsets[0] != count * dtype.itemsize or start + offsets[1] > len(data):
        raise ValueError(f"tensor {name!r} in {path} has more or fewer bytes than its elements take")
    offset = start + offsets[0]
    empty = torch.empty(0, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=offset) if count else empty
    return Entry(tensor.view(shape), offset)


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
