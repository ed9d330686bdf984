"""The client's end of a connection, and what both ends ask of ZeroMQ; nothing of what messages mean.

Each is used by one thread at a time. Sizes are limited before memory is taken; heartbeats find connections that are
only half open.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import zmq

from marid.remote.wire.codec import HEADER_BYTES, SEGMENT_BYTES, SEGMENTS
from marid.remote.wire.endpoints import ClientKey

__all__ = ["BURST", "REFUSED", "ClientSocket", "Wake", "events", "greets", "received", "set_options"]


_DENIED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_BEATS = 2000  # milliseconds between heartbeats; three that fail end a connection
_RETRY = 200  # milliseconds between attempts to connect
_LINGER = 500  # milliseconds for the last message
_SIGNATURE = b"\xff"  # with which ZMTP begins
BURST = 64
"""Messages taken at once."""
_READABLE = int(zmq.POLLIN)  # an enum would be made of the sum


class Wake:
    """Lets one thread wake another one that polls."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)

    def fileno(self) -> int:
        """What to poll."""
        return self._out.fileno()

    def wake(self) -> None:
        """Have the poll end."""
        with contextlib.suppress(BlockingIOError, OSError):  # awake already, or closed
            self._in.send(b"\0")

    def clear(self) -> None:
        """The poll has ended."""
        with contextlib.suppress(BlockingIOError):
            self._out.recv(4096)

    def close(self) -> None:
        """No more of it."""
        self._out.close()
        self._in.close()


def set_options(one: zmq.Socket[bytes], interval: int) -> None:
    one.maxmsgsize = max(HEADER_BYTES, SEGMENT_BYTES)
    one.sndhwm = 0  # what waits to be sent is bounded by those who send
    one.setsockopt(zmq.HEARTBEAT_IVL, interval)
    one.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * interval)
    one.setsockopt(zmq.IPV6, 1)


class ClientSocket:
    """A connection to ``address``, which ZeroMQ goes on trying to make. ``wake`` ends a ``poll`` too."""

    def __init__(self, context: zmq.Context[Any], address: str, key: ClientKey | None, wake: Wake) -> None:
        self._socket = context.socket(zmq.DEALER)
        set_options(self._socket, _BEATS)
        self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RETRY)
        if key is not None:
            key.put_on(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        self._wake = wake
        self._poller = zmq.Poller()
        for one in (self._socket, wake.fileno()):
            self._poller.register(one, zmq.POLLIN)
        self.broken = False
        """The connection has ended."""
        self.refused = False
        """The other side does not accept the key, or the lack of one."""
        self.dropped = False
        """The connection ended before that was decided: the other side may have another key, or the network broke."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, header: bytes, segments: list[Any]) -> int:
        """Send a message, without waiting and without copying segments; its bytes."""
        self._socket.send_multipart([header, *segments], copy=False)
        return len(header) + (sum(memoryview(segment).nbytes for segment in segments) if segments else 0)

    def poll(self, milliseconds: int) -> Iterator[list[Any]]:
        """Wait for messages that long at most; those that have come."""
        ready = dict(self._poller.poll(milliseconds))
        if self._wake.fileno() in ready:
            self._wake.clear()
        if self._socket in ready:
            yield from received(self._socket)
        else:
            self._look()

    def _look(self) -> None:
        """Note what became of the connection, when nothing has come; polling for it would cost each message."""
        for event, _ in events(self._monitor):
            self.broken = self.broken or event == zmq.EVENT_DISCONNECTED
            self.dropped = self.dropped or event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            self.refused = self.refused or event in _DENIED

    def close(self, farewell: bytes | None = None) -> None:
        """End the connection, at once or after a last message."""
        if farewell is not None:
            self._socket.send(farewell)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0 if farewell is None else _LINGER)


def greets(address: str, seconds: float) -> bool:
    """Whether somebody who speaks ZeroMQ is behind an address: it says so at once. A tunnel or a proxy takes a
    connection also when there is nobody behind it. True for addresses of which that cannot be seen."""
    if not address.startswith("tcp://"):
        return True
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            connection.settimeout(seconds)
            return connection.recv(1) == _SIGNATURE
    except OSError:
        return False


def events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    while _has_message(monitor):
        data = monitor.recv_multipart()[0]
        yield int.from_bytes(data[:2], "little"), int.from_bytes(data[2:6], "little")


def received(one: zmq.Socket[bytes]) -> Iterator[list[Any]]:
    """The messages that have come, some at a time."""
    for _ in range(BURST):
        if not _has_message(one):
            return
        frames: Any = one.recv_multipart(copy=False)
        yield frames if len(frames) <= SEGMENTS + 3 else frames[:1]  # nobody has use for the rest


def _has_message(one: zmq.Socket[bytes]) -> bool:
    return bool(int(one.getsockopt(zmq.EVENTS)) & _READABLE)  # a tenth of what an exception costs
