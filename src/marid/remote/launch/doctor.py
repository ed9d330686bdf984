"""``marid doctor ADDRESS``: what is wrong with a connection, found step by step, each told as it is done."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from marid.errors import LazyTensorError
from marid.remote.client.link import Link
from marid.remote.client.window import LinkLost, RequestFailed
from marid.remote.wire import requests as ask
from marid.remote.wire.endpoints import ClientKey, reached_endpoint
from marid.remote.wire.tensors import CHUNK_BYTES
from marid.report.units import bytes_text

_ROUNDS = 30
_PIECES = 8
_SECONDS = 5.0


def examine(address: str, key: str | os.PathLike[str] | None, say: Callable[[str], None]) -> bool:
    """Look at the way to a worker and at the worker; whether all is well."""
    try:
        for line in _steps(address, key):
            say(line)
    except (LazyTensorError, LinkLost, RequestFailed, OSError, ValueError, TimeoutError) as error:
        say(f"FAILED  {error}")
        return False
    say("ok      all is well")
    return True


def _steps(address: str, key: str | os.PathLike[str] | None) -> Iterator[str]:
    target, is_here = reached_endpoint(address)
    if target.startswith("ipc://"):
        if not Path(target.removeprefix("ipc://")).exists():
            raise FileNotFoundError(f"there is no socket at {address}: is the worker running, on this machine?")
        yield f"ok      there is a socket at {address}"
    else:
        yield from _reach(target)
    given = None if key is None else ClientKey.read(key)
    if given is None and not is_here:
        yield "note    no key was given (--key): a worker that others reach has keys"
    link = Link(target, given, timeout=_SECONDS)
    try:
        yield from _talk(link)
    finally:
        link.close()


def _reach(target: str) -> Iterator[str]:
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    name = host.strip("[]")
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)})
    except OSError as error:
        raise OSError(f"{name} is no name that this machine knows: {error}") from None
    yield f"ok      {name} is {', '.join(found)}"
    start = time.perf_counter()
    try:
        with socket.create_connection((name, int(port)), _SECONDS):
            yield f"ok      something listens at port {port} ({1000 * (time.perf_counter() - start):.1f} ms)"
    except OSError as error:
        raise OSError(
            f"nothing listens at {name} port {port} ({error}): is `marid worker --bind HOST:{port}` running there, "
            "with an address that this machine reaches, and does no firewall drop it?"
        ) from None


def _talk(link: Link) -> Iterator[str]:
    welcome = link.welcome
    how = "encrypted, both keys accepted" if link.is_encrypted else "not encrypted, no keys"
    yield f"ok      a worker answers on {welcome['device']}, process {welcome['pid']} ({how})"
    here, there = torch.__version__.partition("+")[0], str(welcome["torch"]).partition("+")[0]
    if here == there:
        yield f"ok      PyTorch {there} on both sides"
    else:
        yield f"note    PyTorch {there} there and {here} here: results may differ, operators may be missing"
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        stats = link.wait(link.send([ask.Stats()]), _SECONDS)
        times.append(1000 * (time.perf_counter() - start))
    usual = statistics.median(times)
    yield f"ok      a round trip takes {usual:.2f} ms (the slowest of {_ROUNDS}: {max(times):.2f} ms)"
    up, down = _throughput(link)
    yield f"ok      {bytes_text(int(up))}/s up, {bytes_text(int(down))}/s down"
    limit = f" of {bytes_text(stats['memory_limit'])}" if stats["memory_limit"] else ""
    held = stats["bytes"] + stats["other_bytes"]
    yield f"ok      {stats['sessions']} sessions hold {bytes_text(held)}{limit}; {stats['runs']} programs have run"
    refused = {reason: count for reason, count in stats["refused"].items() if count}
    if refused:
        yield "note    refused so far: " + ", ".join(f"{count} ({reason})" for reason, count in sorted(refused.items()))


def _throughput(link: Link) -> tuple[float, float]:
    """Bytes a second, up and down."""
    data = bytes(CHUNK_BYTES)
    start = time.perf_counter()
    pieces = [ask.Upload(handle, torch.uint8, (CHUNK_BYTES,), (1,), (data,)) for handle in range(1, _PIECES + 1)]
    link.wait(link.send(pieces) + _PIECES - 1, 60.0)
    middle = time.perf_counter()
    first = link.send([*[ask.Fetch(piece.handle) for piece in pieces], ask.Free(tuple(p.handle for p in pieces))])
    link.wait(first + _PIECES, 60.0)
    end = time.perf_counter()
    return _PIECES * CHUNK_BYTES / (middle - start), _PIECES * CHUNK_BYTES / (end - middle)
