"""Where clients connect: a worker's sockets, and the limits for their connections.

ZeroMQ accepts every connection and waits for its handshake. It reports each, and a first message says that its sender
has proved its key; a connection without one is *pending*. The oldest of too many pending connections, one that is
pending for too long, and one that has sent more than a handshake takes are shut down, before they have cost much memory
or the last descriptor.

ZeroMQ delivers a message of several segments when its last one has come, and holds the others until then, without a
limit of its own. The bytes that a connection has sent since its last message are therefore bounded, for each connection
and for each owner.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from marid.remote.wire.codec import pack_plain
from marid.remote.wire.endpoints import BURST, REFUSED, Wake, WorkerKeys, events, received, set_options

PEER = b"peer:"
"""Owners with names that begin so are other workers, which may only collect what they are offered."""

_ZAP = "inproc://zeromq.zap.01"
_COMING = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_NOBLOCK = int(zmq.NOBLOCK)
_WORKER_BEATS = 3000  # milliseconds between heartbeats
_ANSWERS = 4096  # that may wait for one client; one that lets more wait is not sent them
_WATCHED = 8 << 10  # bytes of a message from which on it is watched until it has left
_PENDING = 256  # connections that may be there without having said anything
_PATIENCE = 10.0  # seconds that they may take for it
_HANDSHAKE_BYTES = 16 << 10  # some 500 are enough for the handshake; a first message comes right behind
_RESERVE = 128  # descriptors that are kept for the worker itself
_EVERY = 0.05  # seconds between looks at pending connections
_EVERY_ADMITTED = 0.25  # seconds between looks at the others
_INCOMPLETE = 128 << 20  # bytes of one message that may wait for its end: clients send at most 49 MB in one
_INCOMPLETE_OF_OWNER = 1 << 30  # the same over all connections of an owner
_BYTES_RECEIVED = slice(128, 136)  # of struct tcp_info (linux/tcp.h): tcpi_bytes_received


# --- sockets ---------------------------------------------------------------------------------------------------------


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
        self._notify({"kind": "ready", "pid": os.getpid()})

    def poll(self, milliseconds: int) -> Iterator[tuple[bytes, bytes, list[Any]]]:
        """As ``ServerSocket.poll``."""
        ready = dict(self._poller.poll(milliseconds))
        if self._wake.fileno() in ready:
            self._wake.clear()
        if self._pair in ready:
            for frames in received(self._pair):
                yield frames[0].bytes, frames[1].bytes, frames[2:]

    def send(self, route: bytes, header: Any, segments: list[Any]) -> zmq.MessageTracker | None:
        """As ``ServerSocket.send``; it has left when the supervisor has it, which takes no more than it can pass on."""
        return _sent(self._pair, [route, header, *segments])

    def offered(self, ticket: bytes, key: bytes | None) -> None:
        """Whoever proves this key may collect something with this ticket; nobody any more, where there is none."""
        self._notify({"kind": "offered", "ticket": ticket, "key": key})

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


# --- limits ----------------------------------------------------------------------------------------------------------


class ConnectionLimits:
    """Those of one listening socket. Used by one thread at a time."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
        self._pending: OrderedDict[int, float] = OrderedDict()  # by descriptor: since when
        self._routes: dict[bytes, int] = {}
        self._descriptors: dict[int, bytes] = {}
        self._owners: dict[int, bytes] = {}
        self._complete: dict[int, int] = {}  # by descriptor: bytes received when a message had come last
        self._heard: set[int] = set()  # descriptors of which a message has come since the last look
        self._looked = 0.0
        self._looked_at_admitted = 0.0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        self._most = max(soft - _RESERVE, 16) if soft != resource.RLIM_INFINITY else 1 << 20

    def wait(self, milliseconds: int) -> int:
        """How long to wait until then, at most so long."""
        return min(milliseconds, int(1000 * _EVERY)) if self._pending else milliseconds

    def accepted(self, descriptor: int) -> None:
        """A connection was made."""
        self._forget(descriptor)  # whoever had that number before
        self._pending[descriptor] = time.monotonic()

    def closed(self, descriptor: int) -> None:
        """It has ended."""
        self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._pending.pop(descriptor, None)
        self._owners.pop(descriptor, None)
        self._complete.pop(descriptor, None)
        self._heard.discard(descriptor)
        route = self._descriptors.pop(descriptor, None)
        if route is not None:
            self._routes.pop(route, None)

    def is_admitted(self, route: bytes) -> bool:
        """Whether a message has come from there before."""
        return route in self._routes

    def admit(self, route: bytes, descriptor: int, owner: bytes) -> None:
        """A first message has come, from a client of ``owner`` that was let in.

        A message can be taken after the end of its connection was noted: such a connection is not entered again."""
        if self._pending.pop(descriptor, None) is None:
            return
        self._forget(descriptor)
        self._routes[route], self._descriptors[descriptor], self._owners[descriptor] = descriptor, route, owner

    def note_message(self, route: bytes) -> None:
        """A whole message has come from there."""
        descriptor = self._routes.get(route)
        if descriptor is not None:
            self._heard.add(descriptor)

    def enforce(self) -> None:
        """Shut down the connections that are beyond a limit, if it is time to look. To be called when the messages
        that have come were taken."""
        now = time.monotonic()
        if self._pending and now - self._looked > _EVERY:
            self._looked = now
            self._look_at_pending(now)
        if self._descriptors and now - self._looked_at_admitted > _EVERY_ADMITTED:
            self._looked_at_admitted = now
            self._look_at_admitted()

    def _look_at_admitted(self) -> None:
        incomplete: dict[bytes, int] = {}
        for descriptor, owner in list(self._owners.items()):
            received = self._received(descriptor)
            if descriptor in self._heard or descriptor not in self._complete:
                self._complete[descriptor] = received
            nbytes = received - self._complete[descriptor]
            incomplete[owner] = incomplete.get(owner, 0) + nbytes
            if nbytes > _INCOMPLETE or (nbytes and incomplete[owner] > _INCOMPLETE_OF_OWNER):
                incomplete[owner] -= nbytes
                self._shut(descriptor)
        self._heard.clear()

    def _look_at_pending(self, now: float) -> None:
        while len(self._pending) > _PENDING or (
            self._pending and len(self._pending) + len(self._descriptors) > self._most
        ):
            self._shut(next(iter(self._pending)))
        for descriptor, since in list(self._pending.items()):
            if now - since > _PATIENCE or self._received(descriptor) > _HANDSHAKE_BYTES:
                self._shut(descriptor)

    def shut_down_route(self, route: bytes) -> None:
        """End the connection of somebody who was let in."""
        descriptor = self._routes.get(route)
        if descriptor is not None:
            self._shut(descriptor)

    def _received(self, descriptor: int) -> int:
        connection = self._connection(descriptor)
        if connection is None:
            return 0
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
        except (OSError, AttributeError):  # not on this system
            return 0
        finally:
            connection.detach()
        return int.from_bytes(info[_BYTES_RECEIVED], "little") if len(info) >= _BYTES_RECEIVED.stop else 0

    def _shut(self, descriptor: int) -> None:
        """ZeroMQ notices, and closes it."""
        self._forget(descriptor)
        connection = self._connection(descriptor)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.detach()

    def _connection(self, descriptor: int) -> socket.socket | None:
        """The connection of a descriptor of ZeroMQ's, to be detached, if it is still one of this address."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                return connection
        except OSError:
            pass
        connection.detach()
        return None
