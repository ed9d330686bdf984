"""Messages on the wire: a msgpack header and raw segments, each bounded before anything is allocated for it.

A message is one ZeroMQ multipart message, ``[header, segment 0, segment 1, ...]``. The header is a map of plain data:
None, booleans, numbers, texts, bytes, lists and maps with texts as keys; no msgpack extensions, so nothing in it can
become an object of another kind. Segments are bytes as they lie in memory and are neither copied nor looked into here.

What comes from the other side is never trusted: whatever does not fit raises ``WireError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from marid.errors import WireError
from marid.graph.node import Draw

__all__ = [
    "HEADER_BYTES",
    "MEMORY_FORMATS",
    "MISPREDICTIONS",
    "SEGMENTS",
    "SEGMENT_BYTES",
    "VERSION",
    "Buffer",
    "as_bytes",
    "as_int",
    "as_list",
    "as_text",
    "decode",
    "dtype_name",
    "dtype_named",
    "encode",
    "number_from",
    "number_to",
    "pack_plain",
    "unpack_plain",
]

VERSION = 2
"""Of the protocol; both sides must speak the same one."""

HEADER_BYTES = 1 << 20
"""The longest header."""
SEGMENT_BYTES = 16 << 20
"""The longest segment; ZeroMQ drops a connection that announces a longer one, before memory is taken for it."""
SMALL_BYTES = 16
"""What is read of a tensor with no more bytes is in the header: a segment takes longer than a number does."""
SEGMENTS = 256
"""The most segments in one message."""
MISPREDICTIONS = 64
"""The most results in one answer of which it is said that they were not laid out as recorded."""

_ITEMS = 1 << 14  # in one list of a header: a list takes 8 bytes an item as soon as its length has been read
_DEPTH = 32

Buffer = Any
"""What has the buffer protocol: bytes, a memoryview, a ``zmq.Frame``."""


def encode(header: dict[str, Any]) -> bytes:
    """A header as bytes. Raises ``WireError`` for one that the other side would refuse as too long."""
    try:
        data = _bytes(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a message cannot be sent: {error}") from None
    if len(data) > HEADER_BYTES:
        raise WireError(f"a message header of {len(data)} bytes is longer than the {HEADER_BYTES} that are allowed")
    return data


def decode(data: Buffer) -> dict[str, Any]:
    """A header from bytes. Raises ``WireError`` for what is not one."""
    size = memoryview(data).nbytes
    if size > HEADER_BYTES:
        raise WireError(f"a message header has {size} bytes, and may have {HEADER_BYTES}")
    header = unpack_plain(data, _ITEMS)
    if type(header) is not dict:
        raise WireError("a message header is not a map")
    version = header.get("v")
    if type(version) is not int or version != VERSION:
        spoken = str(version)[:20] if type(version) is int else "none"
        raise WireError(f"the other side speaks version {spoken} of the protocol, this side version {VERSION}")
    return header


def pack_plain(value: Any) -> bytes:
    """Plain data as bytes, the same bytes for equal data."""
    return _bytes(value)


def _bytes(value: Any) -> bytes:
    data = msgpack.packb(value)
    assert data is not None
    return data


def unpack_plain(data: Buffer, items: int) -> Any:
    """Plain data from bytes, with at most ``items`` in each list. Raises ``WireError``."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=items,
            max_map_len=min(items, 1024),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:  # texts that are no UTF-8 are ValueErrors
        raise WireError(f"data cannot be read: {type(error).__name__}: {str(error)[:200]}") from None
    if not _is_shallow(value):
        raise WireError(f"data is nested deeper than {_DEPTH}, or has an extension in it")
    return value


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(_DEPTH + 1):
        below: list[Any] = []
        for one in level:
            for item in one.values() if type(one) is dict else one:
                kind = type(item)
                if kind is list or kind is dict:
                    below.append(item)
                elif kind is msgpack.ExtType or kind is msgpack.Timestamp:
                    return False
        if not below:
            return True
        level = below
    return False


# --- parts of messages -----------------------------------------------------------------------------------------------


def as_int(value: Any, low: int, high: int, what: str) -> int:
    """A whole number from ``low`` to ``high``. Raises ``WireError`` naming ``what``."""
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{what} must be a whole number from {low} to {high}")
    return value


def as_bytes(value: Any, size: int, what: str) -> bytes:
    """Exactly ``size`` bytes. Raises ``WireError``."""
    if type(value) is not bytes or len(value) != size:
        raise WireError(f"{what} must be {size} bytes")
    return value


def as_text(value: Any, longest: int, what: str) -> str:
    """A text of at most ``longest`` characters. Raises ``WireError``."""
    if type(value) is not str or len(value) > longest:
        raise WireError(f"{what} must be a text of at most {longest} characters")
    return value


def as_list(value: Any, longest: int, what: str) -> list[Any]:
    """A list of at most ``longest`` items. Raises ``WireError``."""
    if type(value) is not list or len(value) > longest:
        raise WireError(f"{what} must be a list of at most {longest} items")
    return value


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
        *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
"""They travel as positions in this."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a dtype travels by. Raises ``WireError`` for one that does not travel (quantised ones)."""
    name = _NAMES.get(dtype)
    if name is None:
        raise WireError(f"tensors of {dtype} cannot be sent")
    return name


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name. Raises ``WireError``."""
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"there is no dtype {str(name)[:40]!r}")
    return dtype


# --- the numbers of a run --------------------------------------------------------------------------------------------

_WORDS = 1 << 62  # a position in a random stream
_NUMBERS = 1 << 12  # in one list of numbers


def number_to(value: Any) -> Any:
    """A parameter of a program as plain data: a number, a list of numbers, or a random position."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value
    if kind is tuple or kind is list:
        return list(value)
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is Draw:
        return {"d": [value.seed, value.offset, value.spare, value.end, value.end_spare]}
    raise WireError(f"a {kind.__name__} is no number of a program")


def number_from(value: Any) -> Any:
    """What ``number_to`` was given. Raises ``WireError``."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value
    if kind is list:
        if len(value) > _NUMBERS or not all(type(item) in (int, float, bool) for item in value):
            raise WireError("a list of numbers has something else in it, or is too long")
        return tuple(value)
    if kind is dict and len(value) == 1:
        if "c" in value:
            parts = as_list(value["c"], 2, "a complex number")
            if len(parts) == 2 and all(type(part) is float for part in parts):
                return complex(*parts)
        elif "d" in value:
            return _draw(as_list(value["d"], 5, "a random position"))
    raise WireError("a number of a run is none")


def _draw(parts: Sequence[Any]) -> Draw:
    if len(parts) != 5:
        raise WireError("a random position has five parts")
    seed = as_int(parts[0], 0, (1 << 64) - 1, "a seed")
    offset, end = (as_int(part, 0, _WORDS, "a random position") for part in (parts[1], parts[3]))
    spare, end_spare = (as_int(part, -1, _WORDS, "a random position") for part in (parts[2], parts[4]))
    return Draw(seed, offset, spare, end, end_spare)
