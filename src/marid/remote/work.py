"""What the client has a worker do, one step each: a step can be sent, sent again, taken back, and done once more on a
worker that has lost everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from marid.engine.protocol import Geometry as Layout
from marid.engine.protocol import GiveBack
from marid.graph.node import Node, finish
from marid.graph.program import Task, differ
from marid.remote.answers import as_tensor
from marid.remote.buffers import Block, RemoteBuffer
from marid.remote.contents import Content, FileContent
from marid.remote.known import Sized
from marid.remote.link import Link
from marid.remote.programs import changes_between, packed
from marid.remote.requests import (
    Again,
    Call,
    Chunk,
    Fetch,
    Free,
    Geometry,
    Handle,
    Program,
    Request,
    Roles,
    Run,
    Sizes,
    Switch,
    Upload,
)
from marid.remote.residency import ORDER
from marid.remote.roles import role_of
from marid.remote.switches import Switches, current
from marid.report.hooks import ran
from marid.report.traffic import traffic

__all__ = [
    "AskWork",
    "CallWork",
    "End",
    "FetchWork",
    "FreeWork",
    "ReplayWork",
    "RolesWork",
    "RunWork",
    "Sent",
    "UploadWork",
    "Work",
    "upload_requests",
]


_TOLD = 4000  # handles in one request
_TRIES = 8  # times that a worker may say that it lacks what it was just sent


class End(Protocol):
    """A worker that copies come from or go to, as a client has it."""

    @property
    def link(self) -> Link:
        """The session on it, now."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether it was disconnected for good."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether what it held is gone, or not all there again."""
        ...

    def revive(self) -> None:
        """See to it that it does what it can: take another worker if this one is lost, and say again what may not have
        been heard. Does nothing while another thread is at it."""
        ...


@dataclass
class Sent:
    """What a session has been told of: programs, geometries and chunks by digest, the last geometry and run of each
    program, and the switches that hold (None where that is not known)."""

    programs: set[bytes] = field(default_factory=set)
    geometries: set[tuple[bytes, bytes]] = field(default_factory=set)
    chunks: set[bytes] = field(default_factory=set)
    last: dict[bytes, Sized] = field(default_factory=dict)
    runs: dict[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    switches: Switches | None = field(default_factory=Switches)


class Work:
    """One step.

    ``reads``, ``writes`` and ``makes`` are blocks: those it takes as they are, those it changes, and new ones;
    ``inputs`` and ``handles`` the handles it needs and makes; ``contents`` and ``params`` what the client keeps for it,
    ``held`` the bytes that another worker keeps for it. ``seconds`` is about what it took. ``site`` is the user's line
    it is for. ``answered`` once it was done.
    """

    reads: tuple[Block, ...] = ()
    writes: tuple[Block, ...] = ()
    makes: tuple[Block, ...] = ()
    inputs: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()
    contents: tuple[Content | FileContent, ...] = ()
    held = 0
    params: tuple[Any, ...] = ()
    seconds = 0.0
    site: Any = None
    answered = False
    blamable = False
    """Whether a worker may be lost because of it."""
    tries = 0
    """How often it was sent again because the worker lacked something."""
    sources: tuple[End, ...] = ()
    """Other workers that it needs something of."""
    lasting = True
    """Whether it has to be done again on a worker that has lost everything."""

    def requests(self, sent: Sent) -> list[Request]:
        """What to ask for, the step itself last."""
        raise NotImplementedError

    def done(self, result: Any) -> None:  # noqa: ARG002
        """It was done, with this answer."""
        self.answered = True

    def refused(self) -> bool:
        """Something before it has failed: whether it is to be sent again as it is."""
        return True

    def spoil(self, error: Exception) -> None:
        """It was refused, and is not sent again: let whoever reads what it was to make get ``error``."""
        for block in self.makes:
            block.error = error

    def retry(self, failure: dict[str, Any]) -> bool:
        """It has failed: whether it is to be sent again all the same."""
        self.tries += 1
        return "missing" in failure and self.tries <= _TRIES

    def say_again(self) -> None:
        """It is waited for: say again beside it what may not have been heard."""


class FreeWork(Work):
    """Forget handles."""

    lasting = False

    def __init__(self, handles: tuple[int, ...]) -> None:
        self.freed = handles

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        return [Free(self.freed)]


class UploadWork(Work):
    """A tensor of the host becomes one of the worker."""

    def __init__(self, buffer: RemoteBuffer, content: Content | FileContent) -> None:
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = buffer.block.site
        self.geometry = buffer.geometry
        self.contents = (content,)
        self._block = buffer.block
        self._kept: Any = buffer  # so that it is not freed before it is there
        self.questions: Sequence[Work] | None = None if content.digests else ()
        """What the worker was asked about its chunks; None before that."""

    def done(self, result: Any) -> None:
        super().done(result)
        self._kept = None
        self.contents[0].spool()
        traffic.moved(self.site, role_of(self._block), up=self.contents[0].nbytes)

    def requests(self, sent: Sent) -> list[Request]:
        return upload_requests(self.contents[0], self.geometry, self.handles[0], sent)


def upload_requests(content: Content | FileContent, of: Layout, handle: int, sent: Sent) -> list[Request]:
    """What makes ``content`` a tensor: its bytes, or the chunks that the worker lacks and their names."""
    if not content.digests:
        return [Upload(handle, of.dtype, of.shape, of.stride, tuple(content.pieces()))]
    found: list[Chunk] = []
    missing = [digest for digest in content.digests if digest not in sent.chunks]
    if missing:
        for digest, piece in zip(content.digests, content.pieces(), strict=True):
            if digest not in sent.chunks:
                sent.chunks.add(digest)
                found.append(Chunk(digest, piece))
    traffic.add(deduplicated=content.nbytes - sum(memoryview(chunk.data).nbytes for chunk in found))
    return [*found, Upload(handle, of.dtype, of.shape, of.stride, digests=content.digests)]


class RunWork(Work):
    """A program of recorded operations. Until it is done its nodes count as run, and what they forgot is kept here."""

    blamable = True

    def __init__(self, sized: Sized, inputs: list[RemoteBuffer], params: list[Any], base: int, site: Any) -> None:
        known = sized.known
        self.sized = sized
        self.params = tuple(params)
        self.base = base
        self.site = site
        self.inputs = tuple([buffer.handle for buffer in inputs])
        self.handles = tuple([base + slot for slot in known.program.output_slots])
        self.reads = tuple(dict.fromkeys([buffer.block for buffer in inputs]))
        self.writes = tuple(dict.fromkeys([inputs[place].block for place in known.written_inputs]))
        self.blocks: dict[int, Block] = {}
        """Of its slots, by root, until it is done."""
        self.stopped: tuple[int, tuple[int, ...]] | None = None
        """Where it has failed, and the slots that existed then."""
        self.task: Task | None = None
        self.queued = time.perf_counter() if ran.listeners else 0.0
        self._switches = current()
        self._give_back: GiveBack | None = None
        self._kept: list[tuple[Any, ...]] = []

    def record(self, task: Task, give_back: GiveBack) -> None:
        """Let the nodes of ``task`` count as run."""
        self.task, self._give_back = task, give_back
        self._kept += [(node, node.args, node.kwargs, node.after, node.overwrites) for node in task.nodes]
        for node in task.nodes:
            finish(node)

    def requests(self, sent: Sent) -> list[Request]:
        known, found = self.sized.known, _switch(self._switches, sent)
        if known.digest not in sent.programs:
            sent.programs.add(known.digest)
            found.append(Program(known.digest, packed(known.body)))
        if (known.digest, self.sized.digest) not in sent.geometries:
            sent.geometries.add((known.digest, self.sized.digest))
            found.append(_geometry(self.sized, sent.last.get(known.digest)))
            sent.last[known.digest] = self.sized
        last = sent.runs.get(known.digest)
        sent.runs[known.digest] = self.inputs, self.params
        if self.stopped is not None or last is None:
            until, keep = self.stopped or (None, ())
            return [*found, Run(known.digest, self.sized.digest, self.inputs, self.params, self.base, until, keep)]
        inputs = tuple([(i, b) for i, (a, b) in enumerate(zip(last[0], self.inputs, strict=True)) if a != b])
        params = tuple([(i, b) for i, (a, b) in enumerate(zip(last[1], self.params, strict=True)) if differ(a, b)])
        return [*found, Again(known.digest, self.sized.digest, inputs, params, self.base)]

    def done(self, result: Any) -> None:
        super().done(result)
        self.forget()

    @property
    def recorded_nodes(self) -> list[Node]:
        """What stands for its instructions; nothing once it was done, also when it is done again on a successor."""
        return [] if self.task is None else self.task.nodes

    def forget(self) -> None:
        """The nodes are no longer its affair."""
        self.task = self._give_back = None
        self._kept.clear()
        self.blocks = {}

    def take_back(self) -> list[Node]:
        """It was not done, or not to its end: let its nodes be pending again."""
        assert self.task is not None
        assert self._give_back is not None
        nodes = self.task.nodes
        for value in self.task.outputs:
            value.concrete = None
        for node, args, kwargs, after, overwrites in self._kept:
            node.args, node.kwargs, node.after, node.overwrites = args, kwargs, after, overwrites
        self._give_back(nodes)
        return nodes

    def refused(self) -> bool:
        self.take_back()
        self.forget()
        return False

    def spoil(self, error: Exception) -> None:  # noqa: ARG002
        return None  # its nodes are pending again


class ReplayWork(RunWork):
    """A program under ``marid.compile``: there are no nodes that could be pending again, so what it was to write cannot
    be had when something before it has failed. It keeps its inputs until it is done."""

    def __init__(
        self, sized: Sized, inputs: list[RemoteBuffer], params: list[Any], base: int, site: Any, nodes: list[Node]
    ) -> None:
        super().__init__(sized, inputs, params, base, site)
        self.nodes = nodes
        self.buffers = list(inputs)
        """Its inputs and outputs, so that they are not freed before it is done."""

    @property
    def recorded_nodes(self) -> list[Node]:
        return self.nodes

    def forget(self) -> None:
        super().forget()
        self.buffers = []

    def refused(self) -> bool:
        return False

    def spoil(self, error: Exception) -> None:
        """Let whoever reads what it was to make or write get ``error``."""
        for block in (*self.makes, *self.writes):
            block.error = error
        self.forget()


class FetchWork(Work):
    """Bring the elements of a tensor in ``block``, or of a view (offset, shape, stride) of its memory, which have the
    ``expected`` type and shape; ``kept`` lives until then."""

    lasting = False
    blamable = True

    def __init__(
        self,
        handle: int,
        block: Block,
        view: Any,
        take: Callable[[torch.Tensor], None] | None,
        expected: tuple[torch.dtype, tuple[int, ...]],
        kept: Any = None,
    ) -> None:
        self.inputs = (handle,)
        self.reads = (block,)
        self._view = view
        self._take = take
        self._expected = expected
        self._kept = kept

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        return [Fetch(self.inputs[0], self._view)]

    def done(self, result: Any) -> None:
        tensor = as_tensor(result, *self._expected)
        super().done(tensor)
        if self._take is not None:
            self._take(tensor)

    def refused(self) -> bool:
        return False  # whoever reads asks again


class RolesWork(Work):
    """Say what memory is for."""

    lasting = False

    def __init__(self, roles: Iterable[tuple[int, Block]]) -> None:
        self._blocks = [(handle, block, block.role) for handle, block in roles if block.role in ORDER]
        for _, block, role in self._blocks:
            block.told = role

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        told = [(handle, role) for handle, _, role in self._blocks if role is not None]
        return [Roles(tuple(told[start : start + _TOLD])) for start in range(0, max(len(told), 1), _TOLD)]


class AskWork(Work):
    """A question that changes nothing. ``result`` is the answer."""

    lasting = False

    def __init__(self, request: Request) -> None:
        self._request = request
        self.result: Any = None

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        return [self._request]

    def done(self, result: Any) -> None:
        super().done(result)
        self.result = result


class CallWork(Work):
    """One operator, at once. ``result`` is what the worker answered."""

    blamable = True

    def __init__(
        self,
        operator: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        state: bytes | None,
        base: int,
        site: Any,
    ) -> None:
        self._request = Call(operator, args, kwargs, state, base)
        self.operator = operator
        self.inputs = tuple([arg.number for arg in _handles((*args, *(arg for _, arg in kwargs)))])
        self.base = base
        self.site = site
        self._switches = current()
        self.result: Any = None
        self.error: Exception | None = None

    def requests(self, sent: Sent) -> list[Request]:
        return [*_switch(self._switches, sent), self._request]

    def done(self, result: Any) -> None:
        super().done(result)
        self.result = result

    def refused(self) -> bool:
        return False  # whoever called asks again


def _geometry(sized: Sized, before: Sized | None) -> Request:
    """The specs of a program, or what of them is not as it was ``before``."""
    program = sized.known.digest
    changes = None if before is None else changes_between(before.specs, sized.specs)
    if before is None or changes is None or 2 * len(changes) > len(sized.specs):
        return Geometry(program, sized.digest, packed(sized.body))
    return Sizes(program, before.digest, sized.digest, changes)


def _switch(switches: Switches, sent: Sent) -> list[Request]:
    if switches == sent.switches:
        return []
    sent.switches = switches
    return [Switch(switches)]


def _handles(args: Iterable[Any]) -> Iterable[Handle]:
    for arg in args:
        if isinstance(arg, Handle):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _handles(arg)
