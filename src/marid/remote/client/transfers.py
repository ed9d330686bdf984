"""Copies from worker to worker and reductions over several, on the client: steps in the journal of each worker.

The first step of a copy (``PackStep``) makes a snapshot of the tensor, as bytes, on the worker that has it. The second
(``TakeStep``) has the other worker collect these bytes. They are kept until the journal of the second worker has no
more use for the copy: when that worker is lost, its replacement collects them again; when the first is lost, its own
journal makes them again. So each journal is complete by itself, and what the steps tell the workers beside them (who
may collect what, and where it is) holds no state: it is said again whenever one of the workers is another one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Protocol

import torch

from marid.engine.plain import interned
from marid.errors import MaterializationError
from marid.graph.node import Spec
from marid.remote.client.blocks import Block, Memory, RemoteBuffer
from marid.remote.client.delivery import Delivery
from marid.remote.client.journal import compact
from marid.remote.client.link import Link
from marid.remote.client.queue import StepQueue
from marid.remote.client.steps import Peer, Sent, Step
from marid.remote.wire.requests import TICKET_BYTES, Pack, Reduce, Request, Take
from marid.remote.wire.tensors import packing_of
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site

# --- steps -----------------------------------------------------------------------------------------------------------


_FIRST = 5  # seconds that two workers have to reach each other for the first time
_PATIENCE = 30  # seconds, once they have
_NOTIFY = 2.0  # seconds after which workers are notified again where a tensor is
_ATTEMPTS = 3  # to collect one tensor


class PackStep(Step):
    """A snapshot of a tensor, as bytes that other workers may collect."""

    def __init__(self, source: RemoteBuffer, buffer: RemoteBuffer, site: Any) -> None:
        self.inputs = (source.handle,)
        self.reads = (source.block,)
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = site
        self._kept: Any = source, buffer

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        return [Pack(self.handles[0], self.inputs[0])]

    def done(self, result: Any) -> None:
        super().done(result)
        self._kept = None

    def refused(self) -> bool:
        return False  # whoever copies asks again


class TakeStep(Step):
    """What ``source`` has packed becomes a tensor of ``target``. ``is_first`` of the two: they may be out of reach of
    each other."""

    def __init__(
        self, source: Peer, target: Peer, packed: RemoteBuffer, buffer: RemoteBuffer, site: Any, is_first: bool
    ) -> None:
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = site
        self.packed = packed
        self.held = packed.nbytes
        self.error: dict[str, Any] | None = None
        """Why the first copy failed."""
        self.sources = (source,)
        self._peers = source, target
        self._geometry: Spec = buffer.geometry
        self._kept: Any = buffer
        self._is_first = is_first
        self._notified: tuple[Link, Link] | None = None
        self._notified_at = 0.0
        self._ticket = b""
        self._failures = 0

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        if self.answered and self.packed.block.error is not None:
            raise OSError("the workers that had it were lost together")
        if self._peers[0].is_closed:
            raise OSError("the worker that it was copied from is disconnected")
        self._notify()
        of = self._geometry
        return [Take(self.handles[0], self._ticket, of.dtype, of.shape, of.stride)]

    def _notify(self) -> None:
        source, target = links = self._peers[0].link, self._peers[1].link
        if self._notified is None or any(a is not b for a, b in zip(self._notified, links, strict=True)):
            if self._notified is None or self._notified[1] is not target:
                self._ticket = os.urandom(TICKET_BYTES)
            self._notified = links
        self._notified_at = time.monotonic()
        if self.packed.block.error is not None:  # nobody has it any more
            target.notify({"kind": "source", "ticket": self._ticket, "address": None})
            return
        source.notify(
            {"kind": "offer", "ticket": self._ticket, "handle": self.packed.handle, "peer": target.welcome["peer"]}
        )
        patience = _FIRST if self._is_first else _PATIENCE
        target.notify({"kind": "source", "ticket": self._ticket, "patience": patience, **source.peer_address})

    def renotify(self) -> None:
        if (
            self._notified is None
            or self._notified[0] is not self._peers[0].link
            or time.monotonic() - self._notified_at > _NOTIFY
        ):
            self._notify()

    def done(self, result: Any) -> None:
        super().done(result)
        self._kept = None
        self._failures = 0
        self._is_first = False
        traffic.add(copies=1, copied_bytes=self.packed.nbytes)

    def retry(self, failure: dict[str, Any]) -> bool:
        lost = self.packed.block.error is not None
        if failure.get("type") == "Unreachable" and not lost and not self._is_first and self._failures < _ATTEMPTS:
            self._failures += 1
            self._notified = None
            return True  # whoever waits for it sees to its source
        self.error = failure
        return super().retry(failure)

    def commit(self) -> None:
        """From now on it is taken for granted that the two reach each other."""
        self._is_first = False


class ReduceStep(Step):
    """A tensor is reduced with those of the other members of a group; whoever asks for that waits for all of them.

    A member that is lost cannot do it again alone. So ``copy`` is had in its place then: what another member has kept
    of the same result. Without one, and when that one is lost too, the result is lost.
    """

    def __init__(self, group: bytes, operation: str, source: RemoteBuffer, buffer: RemoteBuffer, site: Any) -> None:
        self.inputs = (source.handle,)
        self.reads = (source.block,)
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = site
        self.failure: dict[str, Any] | None = None
        self.result = buffer
        self._request = Reduce(group, operation, buffer.handle, source.handle)
        self._copy: TakeStep | None = None
        self._kept: Any = source, buffer

    def had_from(self, copy: TakeStep) -> None:
        """It was done, and can be had again as this copy."""
        self._copy = copy
        self.inputs, self.reads = (), ()
        self.sources, self.held = copy.sources, copy.held
        self._kept = None

    def requests(self, sent: Sent) -> list[Request]:
        if not self.answered:
            return [self._request]
        if self._copy is None or any(source.is_lost for source in self._copy.sources):
            raise OSError("the workers that had it were lost together")
        return self._copy.requests(sent)

    def renotify(self) -> None:
        if self._copy is not None:
            self._copy.renotify()

    def retry(self, failure: dict[str, Any]) -> bool:
        self.failure = failure
        return False if self._copy is None else self._copy.retry(failure)

    def refused(self) -> bool:
        return False  # whoever reduces asks again


# --- between devices -------------------------------------------------------------------------------------------------


class Device(Peer, Protocol):
    """A device that is a worker's."""

    lock: threading.RLock
    remote: Memory
    delivery: Delivery
    queue: StepQueue
    reached: weakref.WeakKeyDictionary[Any, tuple[tuple[Link, Link], bool]]
    """The devices that a copy was to come from, by the sessions on both: whether their workers were reached."""

    def finish(self, step: Step) -> None:
        """Wait for a step. Raises what it raised."""
        ...


def take(target: Device, source: Device, buffer: RemoteBuffer) -> RemoteBuffer | None:
    """A copy of a tensor of ``source``, or None where it has to go through the client."""
    if buffer.geometry.conj or buffer.geometry.neg or not buffer.nbytes:
        return None
    links = source.link, target.link
    before = target.reached.get(source)
    if before is not None and before[0] == links and not before[1]:
        traffic.add(relayed=1)
        return None
    packed = pack(source, buffer)
    with target.lock:
        target.delivery.settle()
        compact(target.delivery)  # so that what is kept for it elsewhere does not fill the other workers
        taken = _made(target, _from_its_start(buffer.geometry))
        is_first = before is None or before[0] != links
        step = TakeStep(source, target, packed, taken, current_site(), is_first)
        target.queue.do(step)
        if not is_first:
            target.delivery.flush()
            return taken
        reached = _reach(target, step)
        target.reached[source] = (source.link, target.link), reached
        if not reached:
            traffic.add(relayed=1)
        return taken if reached else None


def _reach(target: Device, step: TakeStep) -> bool:
    """Wait for the first copy from another worker; whether this one reaches it. Raises, when that is known, what has
    gone wrong before."""
    raised: MaterializationError | None = None
    try:
        while not step.answered and step.error is None:
            try:
                target.finish(step)
            except MaterializationError as error:
                raised = raised or error
            except RuntimeError:
                if step.error is None or step.error.get("type") != "Unreachable":
                    raise
    finally:
        step.commit()
    if raised is not None:
        raise raised
    return step.answered


def pack(device: Device, buffer: RemoteBuffer) -> RemoteBuffer:
    """A snapshot of a tensor, as bytes that other workers may be let collect; waits until there is one."""
    with device.lock:
        device.delivery.settle()
        buffer.block.check()
        of = buffer.geometry
        packed = _made(device, interned((packing_of(of.shape, of.stride, of.dtype).nbytes,), (1,), 0, torch.uint8))
        step = PackStep(buffer, packed, current_site())
        device.queue.do(step)
        device.finish(step)
        packed.block.check()
        return packed


def reduce(device: Device, group: bytes, operation: str, buffer: RemoteBuffer) -> ReduceStep:
    """Have a tensor reduced with those of the other members of a group; ``finish`` waits for it."""
    with device.lock:
        device.delivery.settle()
        buffer.block.check()
        made = _made(device, _from_its_start(buffer.geometry))
        step = ReduceStep(group, operation, buffer, made, current_site())
        device.queue.do(step)
        device.delivery.flush()
        return step


def _made(device: Device, geometry: Spec) -> RemoteBuffer:
    return device.remote.made(device.remote.take(1), geometry, Block(geometry, current_site()), None)


def _from_its_start(of: Spec) -> Spec:
    return interned(of.shape, of.stride, 0, of.dtype, of.conj, of.neg)
