"""The requests of a session: what a client may ask a worker to do, one step of work each.

Each is written as a list that begins with its kind; bytes of tensors and of programs go into segments of the message,
of which the list has the position. ``request_readers`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Spec
from marid.remote.wire.codec import (
    Buffer,
    dtype_name,
    number_to,
)
from marid.remote.wire.kernel_settings import Switches, switches_to
from marid.remote.wire.specs import spec_to
from marid.remote.worker.residency import ORDER

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
    """A program, to be named from now on by the digest of its body, which is ``packed``."""

    digest: bytes
    body: Buffer


@dataclass(frozen=True, slots=True)
class Geometry:
    """The specs of all slots of a program, to be named by the digest of their body, which is ``packed``."""

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
    return [_WRITERS[type(request)](request, segments) for request in requests], segments


def _geometry_to(of: Upload | Take) -> list[Any]:
    return [dtype_name(of.dtype), list(of.shape), list(of.stride)]


def _segment(data: Buffer, segments: list[Buffer]) -> int:
    segments.append(data)
    return len(segments) - 1


def _upload(of: Upload, segments: list[Buffer]) -> list[Any]:
    first = len(segments)
    segments += of.data
    return ["upload", of.handle, *_geometry_to(of), len(of.data), first, list(of.digests)]


def _run(of: Run, _segments: list[Buffer]) -> list[Any]:
    run = ["run", of.program, of.geometry, list(of.inputs), [number_to(param) for param in of.params], of.base]
    return run if of.until is None else [*run, of.until, list(of.keep)]


def _again(of: Again, _segments: list[Buffer]) -> list[Any]:
    inputs = [part for pair in of.inputs for part in pair]
    params = [part for place, number in of.params for part in (place, number_to(number))]
    return ["again", of.program, of.geometry, inputs, params, of.base]


def _call(of: Call, _segments: list[Buffer]) -> list[Any]:
    args = [_write_argument(arg) for arg in of.args]
    return ["call", of.operator, args, [[name, _write_argument(arg)] for name, arg in of.kwargs], of.state, of.base]


def _fetch(of: Fetch, _segments: list[Buffer]) -> list[Any]:
    if of.view is None:
        return ["fetch", of.handle]
    offset, shape, stride = of.view
    return ["fetch", of.handle, offset, list(shape), list(stride)]


def _sizes(of: Sizes, _segments: list[Buffer]) -> list[Any]:
    return ["sizes", of.program, of.like, of.digest, [[place, spec_to(spec)] for place, spec in of.changes]]


def _roles(of: Roles, _segments: list[Buffer]) -> list[Any]:
    return ["roles", [part for handle, role in of.roles for part in (handle, ORDER.index(role))]]


_WRITERS: dict[type, Callable[[Any, list[Buffer]], list[Any]]] = {
    Upload: _upload,
    Chunk: lambda of, segments: ["chunk", of.digest, _segment(of.data, segments)],
    Have: lambda of, _: ["have", list(of.digests)],
    Program: lambda of, segments: ["program", of.digest, _segment(of.body, segments)],
    Geometry: lambda of, segments: ["geometry", of.program, of.digest, _segment(of.body, segments)],
    Run: _run,
    Call: _call,
    Fetch: _fetch,
    Free: lambda of, _: ["free", list(of.handles)],
    Load: lambda of, _: ["load", of.path, of.offset, of.nbytes, list(of.digests)],
    Pack: lambda of, _: ["pack", of.handle, of.source],
    Take: lambda of, _: ["take", of.handle, of.ticket, *_geometry_to(of)],
    Meet: lambda of, _: ["meet", of.group, of.timeout],
    Join: lambda of, _: ["join", of.group, of.rank, of.size, of.host, of.port, of.own, of.timeout],
    Reduce: lambda of, _: ["reduce", of.group, of.operation, of.handle, of.source],
    Leave: lambda of, _: ["leave", of.group],
    Stats: lambda _of, _: ["stats"],
    Switch: lambda of, _: ["switch", switches_to(of.switches)],
    Roles: _roles,
    Sizes: _sizes,
    Again: _again,
}


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
