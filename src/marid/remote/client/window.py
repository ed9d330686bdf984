"""The messages of one session on their way: numbered, bounded by what the worker allows, answered in order, and kept
until then, so that they can be sent again."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marid.engine.plain import as_int, as_list, as_text
from marid.errors import WireError
from marid.remote.wire.codec import MISPREDICTIONS
from marid.remote.wire.replies import check_failure, check_results, tensor_from
from marid.uninterrupted import Uninterrupted

_IDLE_ANSWERS = 4096  # answers in a row that say nothing, after which a worker is not listened to any more


class LinkLost(Exception):
    """The session is gone, and all that the worker held for it."""


class RequestFailed(Exception):
    """A request failed on the worker, which refuses what was sent behind it until ``Link.resume``.

    ``seq`` is its number; ``failure`` what the worker says of it: ``type`` and ``text`` of the error, and for a run the
    ``index`` of the instruction, whether it ``finished``, and the ``existing`` slots (kept as handles).
    """

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(f"{failure.get('type')}: {failure.get('text')}")
        self.seq: int = failure["seq"]
        self.failure = failure


@dataclass(slots=True)
class Outgoing:
    """A message of requests, by the numbers of its first and last one; ``nbytes`` is its size."""

    seq: int
    last: int
    requests: list[Any]
    segments: list[Any]
    nbytes: int
    careful: bool = False


class Window:
    """What is in flight of one session. To be used from any thread; ``changed`` is notified when something was answered
    or has gone wrong."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.changed = threading.Condition(self.guard)
        self.epoch = 0
        self.next = 1
        """The number of the next request."""
        self.applied = 0
        """The newest request that is known to be applied."""
        self.error: Exception | None = None
        """Why the session is gone."""
        self.warnings: list[str] = []
        """What kernels have warned of, to be taken by whoever shows it."""
        self.mispredictions: list[Any] = []
        """Results that were not what was recorded, to be taken with their answers."""
        self.queue: deque[Outgoing] = deque()
        """What is still to be put on the socket."""
        self.unanswered: OrderedDict[int, Outgoing] = OrderedDict()
        self._in_flight = 0
        self._results: dict[int, tuple[Any, list[Any]]] = {}
        self._failure: dict[str, Any] | None = None
        self._cancelled = False  # whether something of this epoch was to be stopped
        self._idle_answers = 0  # in a row, after which no more was done than before

    def check(self) -> None:
        """Raise what went wrong: ``RequestFailed``, or why the session is gone."""
        failure, error = self._failure, self.error
        if failure is not None:
            raise RequestFailed(failure)
        if error is not None:
            raise error

    def fail(self, error: Exception) -> None:
        """The session is gone; the first reason counts."""
        with self.guard:
            self.error = self.error or error
            self.changed.notify_all()

    def enqueue(
        self,
        data: list[Any],
        segments: list[Any],
        limits: dict[str, Any],
        sent_as: Callable[[int], None] | None,
        careful: bool = False,
    ) -> int | None:
        """Take a message in; the number of its first request. None where more is in flight than ``limits`` allow."""
        nbytes = sum(memoryview(segment).nbytes for segment in segments) if segments else 0
        with Uninterrupted(), self.guard:
            self.check()
            full = len(self.unanswered) >= limits["messages"] or self._in_flight + nbytes > limits["in_flight"]
            if full and self.unanswered:
                return None
            sent = Outgoing(self.next, self.next + len(data) - 1, data, segments, nbytes, careful)
            self.next = sent.last + 1
            self.unanswered[sent.seq] = sent
            self._in_flight += nbytes
            self.queue.append(sent)
            if sent_as is not None:
                sent_as(sent.seq)
            return sent.seq

    def outgoing(self) -> tuple[Outgoing, dict[str, Any]] | None:
        """The message to put on the socket next, and the fields of its header."""
        with self.guard:
            if not self.queue:
                return None
            sent = self.queue.popleft()
            acked = next(iter(self.unanswered), self.next) - 1
            fields = {"kind": "work", "epoch": self.epoch, "seq": sent.seq, "acked": acked, "requests": sent.requests}
            if sent.careful:
                fields["careful"] = True
            return sent, fields

    def weigh(self, sent: Outgoing, nbytes: int) -> None:
        """Now that a message was written down it is known how long its header is."""
        with self.guard:
            if self.unanswered.get(sent.seq) is sent:
                self._in_flight += nbytes - sent.nbytes
                sent.nbytes = nbytes

    def send_again(self) -> int:
        """Over another connection, all that is unanswered; how much of it had been sent before."""
        with self.guard:
            queued = {id(sent) for sent in self.queue}
            self.queue = deque(self.unanswered.values())
            return sum(id(sent) not in queued for sent in self.unanswered.values())

    def resume(self) -> int:
        """Go on after a failure; the number that the next request gets."""
        with self.guard:
            assert self._failure is not None
            self.epoch += 1
            self.next = self._failure["seq"] + 1
            self.applied = self._failure["seq"]
            self._failure, self._cancelled = None, False
            return self.next

    def cancel(self) -> dict[str, Any]:
        """What was sent is to be stopped; the message that says so."""
        with self.guard:
            self._cancelled = True
            return {"kind": "cancel", "epoch": self.epoch, "through": self.next - 1}

    def take(self, seq: int) -> Any:
        """The answer to a request that is applied, once."""
        value, segments = self._results.pop(seq, (None, []))
        return tensor_from(value["tensor"], segments) if type(value) is dict and "tensor" in value else value

    def reply(self, header: dict[str, Any], segments: list[Any]) -> None:
        """The worker has answered. Raises ``WireError`` for what is no answer to what is in flight."""
        with self.guard:
            epoch = as_int(header.get("epoch"), 0, self.epoch, "an epoch")
            if epoch != self.epoch or self._failure is not None:
                self._idle_answers += 1
                if self._idle_answers > _IDLE_ANSWERS:
                    raise WireError("a worker answers what it was asked long ago, and nothing else")
                return
            before = self.applied
            results = as_list(header.get("results", []), 1 << 14, "results")
            check_results(results)
            for seq, value in results:
                if self.applied < seq < self.next:
                    self._results[seq] = (value, segments)
            self.warnings += [
                as_text(one, 1 << 16, "a warning") for one in as_list(header.get("warnings", []), 64, "warnings")
            ]
            self.mispredictions += as_list(header.get("mispredictions", []), MISPREDICTIONS, "mispredictions")
            self.applied = max(self.applied, as_int(header.get("applied"), 0, self.next - 1, "a request"))
            self._idle_answers = 0 if self.applied > before else self._idle_answers + 1
            if self._idle_answers > _IDLE_ANSWERS:
                raise WireError("a worker answers, and does nothing of what it is asked")
            while self.unanswered and next(iter(self.unanswered.values())).last <= self.applied:
                self._in_flight -= self.unanswered.popitem(last=False)[1].nbytes
            failure = header.get("error")
            if failure is not None:
                check_failure(failure, self._cancelled)
                self._failure = failure
                self.queue.clear()
                self.unanswered.clear()
                self._in_flight = 0
            elif "expected" in header:
                self.queue = deque(self.unanswered.values())
            self.changed.notify_all()
