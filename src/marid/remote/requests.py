"""The requests of a session: what a client may ask a worker to do, one step of work each.

Each is written as a list that begins with its kind; bytes of tensors and of programs go into segments of the message,
of which the list has the position. ``request_readers`` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Spec
from marid.remote.residency import ORDER
from marid.remote.specs import spec_to
from marid.remote.switches import Switches, switches_to
from marid.remote.wire import (
    Buffer,
    dtype_name,
    number_to,
)

__all__ = [
    "GROUP_BYTES",
    "HANDLES",
    "Again",
    "Call",
    "Chunk",
    "Fetch",
    "Free",
    "Geometry",
    "Handle",
    "Have",
    "Join",
    "Leave",
    "Load",
    "Meet",
    "Pack",
    "Program",
    "Reduce",
    "Request",
    "Roles",
    "Run",
    "Sizes",
    "Stats",
    "Switch",
    "Take",
    "Upload",
    "spec_text",
    "write_requests",
]

HANDLES = 1 << 53
"""Handles are below this."""
GROUP_BYTES = 16


@dataclass(frozen=True, slots=True)
class Upload:
    """A tensor with this handle: ``data`` are its packed elements (``packing.py``), in pieces of at most
    ``SEGMENT_BYTES``; or ``digests`` name the chunks that they are, sent before (``Chunk``)."""

    handle: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: tuple[Buffer, ...] = ()
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a large tensor, named by the BLAKE3 of all of it, at most ``CHUNK_BYTES`` long."""

    digest: bytes
    data: Buffer


@dataclass(frozen=True, slots=True)
class Have:
    """Which of these chunks the worker lacks: the answer is a list of positions."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A program, to be named by ``digest`` from now on."""

    digest: bytes
    body: Buffer


@dataclass(frozen=True, slots=True)
class Geometry:
    """The specs of all slots of a program, to be named by ``digest``."""

    program: bytes
    digest: bytes
    body: Buffer


@dataclass(frozen=True, slots=True)
class Sizes:
    """The geometry ``digest`` of a program is as the geometry ``like``, but for the specs at these places: a size that
    changes at each run."""

    program: bytes
    like: bytes
    digest: bytes
    changes: tuple[tuple[int, Spec], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a program with these inputs and numbers; what escapes from slot i becomes handle ``base + i``.

    With ``until``, run only what is before that instruction, and keep what is in the slots ``keep``: what had failed,
    once more.
    """

    program: bytes
    geometry: bytes
    inputs: tuple[int, ...]
    params: tuple[Any, ...]
    base: int
    until: int | None = None
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Again:
    """Run a program as it was run last in this session, but for the inputs and numbers at these places."""

    program: bytes
    geometry: bytes
    inputs: tuple[tuple[int, int], ...]
    params: tuple[tuple[int, Any], ...]
    base: int

    def run(self, inputs: tuple[int, ...], params: tuple[Any, ...]) -> Run:
        """The run that is meant, given those of the last one. Raises ``WireError``."""
        handles, numbers = list(inputs), list(params)
        for changes, of in ((self.inputs, handles), (self.params, numbers)):
            for place, value in changes:
                if place >= len(of):
                    raise WireError(f"a run has no place {place}")
                of[place] = value
        return Run(self.program, self.geometry, tuple(handles), tuple(numbers), self.base)


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor of the session, as an argument."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run one operator now. Arguments are ``Handle``, numbers, texts, dtypes and lists of them; ``state`` is that of
    the CPU generator it draws from, or None. The n-th tensor it returns becomes handle ``base + n``."""

    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    state: bytes | None
    base: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send a tensor's elements, or those of a view of it: (offset in its memory, shape, stride), all in elements."""

    handle: int
    view: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """Forget handles; those that are not there are no error."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """As ``Have`` for the chunks of these bytes of a file, after the worker took from the file what it lacks: where
    it can see one of that name, and finds in it what the digests say."""

    path: str
    offset: int
    nbytes: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """The bytes of the tensor ``source``, packed, in memory of the host, become ``handle``: what others may collect."""

    handle: int
    source: int


@dataclass(frozen=True, slots=True)
class Take:
    """What another worker has packed, and is offered under this ticket, becomes a tensor of this geometry here."""

    handle: int
    ticket: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """Let the members of a group meet here: the answer is the port."""

    group: bytes
    timeout: int


@dataclass(frozen=True, slots=True)
class Join:
    """Form a group with others, who meet at ``host`` and ``port``, and reach this member at ``own``; waits for them."""

    group: bytes
    rank: int
    size: int
    host: str
    port: int
    own: str
    timeout: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """``handle`` becomes what ``source`` and those of the other members of a group are together; waits for them."""

    group: bytes
    operation: str
    handle: int
    source: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A group is not needed any more."""

    group: bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """What the worker holds and has done: the answer is a map."""


@dataclass(frozen=True, slots=True)
class Switch:
    """What kernels ask of their process is this from now on."""

    switches: Switches


@dataclass(frozen=True, slots=True)
class Roles:
    """What the memory of tensors is for, by handle: hints, of which those of handles that are not there are no
    error."""

    roles: tuple[tuple[int, str], ...]


Request = (
    Roles
    | Switch
    | Sizes
    | Again
    | Upload
    | Chunk
    | Have
    | Program
    | Geometry
    | Run
    | Call
    | Fetch
    | Free
    | Load
    | Pack
    | Take
    | Meet
    | Join
    | Reduce
    | Leave
    | Stats
)

# --- writing ---------------------------------------------------------------------------------------------------------


def write_requests(requests: Sequence[Request]) -> tuple[list[Any], list[Buffer]]:
    """The requests as plain data, and the segments that go with them."""
    segments: list[Buffer] = []
    return [_write(request, segments) for request in requests], segments


def _write(request: Request, segments: list[Buffer]) -> list[Any]:
    first = len(segments)
    if isinstance(request, Run):
        params = [number_to(param) for param in request.params]
        run = ["run", request.program, request.geometry, list(request.inputs), params, request.base]
        return run if request.until is None else [*run, request.until, list(request.keep)]
    if isinstance(request, Again):
        inputs = [part for pair in request.inputs for part in pair]
        params = [part for place, number in request.params for part in (place, number_to(number))]
        return ["again", request.program, request.geometry, inputs, params, request.base]
    if isinstance(request, Sizes):
        changes = [[place, spec_to(spec)] for place, spec in request.changes]
        return ["sizes", request.program, request.like, request.digest, changes]
    if isinstance(request, Roles):
        return ["roles", [part for handle, role in request.roles for part in (handle, ORDER.index(role))]]
    if isinstance(request, Switch):
        return ["switch", switches_to(request.switches)]
    if isinstance(request, Free):
        return ["free", list(request.handles)]
    if isinstance(request, Fetch):
        if request.view is None:
            return ["fetch", request.handle]
        offset, shape, stride = request.view
        return ["fetch", request.handle, offset, list(shape), list(stride)]
    if isinstance(request, Upload):
        segments += request.data
        geometry = [dtype_name(request.dtype), list(request.shape), list(request.stride)]
        return ["upload", request.handle, *geometry, len(request.data), first, list(request.digests)]
    if isinstance(request, Chunk):
        segments.append(request.data)
        return ["chunk", request.digest, first]
    if isinstance(request, Have):
        return ["have", list(request.digests)]
    if isinstance(request, Program):
        segments.append(request.body)
        return ["program", request.digest, first]
    if isinstance(request, Geometry):
        segments.append(request.body)
        return ["geometry", request.program, request.digest, first]
    if isinstance(request, Call):
        args = [_write_argument(arg) for arg in request.args]
        kwargs = [[name, _write_argument(arg)] for name, arg in request.kwargs]
        return ["call", request.operator, args, kwargs, request.state, request.base]
    if isinstance(request, Load):
        return ["load", request.path, request.offset, request.nbytes, list(request.digests)]
    if isinstance(request, Pack):
        return ["pack", request.handle, request.source]
    if isinstance(request, Take):
        geometry = [dtype_name(request.dtype), list(request.shape), list(request.stride)]
        return ["take", request.handle, request.ticket, *geometry]
    if isinstance(request, Meet):
        return ["meet", request.group, request.timeout]
    if isinstance(request, Join):
        where = [request.host, request.port, request.own, request.timeout]
        return ["join", request.group, request.rank, request.size, *where]
    if isinstance(request, Reduce):
        return ["reduce", request.group, request.operation, request.handle, request.source]
    if isinstance(request, Leave):
        return ["leave", request.group]
    return ["stats"]


def _write_argument(arg: Any) -> Any:
    if isinstance(arg, Handle):
        return {"h": arg.number}
    if isinstance(arg, (list, tuple)):
        return [_write_argument(item) for item in arg]
    if isinstance(arg, torch.dtype):
        return {"t": dtype_name(arg)}
    if isinstance(arg, torch.memory_format):
        return {"m": str(arg).removeprefix("torch.")}
    if arg is torch.strided:
        return {"y": True}
    return arg if arg is None or type(arg) in (bool, str) else number_to(arg)


def spec_text(spec: Spec) -> str:
    """A spec for people."""
    return f"{spec.dtype}{list(spec.shape)}"
