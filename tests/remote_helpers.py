"""What the tests of workers share: recorded work as requests, and a worker process to send them to."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import marid
from marid.frontend import handles
from marid.frontend.materialize import pending_nodes
from marid.graph.program import bind
from marid.remote.client.link import Link
from marid.remote.launch import connect as connecting
from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.wire import requests as ask
from marid.remote.wire.endpoints import ClientKey
from marid.remote.wire.program_records import body_of, digest_of, geometry_of, packed
from marid.remote.wire.tensors import packing_of, segments_of

__all__ = ["Recorded", "connected", "end", "kill", "linked", "serving", "upload", "within", "worker_process"]


class Recorded:
    """What is pending on the device for some tensors, as a worker is sent it. ``outputs`` are slots, by tensor."""

    def __init__(self, *tensors: Any) -> None:
        task = bind(handles.tape(0).cut([node for tensor in tensors for node in pending_nodes(tensor)]))
        self.inputs: list[torch.Tensor] = task.inputs
        self.params = tuple(task.params)
        self.specs = task.specs
        self.outputs = [task.slots[tensor._value] for tensor in tensors if tensor._value in task.slots]
        self.program = task.build()
        self.body = body_of(self.program)
        self.geometry = geometry_of(task.specs)
        self.digest = digest_of(self.body)
        self.geometry_digest = digest_of(self.geometry)

    def definitions(self) -> list[ask.Request]:
        """The requests that make it known."""
        return [
            ask.Program(self.digest, packed(self.body)),
            ask.Geometry(self.digest, self.geometry_digest, packed(self.geometry)),
        ]

    def uploads(self, first: int) -> list[ask.Request]:
        """The requests for its inputs, as handles from ``first`` on."""
        return [upload(first + index, tensor) for index, tensor in enumerate(self.inputs)]

    def run(self, inputs: tuple[int, ...], base: int, params: tuple[Any, ...] | None = None) -> ask.Run:
        """The request to run it."""
        return ask.Run(self.digest, self.geometry_digest, inputs, self.params if params is None else params, base)

    def results(self, link: Link, first: int, base: int) -> list[torch.Tensor]:
        """The values of the tensors after one run on a worker that knows nothing of it."""
        inputs = tuple(range(first, first + len(self.inputs)))
        setup = [*self.definitions(), *self.uploads(first), self.run(inputs, base)]
        seq = link.send([*setup, *[ask.Fetch(base + slot) for slot in self.outputs]])
        return [link.wait(seq + len(setup) + index) for index in range(len(self.outputs))]


def upload(handle: int, tensor: torch.Tensor) -> ask.Upload:
    """The request that gives a worker a tensor."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
    return ask.Upload(
        handle, tensor.dtype, tuple(tensor.shape), tensor.stride(), tuple(segments_of(packing.pack(tensor)))
    )


@contextlib.contextmanager
def worker_process(*options: str, transport: str = "tcp") -> Iterator[LocalWorker]:
    """A worker process, ended afterwards."""
    (worker,) = start_workers(1, transport=transport, options=options)
    try:
        yield worker
    finally:
        worker.stop()


@contextlib.contextmanager
def connected(*indices: int, device: str = "cpu", imports: Sequence[str] = ()) -> Iterator[None]:
    """These devices, one behind the other, are workers on this machine."""
    gc.collect()  # errors of other tests may hold tensors
    marid.connect(workers=len(indices), first=indices[0], device=device, imports=imports)
    try:
        yield
    finally:
        gc.collect()
        connecting.disconnect(*indices, force=True)


def serving(worker: LocalWorker) -> int:
    """The number of the process that runs programs for a worker without keys."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if int(parent) == worker.process.pid and state != "Z":
                    return int(name)
        time.sleep(0.01)
    raise AssertionError("the worker has no process")


def end(worker: LocalWorker) -> None:
    """End all of a worker, without a chance to say so."""
    pid = serving(worker)
    worker.process.kill()
    worker.process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":  # noqa: SIM115
            time.sleep(0.01)


def kill(*indices: int) -> None:
    """End the processes that run programs for these devices, without a chance to say so."""
    for index in indices:
        os.kill(serving(connecting.connection_of(index).worker), signal.SIGKILL)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """What takes longer, on the main thread, fails with ``TimeoutError``."""

    def ended(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def linked(worker: LocalWorker, key: ClientKey | None = None, **options: Any) -> Iterator[Link]:
    """A session, ended afterwards."""
    link = Link(worker.address, key, **options)
    try:
        yield link
    finally:
        link.close()


assert marid.errors is not None  # importing it gives PyTorch the device
