"""A session: what a client process has on a worker for a time, and how its requests are applied, each exactly once.

Requests have sequence numbers. The next one is applied, one that was applied before is answered from what is kept of
its answer, and one that is too early is refused. When a request fails the session *halts*: what was sent behind it is
refused, because the client took for granted that it would succeed, until the client goes on in a new epoch.

A session is used by whoever has the state of the worker (``background.py``); the thread of the sockets only puts
messages into ``inbox``. What requests do is the affair of its workspace.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from marid.errors import WireError
from marid.execute.geometry import Noted
from marid.execute.interrupted import Interrupted
from marid.remote.wire import requests as ask
from marid.remote.wire.codec import MISPREDICTIONS
from marid.remote.wire.replies import misprediction_to
from marid.remote.wire.requests import read_requests
from marid.remote.worker.budget import TooLarge
from marid.remote.worker.collectives import WouldBlock
from marid.remote.worker.executor import Warned
from marid.remote.worker.workspace import Missing, Workspace

_TEXT = 8192  # characters of an error that are sent
_WARNINGS = 16


class Cancelled(BaseException):
    """The client has asked to stop what runs for it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a client: where its requests begin, what they are, and up to where it has our answers."""

    epoch: int
    seq: int
    acked: int
    requests: Any
    segments: list[Any]
    nbytes: int
    at: Callable[[int, int], None] | None = None
    """Told of a request and the operator of its program that it comes to, where the client asks for that."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back: fields of a header, and segments."""

    fields: dict[str, Any]
    segments: list[Any]
    nbytes: int


class Session:
    """A session on ``workspace``, which is used by nobody else."""

    def __init__(self, number: bytes, workspace: Workspace) -> None:
        self.number = number
        self.workspace = workspace
        self.applied = 0
        self.epoch = 0
        self.failure: dict[str, Any] | None = None
        # Of the thread of the sockets:
        self.inbox: deque[Message] = deque()
        self.inbox_bytes = 0
        self.scheduled = False
        self.route: bytes = b""
        self.seen = time.monotonic()
        self.lately = math.inf
        """Seconds that its messages have taken lately: the newest, or three quarters of what it was before."""
        self._ended = False
        self._cancelled = 0, 0  # epoch, and the newest request of it that is to be stopped
        self._answers: OrderedDict[int, Answer] = OrderedDict()  # with payload, by the last request they answer
        self._running = 0
        self._begun: tuple[list[list[Any]], list[Any], list[str], list[list[Any]]] | None = None
        """What a message that has to wait has done by now: results, segments, warnings, mispredictions."""
        self.waiting: WouldBlock | None = None
        """What it waits for."""
        self._leaving: deque[tuple[Any, int]] = deque()  # what knows whether an answer has left, and its bytes
        workspace.leaving = self._queued

    @property
    def is_cancelled(self) -> bool:
        """Whether what runs now is to be stopped."""
        return self._running > 0 and self._is_cancelled(self._running)

    def _is_cancelled(self, seq: int) -> bool:
        epoch, through = self._cancelled
        return self._ended or (epoch == self.epoch and seq <= through)

    def cancel(self, epoch: int, through: int) -> None:
        """Let what runs of an epoch, and is to run, end with ``Cancelled`` up to a request. What the client sends again
        in the next epoch has the same numbers, and is not meant."""
        self._cancelled = max(self._cancelled, (epoch, through))

    def check(self) -> None:
        """Raises ``Cancelled`` where what runs is to be stopped."""
        if self.is_cancelled:
            raise Cancelled("the client asked to stop")

    def end(self) -> None:
        """Let all that is still to run end."""
        self._ended = True

    @property
    def may_go_on(self) -> bool:
        """Whether what it waits for is over, or not wanted any more."""
        return self.waiting is None or self._is_cancelled(self.applied + 1) or self.waiting.is_over()

    def took(self, seconds: float) -> None:
        """A message of it has been applied."""
        self.lately = max(seconds, 0.0 if math.isinf(self.lately) else self.lately * 0.75)

    def sent(self, tracker: Any, nbytes: int) -> None:
        """An answer is on its way."""
        if tracker is not None:
            self._leaving.append((tracker, nbytes))

    def _queued(self) -> int:
        """Bytes of answers that have not left yet, whatever the client says that it has."""
        while self._leaving and self._leaving[0][0].done:
            self._leaving.popleft()
        return sum(nbytes for _, nbytes in list(self._leaving))

    # --- exactly once ---

    def answer(self, message: Message) -> Answer | None:
        """Apply what is new in a message; what to send back. None when it has to wait (``waiting``): to be called again
        with the same message, before any other, once it ``may_go_on``."""
        self._forget(message.acked)
        if message.epoch == self.epoch + 1 and self.failure is not None:
            self.applied, self.epoch, self.failure = self.failure["seq"], message.epoch, None
        if message.epoch != self.epoch:
            return self._plain({"stale": True}, 0)
        kept = self._answers.get(message.seq)
        if kept is not None:
            return kept
        last = message.seq + len(message.requests) - 1 if type(message.requests) is list else message.seq
        if last <= self.applied:
            return self._plain({}, last)
        if self.failure is not None:
            return self._plain({"error": self.failure}, self.applied)
        if message.seq > self.applied + 1:
            return self._plain({"expected": self.applied + 1}, 0)
        try:
            requests = read_requests(message.requests, message.segments)
        except WireError as error:
            self._halt(max(message.seq, self.applied + 1), error)
            return self._plain({"error": self.failure}, self.applied)
        return self._apply(message, requests)

    def _apply(self, message: Message, requests: list[ask.Request]) -> Answer | None:
        workspace = self.workspace
        results, workspace.segments, warned, mispredicted = self._begun or ([], [], [], [])
        self._begun = self.waiting = None
        workspace.executor.use_settings(workspace.settings)  # another session may have others
        for seq, request in enumerate(requests, message.seq):
            if seq <= self.applied:
                continue
            try:
                if self._is_cancelled(seq):
                    raise Cancelled("the client asked to stop")
                self._running = seq
                workspace.at = None if message.at is None else partial(message.at, seq)
                with Warned() as warnings, Noted() as noted:
                    value = workspace.apply(request)
                warned += warnings.texts
                mispredicted += [misprediction_to(seq, one) for one in noted]
            except WouldBlock as waits:
                self._begun, self.waiting = (results, workspace.segments, warned, mispredicted), waits
                return None
            except (Exception, Cancelled) as error:  # an operator may raise anything; it goes to the client
                self._halt(seq, error, request)
                break
            finally:
                self._running = 0
            self.applied = seq
            if value is not None:
                results.append([seq, value])
        fields: dict[str, Any] = {"results": results}
        if self.failure is not None:
            fields["error"] = self.failure
        if warned:
            fields["warnings"] = [text[:_TEXT] for text in warned[:_WARNINGS]]
        if mispredicted:
            fields["mispredictions"] = mispredicted[:MISPREDICTIONS]
        if not results:
            return self._plain(fields, self.applied)
        nbytes = sum(memoryview(segment).nbytes for segment in workspace.segments)
        answer = Answer({**fields, **self._state(self.applied)}, workspace.segments, nbytes)
        self._answers[message.seq] = answer
        workspace.untaken += nbytes
        return answer

    def clear(self) -> None:
        """It has ended: let go of all that it held."""
        self._answers.clear()
        self._begun = self.waiting = None
        self.workspace.clear()

    def give_up(self, error: WireError) -> Answer:
        """What to send in place of an answer that is too long to be sent."""
        seq = self.applied + 1 if self.failure is None else self.failure["seq"]
        self.failure = {"seq": seq, "type": "WireError", "text": str(error)}
        return self._plain({"error": self.failure}, self.applied)

    def _plain(self, fields: dict[str, Any], applied: int) -> Answer:
        return Answer({**fields, **self._state(applied)}, [], 0)

    def _state(self, applied: int) -> dict[str, Any]:
        """``applied`` is how far the client has its answers with this one: what was lost on the way comes again."""
        return {"kind": "reply", "epoch": self.epoch, "applied": applied}

    def _forget(self, acked: int) -> None:
        while self._answers:
            first, answer = next(iter(self._answers.items()))
            if first > acked:
                return
            del self._answers[first]
            self.workspace.untaken -= answer.nbytes

    def _halt(self, seq: int, error: BaseException, request: ask.Request | None = None) -> None:
        failure: dict[str, Any] = {"seq": seq}
        if isinstance(error, Interrupted):
            assert isinstance(request, (ask.Run, ask.Again))
            failure |= self.workspace.salvage(error, request)
            error = error.error
        if isinstance(error, Missing):
            failure["missing"] = error.args[1]
        if isinstance(error, TooLarge):
            failure |= {"nbytes": error.nbytes, "available": error.available, "held": [list(one) for one in error.held]}
        if isinstance(error, WireError):
            self.workspace.executor.refused += 1
        failure |= {"type": type(error).__name__, "text": str(error)[:_TEXT]}
        self.failure = failure
