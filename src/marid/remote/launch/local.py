"""Workers on this machine, as processes of their own, for as long as this process lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from marid.errors import WorkerLostError
from marid.remote.launch.openmp import openmp_settings

_KEPT_OUT = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS")


@dataclass
class LocalWorker:
    """A worker process. It ends when it is stopped, when it is forgotten, or when this process ends in any way."""

    process: subprocess.Popen[bytes]
    address: str
    _folder: str | None = field(default=None, repr=False)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self, timeout: float = 5.0) -> None:
        """End it, and wait for that."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def start_workers(
    count: int = 1,
    device: str = "cpu",
    transport: str = "ipc",
    *,
    options: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    threads: int | None = None,
    timeout: float = 120.0,
) -> list[LocalWorker]:
    """Start worker processes, all at once, each with an address of its own; wait until they serve.

    ``transport`` is "ipc" (sockets in a directory that only this user can enter) or "tcp" (a free port of ``host``;
    every user of this machine can reach 127.0.0.1). ``options`` are more arguments of ``marid worker``. Each has as
    many ``threads`` as this process, if not given. Raises ``WorkerLostError`` when one does not start.
    """
    started: list[LocalWorker] = []
    try:
        for _ in range(count):
            started.append(_start(device, transport, options, host, threads or torch.get_num_threads()))  # noqa: PERF401  (what was started is stopped on errors)
        for worker in started:
            worker.address = _address(worker, time.monotonic() + timeout)
    except BaseException:
        for worker in started:
            worker.stop(0.1)
        raise
    return started


def _start(device: str, transport: str, options: tuple[str, ...], host: str, threads: int) -> LocalWorker:
    folder = tempfile.mkdtemp(prefix="marid-worker-") if transport == "ipc" else None
    bind = f"ipc://{folder}/socket" if folder is not None else f"{host}:0"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_OUT)}
    # Kernels split sums by threads: with as many as this process has, results are its own bit for bit.
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    environment |= openmp_settings(environment)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and Path(path).exists())
    command = [sys.executable, "-P", "-m", "marid", "worker", "--bind", bind, "--device", device, "--until-eof"]
    process = subprocess.Popen(
        [*command, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the script
    )
    return LocalWorker(process, "", folder)


def _address(worker: LocalWorker, until: float) -> str:
    output: IO[bytes] | None = worker.process.stdout
    assert output is not None
    os.set_blocking(output.fileno(), False)
    text = b""
    while not text.endswith(b"\n"):
        text += output.read() or b""
        if worker.process.poll() is not None or time.monotonic() > until:
            raise WorkerLostError(
                f"a local worker did not start (exit status {worker.process.poll()}); what it said is on standard error"
            )
        time.sleep(0.01)
    return text.decode().split()[-1]
