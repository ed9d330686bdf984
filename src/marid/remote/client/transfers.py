"""Copies from worker to worker, on the client: two steps, each in the order and in the journal of its worker.

The first (``PackWork``) makes a snapshot of the tensor, as bytes, on the worker that has it. The second (``TakeWork``)
has the other worker collect these bytes. They are kept until the journal of the second worker has no more use for the
copy: when that worker is lost, its successor collects them again; when the first is lost, its own journal makes them
again. So each journal is complete by itself, and what the steps tell the workers beside them (who may collect what, and
where it is) holds no state: it is said again whenever one of the workers is another one.
"""

from __future__ import annotations

import os
import time
from typing import Any

from marid.engine.protocol import Geometry
from marid.remote.client.buffers import RemoteBuffer
from marid.remote.client.link import Link
from marid.remote.client.steps import End, Sent, Work
from marid.remote.wire.requests import TICKET_BYTES, Pack, Reduce, Request, Take
from marid.report.traffic import traffic

__all__ = ["PackWork", "ReduceWork", "TakeWork"]

_FIRST = 5  # seconds that two workers have to reach each other for the first time
_PATIENCE = 30  # seconds, once they have
_TELL = 2.0  # seconds after which workers are told again where a tensor is
_ATTEMPTS = 3  # to collect one tensor


class PackWork(Work):
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


class TakeWork(Work):
    """What ``source`` has packed becomes a tensor of ``target``. ``is_first`` of the two: they may be out of reach of
    each other."""

    def __init__(
        self, source: End, target: End, packed: RemoteBuffer, buffer: RemoteBuffer, site: Any, is_first: bool
    ) -> None:
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = site
        self.packed = packed
        self.held = packed.nbytes
        self.error: dict[str, Any] | None = None
        """Why the first copy failed."""
        self.sources = (source,)
        self._ends = source, target
        self._geometry: Geometry = buffer.geometry
        self._kept: Any = buffer
        self._is_first = is_first
        self._told: tuple[Link, Link] | None = None
        self._told_at = 0.0
        self._ticket = b""
        self._failures = 0

    def requests(self, sent: Sent) -> list[Request]:  # noqa: ARG002
        if self.answered and self.packed.block.error is not None:
            raise OSError("the workers that had it were lost together")
        if self._ends[0].is_closed:
            raise OSError("the worker that it was copied from is disconnected")
        self._tell()
        of = self._geometry
        return [Take(self.handles[0], self._ticket, of.dtype, of.shape, of.stride)]

    def _tell(self) -> None:
        source, target = links = self._ends[0].link, self._ends[1].link
        if self._told is None or any(a is not b for a, b in zip(self._told, links, strict=True)):
            if self._told is None or self._told[1] is not target:
                self._ticket = os.urandom(TICKET_BYTES)
            self._told = links
        self._told_at = time.monotonic()
        if self.packed.block.error is not None:  # nobody has it any more
            target.tell({"kind": "source", "ticket": self._ticket, "address": None})
            return
        source.tell(
            {"kind": "offer", "ticket": self._ticket, "handle": self.packed.handle, "peer": target.welcome["peer"]}
        )
        patience = _FIRST if self._is_first else _PATIENCE
        target.tell({"kind": "source", "ticket": self._ticket, "patience": patience, **source.place})

    def say_again(self) -> None:
        if self._told is None or self._told[0] is not self._ends[0].link or time.monotonic() - self._told_at > _TELL:
            self._tell()

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
            self._told = None
            return True  # whoever waits for it sees to its source
        self.error = failure
        return super().retry(failure)

    def commit(self) -> None:
        """From now on it is taken for granted that the two reach each other."""
        self._is_first = False


class ReduceWork(Work):
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
        self._copy: TakeWork | None = None
        self._kept: Any = source, buffer

    def had_from(self, copy: TakeWork) -> None:
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

    def say_again(self) -> None:
        if self._copy is not None:
            self._copy.say_again()

    def retry(self, failure: dict[str, Any]) -> bool:
        self.failure = failure
        return False if self._copy is None else self._copy.retry(failure)

    def refused(self) -> bool:
        return False  # whoever reduces asks again
