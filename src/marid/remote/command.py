"""What ``marid worker`` and ``marid worker keygen`` do."""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import platformdirs
import torch

from marid.errors import AuthenticationError
from marid.remote.keys import make_client, make_worker
from marid.remote.operators import admit_namespace
from marid.remote.worker import Limits, Worker

__all__ = ["KEYS", "keygen", "parse_bytes", "serve"]

KEYS = Path(platformdirs.user_config_dir("marid")) / "keys"
"""Where ``marid worker keygen`` puts keys if it is not told."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def serve(
    bind: str,
    device: str,
    keys: Path | None,
    imports: Sequence[str],
    limits: Limits,
    until_eof: bool,
) -> None:
    """Serve until interrupted; with ``until_eof`` until standard input ends, as when who started it is gone."""
    _keep_freed_memory()
    where = _device(device)
    before = set(dir(torch.ops))
    for name in imports:
        importlib.import_module(name)
        for namespace in _namespaces() - before:
            admit_namespace(namespace)
    try:
        worker = Worker(bind, where, keys, limits)
    except (AuthenticationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"marid worker on {where}: {worker.address}")
    sys.stdout.flush()
    try:
        worker.serve(_has_ended if until_eof else None)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


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
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
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
    """``8g``, ``512M``, ``1000``. Raises ``ValueError``."""
    text = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = text[-1:] if text[-1:] in _UNITS and text[-1:] else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])
