"""Where a worker is reached, who may reach it, and over what: addresses, the keys that both sides prove (CURVE), the
client's socket, and what both ends ask of ZeroMQ.

A worker has a directory: ``worker.json`` with its own pair, and ``clients/NAME.pub`` with the public key of each client
that it lets in. A client has one file, ``NAME.json``: its own pair and the worker's public key. Files with a secret key
are readable by their owner only, and refused otherwise.

A socket is used by one thread at a time. Sizes are limited before memory is taken; heartbeats find connections that are
only half open.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from marid.errors import AuthenticationError
from marid.remote.wire.codec import HEADER_BYTES, SEGMENT_BYTES, SEGMENTS

# --- addresses -------------------------------------------------------------------------------------------------------


_PATH_BYTES = 107  # sockaddr_un, which ends in a zero


def endpoint(bind: str) -> tuple[str, bool]:
    """The ZeroMQ endpoint of ``HOST:PORT``, ``tcp://...`` or ``ipc://...``, and whether only this machine reaches it.

    Raises ``ValueError``.
    """
    if bind.startswith("ipc://"):
        if len(os.fsencode(bind.removeprefix("ipc://"))) > _PATH_BYTES:
            raise ValueError(f"{bind!r} is too long: the path of a socket has at most {_PATH_BYTES} bytes")
        return bind, True
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    known = port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)
    if not host or "/" in host or not known:
        raise ValueError(f"{bind!r} is no address: give HOST:PORT, for example 127.0.0.1:7070")
    shown = "127.0.0.1" if host == "localhost" else host
    return f"tcp://{shown}:{'*' if port == '0' else port}", is_loopback(host.strip("[]"))


def reached_endpoint(address: str) -> tuple[str, bool]:
    """The same of an address to connect to, which has a port."""
    found, is_here = endpoint(address)
    if found.endswith(":*"):
        raise ValueError(f"{address!r} has no port: give that at which the worker listens, for example 127.0.0.1:7070")
    return found, is_here


def served_endpoint(bind: str, has_keys: bool) -> str:
    """The endpoint to listen at. Raises ``ValueError``, and ``AuthenticationError`` for a public one without keys."""
    address, loopback = endpoint(bind)
    if not has_keys and not loopback:
        raise AuthenticationError(
            f"{bind} can be reached from other machines, and whoever connects may run programs here: give keys "
            "(`marid worker keygen`, then --keys), or bind to 127.0.0.1"
        )
    return address


def host_of(address: str) -> str:
    """The host of an endpoint, by which others on its network reach it."""
    if address.startswith("ipc://"):
        return "127.0.0.1"
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine as nobody else reaches it. A name other than localhost may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- keys ------------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, repr=False)
class ClientKey:
    """A client's pair, and the public key of its worker; all in Z85."""

    public: bytes
    secret: bytes
    worker: bytes

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ClientKey:
        """From a file that ``marid worker keygen`` wrote. Raises ``AuthenticationError``."""
        fields = _read(Path(path))
        return cls(_key(fields, "public", path), _key(fields, "secret", path), _key(fields, "worker", path))

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that is to connect use this key."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.worker


class WorkerKeys:
    """The keys in a worker's directory. Clients that are added while it runs are let in, removed ones no longer."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        fields = _read(self.directory / "worker.json")
        self._secret = _key(fields, "secret", self.directory)

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that is to bind use these keys."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret

    def admits(self, public: bytes) -> bool:
        """Whether the client with that public key (32 bytes) is let in."""
        return z85.encode(public) in self._listed()

    def admitted(self) -> set[bytes]:
        """The public keys of all clients that are let in, in hexadecimal digits."""
        found: set[bytes] = set()
        for key in self._listed():
            with contextlib.suppress(ValueError, KeyError):  # not one
                found.add(z85.decode(key).hex().encode())
        return found

    def _listed(self) -> set[bytes]:
        found: set[bytes] = set()
        for path in (self.directory / "clients").glob("*.pub"):
            with contextlib.suppress(OSError):
                found.add(path.read_bytes().strip())
        return found


def check_worker(directory: Path) -> None:
    """Raise ``AuthenticationError`` unless there are the keys of a worker; in a process that never has them: what was
    read is in the memory of a process that has ended."""
    reader = os.fork()
    if not reader:
        try:
            WorkerKeys(directory)
            os._exit(0)
        except AuthenticationError:
            os._exit(1)
        finally:
            os._exit(2)
    if os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]):
        WorkerKeys(directory)  # which says what is wrong


def make_worker(directory: str | os.PathLike[str]) -> Path:
    """A pair for a worker, unless the directory has one; the file."""
    directory = Path(directory)
    for folder in (directory, directory / "clients"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "worker.json"
    if not path.exists():
        public, secret = zmq.curve_keypair()
        _write(path, {"public": public.decode(), "secret": secret.decode()})
    return path


def public_key_of(file: Path) -> bytes:
    """The public key (Z85) of the pair in a file. Raises ``AuthenticationError``."""
    return _key(_read(file), "public", file)


def make_client(directory: str | os.PathLike[str], name: str) -> Path:
    """A pair for a client that the worker of this directory will let in; the file to give to the client.

    Raises ``AuthenticationError`` for a name that is taken or no name.
    """
    if not _NAME.fullmatch(name) or name in ("worker", ".", ".."):
        raise AuthenticationError(f"{name!r} is no name for a client: use letters, digits, '-', '_' and '.'")
    directory = Path(directory)
    fields = _read(make_worker(directory))
    path, listed = directory / f"{name}.json", directory / "clients" / f"{name}.pub"
    if path.exists() or listed.exists():
        raise AuthenticationError(f"there is a client {name!r} in {directory} already; remove {listed} first")
    public, secret = zmq.curve_keypair()
    worker = fields["public"]
    _write(path, {"public": public.decode(), "secret": secret.decode(), "worker": worker})
    listed.write_bytes(public + b"\n")
    return path


def _write(path: Path, fields: dict[str, str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise AuthenticationError(f"{path} has a secret key and others may read it: chmod 600 {path}")
            fields = json.loads(file.read(4096))
    except FileNotFoundError:
        raise AuthenticationError(f"there is no key at {path}; `marid worker keygen` makes one") from None
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"{path} cannot be read as a key: {error}") from None
    if type(fields) is not dict:
        raise AuthenticationError(f"{path} is no key")
    return fields


def _key(fields: dict[str, str], name: str, path: object) -> bytes:
    value = fields.get(name)
    try:
        if type(value) is str and len(z85.decode(value)) == 32:
            return value.encode()
    except (ValueError, KeyError):
        pass
    raise AuthenticationError(f"{path} has no {name} key in it")


_DENIED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_BEATS = 2000  # milliseconds between heartbeats; three that fail end a connection
_RETRY = 200  # milliseconds between attempts to connect
_LINGER = 500  # milliseconds for the last message
_SIGNATURE = b"\xff"  # with which ZMTP begins
BURST = 64
"""Messages taken at once."""
_CURVE_BYTES = 64
"""More than the 33 that CurveZMQ puts around a frame, and that count as its own (ZeroMQ RFC 26)."""
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
    one.maxmsgsize = max(HEADER_BYTES, SEGMENT_BYTES) + _CURVE_BYTES
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
