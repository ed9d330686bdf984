"""What the client has a worker do, one step each: a step can be sent, sent again, taken back, and done once more on a
worker that has lost everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from marid.engine.plain import as_int, as_list, as_text, spec_from
from marid.engine.protocol import Called, Returned
from marid.errors import WireError
from marid.execute.residency import ROLES
from marid.graph.arguments import leaves, map_leaves, placed
from marid.graph.node import Operation, Spec, Value
from marid.remote.client.blocks import Block, Memory, RemoteBuffer, extent_of, role_of
from marid.remote.client.contents import Content, FileContent
from marid.remote.client.link import Link
from marid.remote.wire.fields import Handle
from marid.remote.wire.kernel_settings import KernelSettings, current
from marid.remote.wire.replies import as_tensor
from marid.remote.wire.requests import Call, Configure, Fetch, Free, Request, Roles
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site

_ROLES = 4000  # handles in one request
_TRIES = 8  # times that a worker may say that it lacks what it was just sent


class Peer(Protocol):
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
    """What a session was sent: programs, geometries and chunks by digest, the last geometry and run of each
    program, and the kernels' settings that hold (None where that is not known)."""

    programs: set[bytes] = field(default_factory=set)
    geometries: set[tuple[bytes, bytes]] = field(default_factory=set)
    chunks: set[bytes] = field(default_factory=set)
    last: dict[bytes, tuple[bytes, tuple[Spec | None, ...]]] = field(default_factory=dict)
    runs: dict[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    settings: KernelSettings | None = field(default_factory=KernelSettings)


class Step:
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
    may_crash = False
    """Whether a worker may be lost because of it."""
    tries = 0
    """How often it was sent again because the worker lacked something."""
    sources: tuple[Peer, ...] = ()
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

    def renotify(self) -> None:
        """It is waited for: say again beside it what may not have been heard."""


class FreeStep(Step):
    """Forget handles."""

    lasting = False

    def __init__(self, handles: tuple[int, ...]) -> None:
        self.freed = handles

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        return [Free(self.freed)]


class FetchStep(Step):
    """Bring the elements of a tensor in ``block``, or of a view (offset, shape, stride) of its memory, which have the
    ``expected`` type and shape; ``kept`` lives until then."""

    lasting = False
    may_crash = True

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


class ReadStep(FetchStep):
    """Bring a tensor for whoever reads it next."""

    def __init__(self, buffer: RemoteBuffer) -> None:
        super().__init__(buffer.handle, buffer.block, None, None, (buffer.geometry.dtype, buffer.geometry.shape))
        self._buffer = buffer
        self._version = buffer.block.version
        self.site = current_site()

    def done(self, result: torch.Tensor) -> None:
        super().done(result)
        tensor = result
        self._buffer.brought = self._version, tensor
        traffic.moved(self.site, role_of(self._buffer.block), down=tensor.numel() * tensor.element_size())


class RolesStep(Step):
    """Say what memory is for."""

    lasting = False

    def __init__(self, roles: Iterable[tuple[int, Block]]) -> None:
        self._blocks = [(handle, block, block.role) for handle, block in roles if block.role in ROLES]
        for _, block, role in self._blocks:
            block.role_sent = role

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        given = [(handle, role) for handle, _, role in self._blocks if role is not None]
        return [Roles(tuple(given[start : start + _ROLES])) for start in range(0, max(len(given), 1), _ROLES)]


class AskStep(Step):
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


def configure(settings: KernelSettings, sent: Sent) -> list[Request]:
    if settings == sent.settings:
        return []
    sent.settings = settings
    return [Configure(settings)]


# --- operators at once -----------------------------------------------------------------------------------------------


RESULTS = 1 << 12
"""Handles that are set aside for what an operator returns."""


class CallStep(Step):
    """One operator, at once. ``result`` is what the worker answered."""

    may_crash = True

    def __init__(self, request: Call, site: Any) -> None:
        self._request = request
        self.operator = request.operator
        given = leaves((request.args, request.kwargs))
        self.inputs = tuple([arg.number for arg in given if isinstance(arg, Handle)])
        self.base = request.base
        self.site = site
        self._settings = current()
        self.result: Any = None
        self.error: Exception | None = None
        self.extra: tuple[int, ...] = ()
        """Further handles of its arguments, which nobody needs."""

    @classmethod
    def of(
        cls,
        op: Operation,
        args: Sequence[Any],
        kwargs: Sequence[tuple[str, Any]],
        state: torch.Tensor | None,
        base: int,
    ) -> CallStep:
        """A call with values as arguments, which have buffers; results get handles from ``base`` on."""
        given = tuple([placed(arg, _handle_of) for arg in args])
        named = tuple([(name, placed(arg, _handle_of)) for name, arg in kwargs])
        return cls(
            Call(str(op.func), given, named, None if state is None else bytes(state.tolist()), base), current_site()
        )

    def requests(self, sent: Sent) -> list[Request]:
        return [*configure(self._settings, sent), self._request]

    def done(self, result: Any) -> None:
        super().done(result)
        self.result = result

    def refused(self) -> bool:
        return False  # whoever called asks again

    def called(self, memory: Memory, buffers: list[RemoteBuffer]) -> Called:
        """What the operator has returned for these arguments, which are what it has made of them from now on. Raises
        ``WireError``."""
        parts = _Returns(memory, buffers, self)
        try:
            returned = map_leaves(parts.read, self.result["returned"])
            geometries = [spec_from(spec) for spec in self.result["arguments"]]
            state = self.result["state"]
            after = None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)
            if len(geometries) != len(buffers):
                raise WireError("a call has as many arguments as it was given")
        except (LookupError, TypeError, ValueError, WireError) as error:
            raise WireError(f"what {self.operator} returned cannot be read: {error}") from None
        for buffer, geometry in zip(buffers, geometries, strict=True):
            if geometry is not buffer.geometry:
                buffer.geometry = geometry
                buffer.block.nbytes = max(buffer.block.nbytes, extent_of(geometry))
                memory.alive[buffer.handle] = buffer.block, geometry
        self.makes, self.handles, self.extra = tuple(parts.blocks), (*parts.handles, *parts.extra), tuple(parts.extra)
        return Called(returned, geometries, after)


class _Returns:
    """Reads what an operator returned, noting the new ``blocks`` and ``handles``, and the ``extra`` ones: further
    handles of its arguments."""

    def __init__(self, memory: Memory, buffers: list[RemoteBuffer], step: CallStep) -> None:
        self.blocks: list[Block] = []
        self.handles: list[int] = []
        self.extra: list[int] = []
        self._memory = memory
        self._buffers = buffers
        self._site = step.site
        self._base = step.base

    def read(self, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        if "c" in item:
            return complex(*item["c"])
        handle, spec, layout, same_as, base = as_list(item["t"], 5, "a result")
        for index in (same_as, base):
            if index is not None:
                as_int(index, 0, len(self._buffers) - 1, "an argument")
        if layout is not None:
            return Returned(None, None, as_text(layout, 64, "a layout"))
        geometry = spec_from(spec)
        if same_as is not None:
            self.extra.append(as_int(handle, self._base, self._base + RESULTS - 1, "a handle"))
            return Returned(self._buffers[same_as], geometry, None, same_as, base)
        self.handles.append(as_int(handle, self._base, self._base + RESULTS - 1, "a handle"))
        if base is None:
            self.blocks.append(Block(geometry, self._site))
            block = self.blocks[-1]
        else:
            block = self._buffers[base].block
        return Returned(self._memory.made(handle, geometry, block, None), geometry, None, None, base)


def _handle_of(value: Value) -> Handle:
    return Handle(value.concrete.handle)
