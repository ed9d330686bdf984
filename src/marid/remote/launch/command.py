"""What ``marid worker`` and ``marid worker keygen`` do."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import platformdirs
import torch
import zmq

from marid.errors import AuthenticationError
from marid.registration import first_use
from marid.remote.launch.fork_server import ForkServer, hide_from_others
from marid.remote.launch.openmp import begin_again
from marid.remote.wire.endpoints import check_worker, make_client, make_worker, served_endpoint
from marid.remote.worker.connections import OwnedSocket, ServerSocket
from marid.remote.worker.operators import admit_namespace
from marid.remote.worker.server import Limits, Worker
from marid.remote.worker.supervisor import Supervisor

KEYS = Path(platformdirs.user_config_dir("marid")) / "keys"
"""Where ``marid worker keygen`` puts keys if it is not told."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_SESSIONS = 64  # of one owner
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def serve(
    bind: str,
    device: str,
    keys: Path | None,
    imports: Sequence[str],
    limits: Limits,
    owners: int,
    until_eof: bool,
) -> int:
    """Serve until interrupted; with ``until_eof`` until standard input ends, as when who started it is gone."""
    where = _device(device)
    if where.type == "cpu":
        begin_again()
    _keep_freed_memory()
    # What clients record may be of any operator that is defined for the device. On CUDA the processes that are forked
    # define them: it counts devices, after which a fork could not use them.
    if where.type == "cpu":
        first_use()
    for name in imports:
        _import(name)
    try:
        address = served_endpoint(bind, keys is not None)
        if keys is not None:
            check_worker(keys)
    except (AuthenticationError, ValueError) as error:
        raise click.ClickException(str(error)) from None

    def alone(address: str, keeper: socket.socket) -> None:
        first_use()
        with _bound(address):
            worker = Worker(ServerSocket(address, None), where, limits)
        _serve(worker, keeper)

    def for_all(address: str, keeper: socket.socket) -> None:
        assert keys is not None
        hide_from_others()
        with _bound(address):
            supervisor = Supervisor(address, keys, owners, keeper)
        _serve(supervisor, keeper)

    def for_one(channel: str) -> None:
        hide_from_others()
        first_use()
        Worker(OwnedSocket(channel), where, replace(limits, sessions=_SESSIONS)).serve()

    def announce(address: str) -> None:
        click.echo(f"marid worker on {where}: {address}")
        sys.stdout.flush()

    keeper = ForkServer(address, alone if keys is None else for_all, for_one, announce)
    try:
        return keeper.run(_has_ended if until_eof else None)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        return 0


def _serve(served: Worker | Supervisor, keeper: socket.socket) -> None:
    """Tell the keeper the address that was got, and serve until it says that it is enough."""
    signal.signal(signal.SIGTERM, lambda *_: served.stop())
    keeper.sendall(f"address {served.address}\n".encode())
    served.serve()


@contextlib.contextmanager
def _bound(address: str) -> Iterator[None]:
    try:
        yield
    except (AuthenticationError, zmq.ZMQError) as error:
        click.echo(f"Error: {address}: {error}", err=True)
        raise SystemExit(1) from None


def _import(name: str) -> None:
    """Import a module, and admit the operators of the namespaces that are new then."""
    before = _namespaces()
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--import {name}: {error}") from None
    for namespace in _namespaces() - before:
        admit_namespace(namespace)


def _keep_freed_memory() -> None:
    """Let malloc use again what messages were received into. By itself the GNU C library gives each of them back to the
    system, which takes longer to hand it out again, page by page, than the network takes to fill it (mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # memory of ZeroMQ's threads lies where the limits below hold
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def _namespaces() -> set[str]:
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise click.ClickException(f"--device {name}: a worker runs on cpu or cuda:N") from None
    # Not ``is_available``, which begins to use CUDA: the processes that are forked from this one could not.
    if device.type == "cuda" and torch.cuda.device_count() <= (device.index or 0):
        raise click.ClickException(f"--device {name}: PyTorch finds no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise click.ClickException(f"--device {name}: a worker runs on cpu or cuda:N")
    return device


def _has_ended() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def keygen(directory: Path, client: str) -> tuple[Path, Path]:
    """Keys for a worker, where there are none, and for a client; both files."""
    try:
        return make_worker(directory), make_client(directory, client)
    except AuthenticationError as error:
        raise click.ClickException(str(error)) from None


def parse_bytes(text: str) -> int:
    """``8g``, ``512M``, ``1000``. Raises ``ValueError``, also for what is negative or not finite."""
    text = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = text[-1:] if text[-1:] in _UNITS and text[-1:] else ""
    count = float(text.removesuffix(unit)) * _UNITS[unit]
    if not 0 <= count < 1 << 62:
        raise ValueError(f"{text!r} is no number of bytes")
    return int(count)
