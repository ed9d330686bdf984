"""Where clients connect: a worker's sockets."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from marid.engine.plain import as_int
from marid.remote.wire.codec import pack_plain, unpack_plain
from marid.remote.wire.endpoints import BURST, REFUSED, Wake, WorkerKeys, events, received, set_options
from marid.remote.worker.connection_limits import ConnectionLimits

PEER = b"peer:"
"""Owners with names that begin so are other workers, which may only collect what they are offered."""

_ZAP = "inproc://zeromq.zap.01"
_COMING = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_NOBLOCK = int(zmq.NOBLOCK)
_WORKER_BEATS = 3000  # milliseconds between heartbeats
_ANSWERS = 4096  # that may wait for one client; one that lets more wait is not sent them
_WATCHED = 8 << 10  # bytes of a message from which on it is watched until it has left
_NEVER = 1 << 53  # microseconds
_MUCH = 1.5  # by which a pace changes before others hear of it


class ServerSocket:
    """Where clients connect: bound to ``address``; with ``keys`` only those that these admit are let in."""

    def __init__(self, address: str, keys: WorkerKeys | None) -> None:
        self._keys = keys
        self.context = zmq.Context()
        self._zap = self.context.socket(zmq.REP)
        self._router = self.context.socket(zmq.ROUTER)
        set_options(self._router, _WORKER_BEATS)
        self._router.linger = 0
        self._router.rcvhwm = BURST
        self._router.sndhwm = _ANSWERS
        self._router.setsockopt(zmq.HANDSHAKE_IVL, 10000)
        self._monitor = self._router.get_monitor_socket(REFUSED | _COMING)
        self._wake = Wake()
        self._poller = zmq.Poller()
        for one in (self._router, self._wake.fileno(), self._monitor):
            self._poller.register(one, zmq.POLLIN)
        if keys is not None:
            self._router.zap_domain = b"marid"
            keys.put_on(self._router)
            self._zap.bind(_ZAP)
            self._poller.register(self._zap, zmq.POLLIN)
        self.refused = 0
        """How many connections were refused."""
        self.admits_peer: Callable[[bytes], bool] = lambda _key: False
        """Whether another worker with that public key (32 bytes) is let in, to collect what it is offered."""
        self.pace_of_others = math.inf
        """As in ``OwnedSocket``: there are no others."""
        self._router.bind(address)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address: str = re.sub(r"\[::ffff:([\d.]+)\]", r"\1", endpoint)
        self._limits = ConnectionLimits(self.address)
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).chmod(0o600)

    def also(self, other: Any, listen: bool) -> None:
        """Have a ``poll`` end for what comes from somewhere else, too, or no longer."""
        if listen:
            self._poller.register(other, zmq.POLLIN)
        else:
            self._poller.unregister(other)

    def poll(self, milliseconds: int) -> Iterator[tuple[bytes, bytes, list[Any]]]:
        """Wait for messages that long at most; those that have come: the way back, whose it is, and its frames."""
        ready = dict(self._poller.poll(self._limits.wait(milliseconds)))
        if self._wake.fileno() in ready:
            self._wake.clear()
        if self._zap in ready:
            self._authenticate()
        if self._monitor in ready:
            self._note_events()
        if self._router in ready:
            for frames in received(self._router):
                route, owner = frames[0].bytes, self._owner(frames[0])
                if not self._limits.is_admitted(route):
                    self._note_events()  # that it was accepted comes before what it says
                    self._limits.admit(route, _descriptor(frames[0]), owner)
                self._limits.note_message(route)
                yield route, owner, frames[1:]
        self._limits.enforce()

    def _note_events(self) -> None:
        for event, value in events(self._monitor):
            if event & REFUSED:
                self.refused += 1
            elif event == zmq.EVENT_ACCEPTED:
                self._limits.accepted(value)
            else:
                self._limits.closed(value)

    def send(self, route: bytes, header: Any, segments: list[Any]) -> zmq.MessageTracker | None:
        """Send a message without waiting; one that has no way to go is dropped. What knows whether it has left, where
        it is long."""
        return _sent(self._router, [route, header, *segments])

    def disconnect(self, routes: Iterable[bytes]) -> None:
        """End connections."""
        for route in routes:
            self._limits.shut_down_route(route)

    def is_connected(self, route: bytes) -> bool:
        """Whether a connection is still there."""
        return self._limits.is_admitted(route)

    def offered(self, ticket: bytes, key: bytes | None) -> None:
        """Others may collect something with this ticket: whoever reaches this address (there are no keys)."""

    def notify_pace(self, seconds: float) -> None:
        """The briefest messages take so long here."""

    def wake(self) -> None:
        """Have a ``poll`` end; from any thread."""
        self._wake.wake()

    def _owner(self, frame: Any) -> bytes:
        if self._keys is None:
            return b""
        try:
            return frame.get("User-Id").encode()
        except zmq.ZMQError:
            return b"?"  # of nobody: sessions are not shared by it

    def _authenticate(self) -> None:
        """Answer libzmq, which asks whether the client with some key is let in (ZeroMQ RFC 27)."""
        assert self._keys is not None
        frames = self._zap.recv_multipart()
        proved = frames[6] if len(frames) == 7 and frames[5] == b"CURVE" else None
        admitted, user = False, b""
        if proved is not None and self._keys.admits(proved):
            admitted, user = True, proved.hex().encode()
        elif proved is not None and self.admits_peer(proved):
            admitted, user = True, PEER + proved.hex().encode()
        answer = (b"200", b"OK", user) if admitted else (b"400", b"no such key", b"")
        self._zap.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", *answer, b""])

    def close(self) -> None:
        """Let all clients go."""
        self._router.disable_monitor()
        for one in (self._monitor, self._router, self._zap):
            one.close(0)
        self.context.term()
        self._wake.close()


class OwnedSocket:
    """The end of a process that serves one owner: its clients are reached through a supervisor, at ``channel``."""

    def __init__(self, channel: str) -> None:
        self.address = channel
        self.refused = 0
        self._context = zmq.Context()
        self._pair = self._context.socket(zmq.PAIR)
        self._pair.linger = 0
        self._pair.sndhwm = 0  # what waits to be sent is bounded by those who send
        self._pair.rcvhwm = BURST
        self._wake = Wake()
        self._poller = zmq.Poller()
        for one in (self._pair, self._wake.fileno()):
            self._poller.register(one, zmq.POLLIN)
        self._pair.connect(channel)
        self.pace_of_others = math.inf
        """Seconds that the briefest messages of other owners take."""
        self._notified_pace = math.inf
        self._notify({"kind": "ready", "pid": os.getpid()})

    def poll(self, milliseconds: int) -> Iterator[tuple[bytes, bytes, list[Any]]]:
        """As ``ServerSocket.poll``."""
        ready = dict(self._poller.poll(milliseconds))
        if self._wake.fileno() in ready:
            self._wake.clear()
        if self._pair in ready:
            for frames in received(self._pair):
                if len(frames[0]):
                    yield frames[0].bytes, frames[1].bytes, frames[2:]
                else:
                    self.pace_of_others = seconds_from(unpack_plain(frames[1].buffer, 1))

    def send(self, route: bytes, header: Any, segments: list[Any]) -> zmq.MessageTracker | None:
        """As ``ServerSocket.send``; it has left when the supervisor has it, which takes no more than it can pass on."""
        return _sent(self._pair, [route, header, *segments])

    def offered(self, ticket: bytes, key: bytes | None) -> None:
        """Whoever proves this key may collect something with this ticket; nobody any more, where there is none."""
        self._notify({"kind": "offered", "ticket": ticket, "key": key})

    def notify_pace(self, seconds: float) -> None:
        """As ``ServerSocket.notify_pace``; where that has changed by much, others hear of it."""
        if not self._notified_pace / _MUCH <= seconds <= self._notified_pace * _MUCH:
            self._notified_pace = seconds
            self._notify({"kind": "pace", "microseconds": microseconds(seconds)})

    def _notify(self, fields: dict[str, Any]) -> None:
        self._pair.send_multipart([b"", pack_plain(fields)])

    def wake(self) -> None:
        """Have a ``poll`` end; from any thread."""
        self._wake.wake()

    def close(self) -> None:
        """Leave the supervisor."""
        self._pair.close(0)
        self._context.term()
        self._wake.close()


def microseconds(seconds: float) -> int:
    """A pace as supervisors hand it on."""
    return int(min(seconds * 1e6, _NEVER))


def seconds_from(number: Any) -> float:
    """A pace that was handed on. Raises ``WireError``."""
    found = as_int(number, 0, _NEVER, "a pace")
    return math.inf if found == _NEVER else found / 1e6


def _sent(one: zmq.Socket[bytes], parts: list[Any]) -> zmq.MessageTracker | None:
    """Send without waiting. The last part of a long message is watched: it leaves when all of it has left."""
    tracker = None
    if len(parts) > 2 and sum(map(_length, parts)) > _WATCHED:
        last = zmq.Frame(memoryview(parts[-1]), track=True, copy=False)
        parts[-1], tracker = last, last.tracker
    with contextlib.suppress(zmq.Again):
        one.send_multipart(parts, _NOBLOCK, copy=False)
    return tracker


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:  # the connection has ended, or has none
        return -1


def _length(part: Any) -> int:
    return len(part) if isinstance(part, zmq.Frame) else memoryview(part).nbytes


def passed_on(to: ServerSocket, route: bytes, frames: list[Any]) -> tuple[zmq.MessageTracker | None, int]:
    """Send on what was received, without copying it; what knows when it has left, and its bytes."""
    nbytes = sum(map(len, frames))
    if nbytes <= _WATCHED:
        return to.send(route, frames[0], frames[1:]), nbytes
    return to.send(route, frames[0], [frame.buffer for frame in frames[1:]]), nbytes
