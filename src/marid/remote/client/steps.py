"""What the client has a worker do, one step each: a step can be sent, sent again, taken back, and done once more on a
worker that has lost everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from marid.graph.node import Spec
from marid.remote.client.contents import Content, FileContent
from marid.remote.client.link import Link
from marid.remote.client.memory import Block, RemoteBuffer, role_of
from marid.remote.wire.kernel_settings import KernelSettings
from marid.remote.wire.replies import as_tensor
from marid.remote.wire.requests import (
    ROLES,
    Configure,
    Fetch,
    Free,
    Request,
    Roles,
)
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site

__all__ = [
    "AskStep",
    "FetchStep",
    "FreeStep",
    "Peer",
    "ReadStep",
    "RolesStep",
    "Sent",
    "Step",
    "configure",
]


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
    """What a session has been told of: programs, geometries and chunks by digest, the last geometry and run of each
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
