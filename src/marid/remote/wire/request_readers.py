"""Requests as they come from a client, read by a worker: nothing in them is taken for granted.

Everything raises ``WireError`` that is not as ``requests.py`` writes it, or is larger than it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marid.errors import WireError
from marid.remote.wire.chunks import CHUNK_BYTES
from marid.remote.wire.codec import (
    SEGMENT_BYTES,
    Buffer,
    as_bytes,
    as_int,
    as_list,
    as_text,
    dtype_named,
    number_from,
)
from marid.remote.wire.kernel_settings import switches_from
from marid.remote.wire.packing import packing_of
from marid.remote.wire.programs import BODY_BYTES, DIGEST_BYTES
from marid.remote.wire.requests import (
    GROUP_BYTES,
    HANDLES,
    Again,
    Call,
    Chunk,
    Fetch,
    Free,
    Geometry,
    Handle,
    Have,
    Join,
    Leave,
    Load,
    Meet,
    Pack,
    Program,
    Reduce,
    Request,
    Roles,
    Run,
    Sizes,
    Stats,
    Switch,
    Take,
    Upload,
)
from marid.remote.wire.specs import sizes_from, spec_from
from marid.remote.worker.collectives import OPERATIONS, checked_host
from marid.remote.worker.copies import TICKET_BYTES
from marid.remote.worker.residency import ORDER

__all__ = ["read_requests"]

_INPUTS = 1 << 14
_CHUNKS = 1 << 14
_ARGUMENTS = 1 << 12
_STATE_BYTES = torch.Generator().get_state().numel()


def read_requests(data: Any, segments: Sequence[Buffer]) -> list[Request]:
    """The requests of a message. Raises ``WireError`` when any of them is malformed."""
    requests = [_read(one, segments) for one in as_list(data, 1 << 14, "requests")]
    if not requests:
        raise WireError("a message has no requests")
    return requests


def _read(data: Any, segments: Sequence[Buffer]) -> Request:
    if type(data) is not list or not data or type(data[0]) is not str or data[0] not in _READERS:
        raise WireError("a request is of no known kind")
    reader, counts = _READERS[data[0]]
    if len(data) - 1 not in counts:
        raise WireError(f"a request {data[0]!r} has {len(data) - 1} fields")
    return reader(data[1:], segments)


def _segment(position: Any, segments: Sequence[Buffer], longest: int) -> Buffer:
    segment = segments[as_int(position, 0, len(segments) - 1, "a segment")]
    if memoryview(segment).nbytes > longest:
        raise WireError(f"a segment has {memoryview(segment).nbytes} bytes, and may have {longest}")
    return segment


def _handle(value: Any) -> int:
    return as_int(value, 0, HANDLES, "a handle")


def _digest(value: Any) -> bytes:
    return as_bytes(value, DIGEST_BYTES, "a digest")


def _digests(value: Any) -> tuple[bytes, ...]:
    return tuple([_digest(one) for one in as_list(value, _CHUNKS, "digests")])


def _upload(data: list[Any], segments: Sequence[Buffer]) -> Upload:
    dtype = dtype_named(data[1])
    shape, stride = sizes_from(data[2], data[3], dtype)
    count = as_int(data[4], 0, len(segments), "a number of segments")
    first = as_int(data[5], 0, len(segments), "a segment")
    digests = _digests(data[6])
    pieces = tuple([_segment(first + i, segments, SEGMENT_BYTES) for i in range(count)])
    nbytes = packing_of(shape, stride, dtype).nbytes
    if digests:
        if pieces or len(digests) != -(-nbytes // CHUNK_BYTES):
            raise WireError("an upload has another number of chunks than its bytes take")
    elif sum(memoryview(piece).nbytes for piece in pieces) != nbytes:
        raise WireError("an upload has more or fewer bytes than its elements take")
    return Upload(_handle(data[0]), dtype, shape, stride, pieces, digests)


def _chunk(data: list[Any], segments: Sequence[Buffer]) -> Chunk:
    return Chunk(_digest(data[0]), _segment(data[1], segments, CHUNK_BYTES))


def _have(data: list[Any], _segments: Sequence[Buffer]) -> Have:
    return Have(_digests(data[0]))


def _program(data: list[Any], segments: Sequence[Buffer]) -> Program:
    return Program(_digest(data[0]), _segment(data[1], segments, BODY_BYTES))


def _geometry(data: list[Any], segments: Sequence[Buffer]) -> Geometry:
    return Geometry(_digest(data[0]), _digest(data[1]), _segment(data[2], segments, BODY_BYTES))


def _run(data: list[Any], _segments: Sequence[Buffer]) -> Run:
    inputs = as_list(data[2], _INPUTS, "inputs")
    for handle in inputs:
        if type(handle) is not int:
            raise WireError("an input is no handle")
    params = tuple([number_from(param) for param in as_list(data[3], _INPUTS, "numbers")])
    until = None if len(data) == 5 else as_int(data[5], 0, HANDLES, "an instruction")
    keep = [as_int(slot, 0, HANDLES, "a slot") for slot in as_list(data[6], _INPUTS, "slots")] if len(data) == 7 else []
    return Run(_digest(data[0]), _digest(data[1]), tuple(inputs), params, _handle(data[4]), until, tuple(keep))


def _call(data: list[Any], _segments: Sequence[Buffer]) -> Call:
    args = tuple([_read_argument(arg) for arg in as_list(data[1], 64, "arguments")])
    kwargs = []
    for pair in as_list(data[2], 64, "named arguments"):
        if len(as_list(pair, 2, "a named argument")) != 2:
            raise WireError("a named argument has a name and a value")
        kwargs.append((as_text(pair[0], 64, "a name"), _read_argument(pair[1])))
    state = None if data[3] is None else as_bytes(data[3], _STATE_BYTES, "the state of a generator")
    return Call(as_text(data[0], 256, "an operator"), args, tuple(kwargs), state, _handle(data[4]))


_MEMORY_FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.preserve_format)} | {
    str(f).removeprefix("torch."): f for f in (torch.channels_last, torch.channels_last_3d)
}


def _read_argument(data: Any, depth: int = 0) -> Any:
    if data is None or type(data) in (bool, str):
        return data
    if type(data) is list:
        if depth > 1 or len(data) > _ARGUMENTS:
            raise WireError("a list of arguments is too long, or nested")
        return [_read_argument(item, depth + 1) for item in data]
    if type(data) is dict and len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "h":
            return Handle(_handle(value))
        if tag == "t":
            return dtype_named(value)
        if tag == "m" and type(value) is str and value in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[value]
        if tag == "y":
            return torch.strided
    return number_from(data)


def _again(data: list[Any], _segments: Sequence[Buffer]) -> Again:
    inputs, params = as_list(data[2], 2 * _INPUTS, "inputs"), as_list(data[3], 2 * _INPUTS, "numbers")
    if len(inputs) % 2 or len(params) % 2:
        raise WireError("a change has a place and a value")
    places = [as_int(place, 0, HANDLES, "a place") for place in (*inputs[::2], *params[::2])]
    handles = [_handle(handle) for handle in inputs[1::2]]
    numbers = [number_from(number) for number in params[1::2]]
    count = len(handles)
    changed = tuple(zip(places[:count], handles, strict=True)), tuple(zip(places[count:], numbers, strict=True))
    return Again(_digest(data[0]), _digest(data[1]), *changed, _handle(data[4]))


def _sizes(data: list[Any], _segments: Sequence[Buffer]) -> Sizes:
    changes = []
    for pair in as_list(data[3], _INPUTS, "changes"):
        if len(as_list(pair, 2, "a change")) != 2:
            raise WireError("a change has a place and a spec")
        changes.append((as_int(pair[0], 0, HANDLES, "a place"), spec_from(pair[1])))
    return Sizes(_digest(data[0]), _digest(data[1]), _digest(data[2]), tuple(changes))


def _switch(data: list[Any], _segments: Sequence[Buffer]) -> Switch:
    return Switch(switches_from(data[0]))


def _roles(data: list[Any], _segments: Sequence[Buffer]) -> Roles:
    parts = as_list(data[0], 2 * _INPUTS, "roles")
    if len(parts) % 2:
        raise WireError("each handle has a role")
    ranks = [as_int(rank, 0, len(ORDER) - 1, "a role") for rank in parts[1::2]]
    return Roles(tuple([(_handle(handle), ORDER[rank]) for handle, rank in zip(parts[::2], ranks, strict=True)]))


def _fetch(data: list[Any], _segments: Sequence[Buffer]) -> Fetch:
    if len(data) == 1:
        return Fetch(_handle(data[0]))
    shape, stride = sizes_from(data[2], data[3], torch.uint8)  # checked again when the dtype is known
    return Fetch(_handle(data[0]), (as_int(data[1], 0, HANDLES, "an offset"), shape, stride))


def _free(data: list[Any], _segments: Sequence[Buffer]) -> Free:
    return Free(tuple([_handle(handle) for handle in as_list(data[0], _INPUTS, "handles")]))


def _load(data: list[Any], _segments: Sequence[Buffer]) -> Load:
    digests = _digests(data[3])
    offset, nbytes = (as_int(value, 0, 1 << 48, "a place in a file") for value in data[1:3])
    if len(digests) != -(-nbytes // CHUNK_BYTES):
        raise WireError("so many bytes of a file have another number of chunks")
    return Load(as_text(data[0], 4096, "a path"), offset, nbytes, digests)


def _pack(data: list[Any], _segments: Sequence[Buffer]) -> Pack:
    return Pack(_handle(data[0]), _handle(data[1]))


def _take(data: list[Any], _segments: Sequence[Buffer]) -> Take:
    dtype = dtype_named(data[2])
    ticket = as_bytes(data[1], TICKET_BYTES, "a ticket")
    return Take(_handle(data[0]), ticket, dtype, *sizes_from(data[3], data[4], dtype))


def _group(value: Any) -> bytes:
    return as_bytes(value, GROUP_BYTES, "a group")


def _meet(data: list[Any], _segments: Sequence[Buffer]) -> Meet:
    return Meet(_group(data[0]), as_int(data[1], 1, 3600, "a timeout"))


def _join(data: list[Any], _segments: Sequence[Buffer]) -> Join:
    size = as_int(data[2], 1, 4096, "a number of members")
    rank = as_int(data[1], 0, size - 1, "a rank")
    host, own = (checked_host(as_text(text, 253, "a host")) for text in (data[3], data[5]))
    port = as_int(data[4], 1, 65535, "a port")
    return Join(_group(data[0]), rank, size, host, port, own, as_int(data[6], 1, 3600, "a timeout"))


def _reduce(data: list[Any], _segments: Sequence[Buffer]) -> Reduce:
    operation = as_text(data[1], 16, "an operation")
    if operation not in OPERATIONS:
        raise WireError("a way to reduce is none")
    return Reduce(_group(data[0]), operation, _handle(data[2]), _handle(data[3]))


def _leave(data: list[Any], _segments: Sequence[Buffer]) -> Leave:
    return Leave(_group(data[0]))


def _stats(_data: list[Any], _segments: Sequence[Buffer]) -> Stats:
    return Stats()


_READERS = {
    "upload": (_upload, {7}),
    "chunk": (_chunk, {2}),
    "have": (_have, {1}),
    "program": (_program, {2}),
    "geometry": (_geometry, {3}),
    "run": (_run, {5, 7}),
    "call": (_call, {5}),
    "fetch": (_fetch, {1, 4}),
    "free": (_free, {1}),
    "load": (_load, {4}),
    "pack": (_pack, {2}),
    "take": (_take, {5}),
    "meet": (_meet, {2}),
    "join": (_join, {7}),
    "reduce": (_reduce, {4}),
    "leave": (_leave, {1}),
    "stats": (_stats, {0}),
    "switch": (_switch, {1}),
    "roles": (_roles, {1}),
    "sizes": (_sizes, {4}),
    "again": (_again, {5}),
}
