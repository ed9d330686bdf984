"""The limits for the connections of a listening socket.

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
import resource
import socket
import time
from collections import OrderedDict

_PENDING = 256  # connections that may be there without having said anything
_PATIENCE = 10.0  # seconds that they may take for it
_HANDSHAKE_BYTES = 16 << 10  # some 500 are enough for the handshake; a first message comes right behind
_RESERVE = 128  # descriptors that are kept for the worker itself
_EVERY = 0.05  # seconds between looks at pending connections
_EVERY_ADMITTED = 0.25  # seconds between looks at the others
_INCOMPLETE = 128 << 20  # bytes of one message that may wait for its end: clients send at most 49 MB in one
_INCOMPLETE_OF_OWNER = 1 << 30  # the same over all connections of an owner
_BYTES_RECEIVED = slice(128, 136)  # of struct tcp_info (linux/tcp.h): tcpi_bytes_received


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
