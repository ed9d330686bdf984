"""The worker: a process that owns one device and runs programs for its clients.

The main thread takes messages and applies their requests, one message of each session in turn. What takes long beside
the messages of another session is applied in the background (``background.py``). While the main thread is at one
operator for long, a second thread takes messages, keeps sessions alive, and has the run stopped when its client asks
for that.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch

from marid import policy
from marid.engine.plain import as_bytes, as_int
from marid.errors import WireError
from marid.execute.executable import may_be_stopped
from marid.remote.wire.codec import SEGMENTS, VERSION, decode, encode
from marid.remote.worker.chunk_store import ChunkStore
from marid.remote.worker.collectives import Groups
from marid.remote.worker.connections import PEER, OwnedSocket, ServerSocket
from marid.remote.worker.copies import Collectors, Copies, Tickets
from marid.remote.worker.executor import Executor
from marid.remote.worker.session import Answer, Cancelled, Message, Session
from marid.remote.worker.workspace import Workspace

_IDLE = 500  # milliseconds between looks at leases
_WATCH = 0.03  # seconds between looks of the second thread
_SEQ = 1 << 53


@dataclass(frozen=True)
class Limits:
    """What a worker allows; bytes, seconds, counts."""

    memory: int = 0
    """Of all sessions and the current run; 0 for no limit."""
    spill: int = 0
    """Of what may wait on the host when the memory is full."""
    chunks: int = 4 << 30
    """Of pieces of tensors that are kept in case they are uploaded again."""
    in_flight: int = 512 << 20
    """Of messages of one session that wait to be applied."""
    messages: int = 1024
    """The same, by their number."""
    replies: int = 1 << 30
    """Of answers to one session that it has not taken yet."""
    sessions: int = 256
    lease: float = 300.0
    """How long the tensors of a client that is not heard of are kept."""


@dataclass
class Refusals:
    """How many messages were refused, by the reason."""

    counts: dict[str, int] = field(default_factory=dict)

    def note(self, reason: str) -> None:
        """One more, for a reason of a fixed set."""
        self.counts[reason] = self.counts.get(reason, 0) + 1


class Worker:
    """A worker that serves on ``socket``: to all who reach its address, or to one owner behind a supervisor."""

    def __init__(self, socket: ServerSocket | OwnedSocket, device: torch.device, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.boot = os.urandom(8)
        self.refusals = Refusals()
        self.executor = Executor(device, self.limits.memory, self.limits.spill)
        self._background = self.executor.background
        self._chunks = ChunkStore(self.limits.chunks)
        self._socket = socket
        self.address = socket.address
        self._tickets = Tickets(socket.offered)
        self._collectors = Collectors(self._socket.wake)
        self._using = threading.Lock()
        """Of the socket and of what messages change: sessions, inboxes, who is next."""
        self._sessions: dict[bytes, Session] = {}
        self._turns: deque[Session] = deque()
        self._waiting: list[Session] = []
        """Those of which the next message has begun, and waits for others."""
        self._current: Session | None = None
        self.went_first = 0
        """How many messages were applied while another one's program was running."""
        self._stopping = False
        self._looked = 0.0

    # --- serving ---

    def serve(self, until: Callable[[], bool] | None = None) -> None:
        """Serve until ``stop``; on the main thread, where signals arrive. ``until`` is asked twice a second."""
        main = threading.get_ident()
        before = signal.signal(signal.SIGUSR1, self._signalled)
        watching = threading.Thread(target=self._watch, args=(main, until), name="marid-watch", daemon=True)
        watching.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-3)
        try:
            while not self._stopping:
                if (behind := self._background.result()) is not None:
                    self._applied(*behind)
                if self._waiting:
                    self._go_on()
                session = self._next()
                if session is not None:
                    self._turn(session)
                    continue
                with self._using:
                    if not self._background.has_ended:
                        self._take(_IDLE, hurry=True)
                    self._look_after(until)
        finally:
            self._stopping = True
            for session in self._sessions.values():
                session.end()
            self._background.close()
            sys.setswitchinterval(interval)
            watching.join()
            signal.signal(signal.SIGUSR1, before)
            self._collectors.close()
            self._socket.close()

    def stop(self) -> None:
        """Stop serving; from any thread, or a signal's handler."""
        self._stopping = True
        self._socket.wake()

    def _turn(self, session: Session) -> None:
        """Apply one message of a session."""
        with self._using:
            message = session.inbox.popleft()
            session.inbox_bytes -= message.nbytes
        if message.requests is None:
            with self._background.foreground():
                session.clear()
            if not self._sessions:
                self.executor.trim()
            return
        # One that reports its progress waits for the socket, which the main thread has while it waits for messages.
        if not self._background.is_busy and message.at is None and self._is_long(session):
            self._background.start(partial(self._answer, session, message), session.check, self._socket.wake)
            return
        self.went_first += self._background.is_busy
        self._current = session
        try:
            with self._background.foreground():
                applied = self._answer(session, message)
        finally:
            self._current = None
        self._applied(*applied)

    def _answer(self, session: Session, message: Message) -> tuple[Session, Message, Answer | None, float]:
        began = time.perf_counter()
        return session, message, session.answer(message), time.perf_counter() - began

    def _applied(self, session: Session, message: Message, answer: Answer | None, seconds: float) -> None:
        """A message was applied: send its answer, or let it wait."""
        session.took(seconds)
        if answer is None:
            with self._using:
                session.inbox.appendleft(message)
                session.inbox_bytes += message.nbytes
                self._waiting.append(session)
            return
        try:
            header = self._header(answer.fields)
        except WireError as error:
            answer = session.give_up(error)
            header = self._header(answer.fields)
        with self._using:
            session.sent(self._socket.send(session.route, header, answer.segments), answer.nbytes)
            self._notify_pace()
            if session.inbox:
                self._turns.append(session)
                self._take(0)
            else:
                session.scheduled = False

    def _next(self) -> Session | None:
        """Whose turn it is; what is long waits while the background is busy."""
        busy = self._background.is_busy
        with self._using:
            for session in self._turns:
                if not (busy and self._is_long(session)):
                    self._turns.remove(session)
                    return session
        return None

    def _is_long(self, session: Session) -> bool:
        """Whether the messages of a session take long beside those of another one."""
        if session.lately <= policy.BACKGROUND_SECONDS or not self.executor.can_share:
            return False
        pace = min([self._socket.pace_of_others, *self._paces(session)])
        return math.isfinite(pace) and pace <= policy.BRIEF_SHARE * session.lately

    def _paces(self, but: Session | None = None) -> list[float]:
        """Seconds that messages have taken lately, of sessions that are in use."""
        since = time.monotonic() - policy.IN_USE_SECONDS
        found = [one.lately for one in list(self._sessions.values()) if one is not but and one.seen > since]
        return [seconds for seconds in found if math.isfinite(seconds)]

    def _notify_pace(self) -> None:  # with the socket
        self._socket.notify_pace(min(self._paces(), default=math.inf))

    def _go_on(self) -> None:
        """Have those that need not wait any longer take turns again."""
        with self._using:
            waiting, self._waiting = self._waiting, []
            for session in waiting:
                (self._turns if session.may_go_on else self._waiting).append(session)

    def _watch(self, main: int, until: Callable[[], bool] | None) -> None:
        """What the main thread has no time for while something runs."""
        seen: Session | None = None
        while not self._stopping:
            time.sleep(_WATCH)
            current = self._current
            if current is not None and current is seen:
                with self._using:
                    self._take(0)
                    self._look_after(until)
                if current is self._current and current.is_cancelled:
                    signal.pthread_kill(main, signal.SIGUSR1)
            seen = current

    def _signalled(self, _number: int, frame: FrameType | None) -> None:
        session = self._current
        if session is not None and session.is_cancelled and may_be_stopped(frame):
            raise Cancelled("the client asked to stop")

    def _look_after(self, until: Callable[[], bool] | None) -> None:
        """Twice a second: leases, and whether to go on."""
        now = time.monotonic()
        if now - self._looked < _IDLE / 1000:
            return
        self._looked = now
        for session in list(self._sessions.values()):
            if now - session.seen > self.limits.lease:
                self._end(session)
        self._notify_pace()
        if until is not None and until():
            self._stopping = True

    # --- messages ---

    def _take(self, milliseconds: int, hurry: bool = False) -> None:
        """Take the messages that have come, or come within that time; with ``hurry``, only until there is something to
        do: ZeroMQ asks its connections in turn, so none waits for another one's."""
        for route, owner, frames in self._socket.poll(milliseconds):
            try:
                if not 1 <= len(frames) <= SEGMENTS + 1:
                    raise WireError("a message has too many segments, or none")
                self._handle(route, owner, decode(frames[0].buffer), frames)
            except WireError as error:
                self._refuse(route, "malformed", str(error))
            if hurry and self._turns:
                return

    def _handle(self, route: bytes, owner: bytes, header: dict[str, Any], frames: list[Any]) -> None:
        kind = header.get("kind")
        if kind in ("collect", "collected"):
            self._collect(route, owner, header)
            return
        if owner.startswith(PEER):
            self._refuse(route, "owner", "another worker may only collect what it is offered")
            return
        number = as_bytes(header.get("session"), 16, "a session")
        session = self._sessions.get(number)
        if session is not None and session.workspace.owner != owner:
            self._refuse(route, "owner", "the session belongs to somebody else")
        elif kind == "hello":
            self._welcome(route, owner, number, session, header)
        elif header.get("boot") != self.boot or session is None:
            self._send(route, {"kind": "gone", "session": number}, [])
        else:
            session.route, session.seen = route, time.monotonic()
            if kind == "work":
                self._enqueue(route, session, header, frames)
            elif kind == "ping":
                self._send(route, {"kind": "pong", "applied": session.applied}, [])
            elif kind == "cancel":
                session.cancel(*(as_int(header.get(name), 0, _SEQ, name) for name in ("epoch", "through")))
            elif kind == "offer":
                self._tickets.offer(session.workspace, header)
            elif kind == "source":
                session.workspace.copies.locate(header)
            elif kind == "bye":
                self._end(session)
            else:
                raise WireError("a message is of no known kind")

    def _collect(self, route: bytes, owner: bytes, header: dict[str, Any]) -> None:
        if header.get("boot") != self.boot:
            return  # whoever asks means another worker, or another life of this one
        proved = owner.removeprefix(PEER).decode() if owner else None
        answer = self._tickets.answer(header, proved)
        if answer is not None:
            self._send(route, *answer)

    def _welcome(
        self, route: bytes, owner: bytes, number: bytes, session: Session | None, header: dict[str, Any]
    ) -> None:
        if session is None:
            if header.get("boot") is not None:
                self._send(route, {"kind": "gone", "session": number}, [])
                return
            if len(self._sessions) >= self.limits.sessions:
                self._refuse(route, "sessions", "the worker has as many sessions as it may have")
                return
            session = Session(number, self._workspace(owner))
            self._sessions[number] = session
        session.route, session.seen = route, time.monotonic()
        limits = {"in_flight": self.limits.in_flight // 2, "messages": self.limits.messages // 2}
        limits |= {"lease": self.limits.lease, "memory": self.limits.memory, "spill": self.limits.spill}
        facts = {"device": str(self.executor.device), "torch": torch.__version__, "pid": os.getpid()}
        facts |= {"peer": self._collectors.key}
        state = {"applied": session.applied, "epoch": session.epoch}
        self._send(route, {"kind": "welcome", "session": number, "limits": limits, **facts, **state}, [])

    def _workspace(self, owner: bytes) -> Workspace:
        copies, groups = Copies(self._collectors), Groups(self.executor.device, self._socket.wake)
        replies = min(self.limits.replies, self.limits.memory or self.limits.replies)
        made = Workspace(owner, self.executor, self._chunks, copies, groups, replies)
        made.others = lambda: sum(
            one.workspace.nbytes() for one in list(self._sessions.values()) if one.workspace is not made
        )
        made.worker_stats = self.stats
        return made

    def _enqueue(self, route: bytes, session: Session, header: dict[str, Any], frames: list[Any]) -> None:
        epoch, seq, acked = [as_int(header.get(name), 0, _SEQ, name) for name in ("epoch", "seq", "acked")]
        nbytes = sum(map(len, frames)) + 256
        if seq < 1 or header.get("requests") is None:
            raise WireError("a message has no requests, or no sequence number")
        if session.inbox_bytes + nbytes > self.limits.in_flight or len(session.inbox) >= self.limits.messages:
            self._refuse(route, "in flight", "more is in flight than the worker allows")
            return
        at = partial(self._report_progress, session) if header.get("careful") is True else None
        message = Message(epoch, seq, acked, header["requests"], [frame.buffer for frame in frames[1:]], nbytes, at)
        self._schedule(session, message)

    def _report_progress(self, session: Session, seq: int, index: int) -> None:
        """A program has come to an operator: its client wants to know, should that be the last."""
        with self._using:
            self._send(session.route, {"kind": "at", "seq": seq, "index": index}, [])

    def _schedule(self, session: Session, message: Message) -> None:
        session.inbox.append(message)
        session.inbox_bytes += message.nbytes
        if not session.scheduled:
            session.scheduled = True
            self._turns.append(session)

    def _end(self, session: Session) -> None:
        if self._sessions.pop(session.number, None) is not None:
            session.end()
            self._notify_pace()
            self._tickets.forget(session.workspace)
            self._schedule(session, Message(0, 0, 0, None, [], 0))

    def _refuse(self, route: bytes, reason: str, text: str) -> None:
        self.refusals.note(reason)
        self._send(route, {"kind": "refused", "reason": reason, "text": text}, [])

    def _send(self, route: bytes, fields: dict[str, Any], segments: list[Any]) -> None:
        self._socket.send(route, self._header(fields), segments)

    def _header(self, fields: dict[str, Any]) -> bytes:
        return encode({"v": VERSION, "boot": self.boot, **fields})

    def stats(self) -> dict[str, Any]:
        """What was refused, and how many sessions there are."""
        refused = {**self.refusals.counts, "connection": self._socket.refused, "request": self.executor.refused}
        copied = {"collected_bytes": self._collectors.received, "offered_bytes": self._tickets.collected}
        return {"sessions": len(self._sessions), "went_first": self.went_first, "refused": refused, **copied}
