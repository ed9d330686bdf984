"""Messages on the wire: a msgpack header and raw segments, each bounded before anything is allocated for it.

A message is one ZeroMQ multipart message, ``[header, segment 0, segment 1, ...]``. The header is a map of plain data:
None, booleans, numbers, texts, bytes, lists and maps with texts as keys; no msgpack extensions, so nothing in it can
become an object of another kind. Segments are bytes as they lie in memory and are neither copied nor looked into here.

What comes from the other side is never trusted: whatever does not fit raises ``WireError``.
"""

from __future__ import annotations

from typing import Any

import msgpack

from marid.errors import WireError

VERSION = 4
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
