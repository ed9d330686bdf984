"""Files of weights in the GGUF format, as the ``gguf`` package reads them.

A file may be damaged, or made to do harm: every read is held to what the file has, metadata to a number of values, and
a tensor to the bytes that its elements take. Whatever is wrong is a ``ValueError``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from marid.engine.safetensors import Entry

_MOST_VALUES = 1 << 22  # of metadata: a vocabulary has three for each of its words
_DIMENSIONS = 8
_ELEMENTS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class PackedEntry(Entry):
    """A packed matrix of a file: its bytes, row by row, and how they are packed."""

    packing: str


def read_file(
    path: str | os.PathLike[str], packings: dict[str, tuple[int, int]]
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The metadata of a file and its tensors, by name, as the file is mapped; ``packings`` has elements and bytes of a
    block for each packing that is known. Raises ``ValueError`` for what is no such file, and ``OSError``."""
    reader = _opened(path)
    entries = {tensor.name: _entry(path, reader, tensor, packings) for tensor in reader.tensors}
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is no GGUF file, or a damaged one: {error}") from None
    return metadata, entries


def _opened(path: str | os.PathLike[str]) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError("reading GGUF files takes the gguf package: pip install 'marid[gguf]'") from None

    class Reader(GGUFReader):
        """The package's own, which reads no further than the file goes."""

        values = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if offset + int(count) * numpy.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends before what it says that it has")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            self.values += 1
            if self.values > _MOST_VALUES:
                raise ValueError(f"it has more than {_MOST_VALUES} values of metadata")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        with numpy.errstate(over="ignore"):  # of sizes and offsets, which are checked here
            return Reader(path, "c")
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no GGUF file, or a damaged one: {error}") from None


def _entry(path: Any, reader: Any, tensor: Any, packings: dict[str, tuple[int, int]]) -> Entry:
    kind, name = tensor.tensor_type.name, tensor.name
    if reader.byte_order != "I":
        raise ValueError(f"{path} is for machines of the other byte order")
    shape = [int(size) for size in reversed(tensor.shape.tolist())]
    if len(shape) > _DIMENSIONS:
        raise ValueError(f"tensor {name!r} in {path} has {len(shape)} dimensions")
    if kind in packings:
        elements, size = packings[kind]
        if not shape or shape[-1] % elements:
            raise ValueError(f"tensor {name!r} in {path} has rows that are no whole blocks of {kind}")
        shape[-1] = shape[-1] // elements * size
        dtype = torch.uint8
    elif kind in _ELEMENTS:
        dtype = _ELEMENTS[kind]
    else:
        known = ", ".join([*_ELEMENTS, *packings])
        raise ValueError(f"tensor {name!r} in {path} is packed as {kind}; what is known here: {known}")
    count, start = math.prod(shape), reader.data_offset + int(tensor.field.parts[5][0])
    if start + count * dtype.itemsize > len(reader.data):
        raise ValueError(f"tensor {name!r} in {path} has fewer bytes than its elements take")
    if count:
        data = torch.frombuffer(reader.data, dtype=dtype, count=count, offset=start)
    else:
        data = torch.empty(0, dtype=dtype, device="cpu")
    found = data.view(shape)
    return PackedEntry(found, start, kind) if kind in packings else Entry(found, start)
