"""Connections before anything is known of them: how many there may be, for how long, and how much they may send.

ZeroMQ takes every connection and waits for its handshake. It tells of each, and a first message says that its sender
has proved its key; what has not come so far is *pending*. The oldest of too many, what is pending for too long, and
what has sent more than a handshake takes is shut down, before it has cost much memory or the last descriptor.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections import OrderedDict

__all__ = ["Doors"]

_PENDING = 256  # connections that may be there without having said anything
_PATIENCE = 10.0  # seconds that they may take for it
_HANDSHAKE_BYTES = 16 << 10  # some 500 are enough for the handshake; a first message comes right behind
_RESERVE = 128  # descriptors that are kept for the worker itself
_EVERY = 0.05  # seconds between looks
_BYTES_RECEIVED = slice(128, 136)  # of struct tcp_info (linux/tcp.h): tcpi_bytes_received


class Doors:
    """Those of one listening socket. Used by one thread at a time."""

    def __init__(self, address: str) -> None:
        self.shut_down = 0
        """How many connections were shut down."""
        self._port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
        self._pending: OrderedDict[int, float] = OrderedDict()  # by descriptor: since when
        self._routes: dict[bytes, int] = {}
        self._descriptors: dict[int, bytes] = {}
        self._looked = 0.0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        self._most = max(soft - _RESERVE, 16) if soft != resource.RLIM_INFINITY else 1 << 20

    @property
    def is_time(self) -> bool:
        """Whether to look again."""
        return bool(self._pending) and time.monotonic() - self._looked > _EVERY

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
        route = self._descriptors.pop(descriptor, None)
        if route is not None:
            self._routes.pop(route, None)

    def knows(self, route: bytes) -> bool:
        """Whether a message has come from there before."""
        return route in self._routes

    def enter(self, route: bytes, descriptor: int) -> None:
        """A first message has come, of somebody who was let in."""
        self._pending.pop(descriptor, None)
        if descriptor < 0:
            return
        before = self._descriptors.pop(descriptor, None)
        if before is not None:
            self._routes.pop(before, None)
        self._routes[route], self._descriptors[descriptor] = descriptor, route

    def look(self) -> None:
        """Shut down what is there for too long, has sent too much, or is too much."""
        self._looked = now = time.monotonic()
        while len(self._pending) > _PENDING or (
            self._pending and len(self._pending) + len(self._descriptors) > self._most
        ):
            self._shut(next(iter(self._pending)))
        for descriptor, since in list(self._pending.items()):
            if now - since > _PATIENCE or self._received(descriptor) > _HANDSHAKE_BYTES:
                self._shut(descriptor)

    def shut(self, route: bytes) -> None:
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
            self.shut_down += 1
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
