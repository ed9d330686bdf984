"""Where a worker is reached, and who may: addresses as users and ZeroMQ write them, and CURVE keys in files."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from marid.errors import AuthenticationError

__all__ = [
    "ClientKey",
    "WorkerKeys",
    "endpoint",
    "host_of",
    "is_loopback",
    "make_client",
    "make_worker",
    "public_key_of",
    "served_endpoint",
]

# --- addresses -------------------------------------------------------------------------------------------------------


def endpoint(bind: str) -> tuple[str, bool]:
    """The ZeroMQ endpoint of ``HOST:PORT``, ``tcp://...`` or ``ipc://...``, and whether only this machine reaches it.

    Raises ``ValueError``.
    """
    if bind.startswith("ipc://"):
        return bind, True
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    if not host or not (port.isdigit() or port == "*"):
        raise ValueError(f"{bind!r} is no address: give HOST:PORT, for example 127.0.0.1:7070")
    shown = "127.0.0.1" if host == "localhost" else host
    return f"tcp://{shown}:{'*' if port == '0' else port}", is_loopback(host.strip("[]"))


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
