"""``marid.connect``: giving devices to workers, here or elsewhere."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from marid.errors import LazyTensorError, WorkerLostError
from marid.frontend import handles
from marid.frontend.engines import assign, engine_of, local_engine
from marid.graph.node import Value, fail
from marid.remote.client.engine import RemoteEngine
from marid.remote.client.link import Link
from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.launch.ray_cluster import workers_on_ray
from marid.remote.wire.endpoints import ClientKey, reached_endpoint
from marid.semantics.tracebacks import folded
from marid.settings import settings

_RETRY = 0.5


class _Address:
    """A worker that somebody else has started."""

    def __init__(self, address: str, key: ClientKey | None) -> None:
        self.name = f"worker at {address}"
        self._address, _ = reached_endpoint(address)
        self._key = key

    def open(self) -> Link:
        return Link(self._address, self._key, patience=settings.worker_patience)

    def reopen(self, reason: str) -> Link:
        deadline = time.monotonic() + settings.worker_patience
        while True:
            try:
                return self.open()
            except WorkerLostError as error:
                if time.monotonic() > deadline:
                    raise WorkerLostError(
                        f"{self.name} was lost ({reason}) and has not come back within {settings.worker_patience:g} s: "
                        "start it again and read the value once more, or raise MARID_WORKER_PATIENCE"
                    ) from error
                time.sleep(_RETRY)

    def is_gone(self) -> bool:
        return False

    def stop(self) -> None:
        pass


class _Local:
    """A worker process of this process, started again when it ends."""

    def __init__(self, worker: LocalWorker, device: str, options: tuple[str, ...]) -> None:
        self.name = f"local worker ({device})"
        self.worker = worker
        self._device = device
        self._options = options

    def open(self) -> Link:
        return Link(self.worker.address, patience=settings.worker_patience)

    def reopen(self, reason: str) -> Link:  # noqa: ARG002
        if not self.worker.is_alive:
            self.worker.stop(0.1)
            (self.worker,) = start_workers(1, self._device, options=self._options)
        return self.open()

    def is_gone(self) -> bool:
        return not self.worker.is_alive

    def stop(self) -> None:
        self.worker.stop()


_connected: dict[int, tuple[RemoteEngine, Any]] = {}
os.register_at_fork(after_in_child=_connected.clear)  # the workers are the parent's, also when the child ends


@folded
def connect(
    *addresses: str,
    key: str | os.PathLike[str] | None = None,
    workers: int = 0,
    device: str = "cpu",
    resources: Mapping[str, float] | None = None,
    imports: Sequence[str] = (),
    first: int = 0,
) -> None:
    """Let workers be the devices ``remote_accelerator:0``, ``:1`` and so on (from index ``first`` on).

    ``connect("tcp://host:7070", key="~/.config/marid/client.key")`` reaches workers that run elsewhere, in the order in
    which they are named; ``connect(workers=2)`` starts as many processes on this machine, which end with this one, each
    with ``device`` ("cpu", "cuda:0"), after importing the modules ``imports``, whose operators they then run.
    ``connect("ray://host:10001", workers=4, resources={"GPU": 1})`` has a Ray cluster place as many, each with these
    resources (a GPU where the cluster has as many, else a CPU); "ray:auto" is the cluster of this machine, or a new one
    for as long as it is needed.

    Raises ``ValueError`` for what is no address, ``LazyTensorError`` when tensors live on one of these devices already,
    ``WorkerLostError`` when nobody answers, and ``AuthenticationError`` when a worker does not accept the key.
    """
    on_ray = len(addresses) == 1 and addresses[0].startswith("ray:")
    count = workers if on_ray else len(addresses) + workers
    if on_ray and (workers < 1 or key is not None):
        raise ValueError("connect() to a Ray cluster takes how many workers there are to be (workers=2), and no key")
    if (bool(addresses) == bool(workers) and not on_ray) or workers < 0:
        raise ValueError("connect() takes addresses of workers, or how many to start (workers=2): one of the two")
    if resources is not None and not on_ray:
        raise ValueError("connect() takes resources for workers on a Ray cluster only")
    if addresses and imports and not on_ray:
        raise ValueError("who starts a worker says what it imports: `marid worker --import MODULE`")
    if first < 0 or first + count > handles.device_count:
        raise ValueError(
            f"{count} worker(s) from {handles.DEVICE_TYPE}:{first} on need {first + count} device indices, and there "
            f"are {handles.device_count}: MARID_DEVICES sets how many"
        )
    credentials = None if key is None else ClientKey.read(key)
    connections: list[Any] = [] if on_ray else [_Address(address, credentials) for address in addresses]
    indices = range(first, first + count)
    _refuse_living(indices, "connect")
    options = tuple([part for name in imports for part in ("--import", name)])
    if on_ray:
        connections = [*workers_on_ray(addresses[0], workers, resources, options)]
    elif not addresses:
        connections = [_Local(one, device, options) for one in start_workers(workers, device, options=options)]
    engines: list[RemoteEngine] = []
    try:
        for connection in connections:
            engines.append(RemoteEngine(connection))  # noqa: PERF401  (those that are open are closed on errors)
    except BaseException:
        for engine in engines:
            engine.close()
        for connection in connections:
            connection.stop()
        raise
    _leave(indices)
    atexit.unregister(_end)
    atexit.register(_end)  # what connections need, as Ray, ends later than they do
    for index, engine, connection in zip(indices, engines, connections, strict=True):
        _connected[index] = engine, connection
    assign(zip(indices, engines, strict=True))


def connection_of(index: int) -> Any:
    """How the worker of a device is reached. Raises ``KeyError``."""
    return _connected[index][1]


@folded
def disconnect(*indices: int, force: bool = False) -> None:
    """Let these devices (all that are connected, if none is named) be this process again, and end workers that
    ``connect`` has started. Raises ``LazyTensorError`` when tensors live there still, unless they may be lost
    (``force``)."""
    chosen = indices or tuple(_connected)
    for index in chosen:
        if index not in _connected:
            raise ValueError(f"{handles.DEVICE_TYPE}:{index} is not connected to a worker")
    if not force:
        _refuse_living(chosen, "disconnect")
    _leave(chosen)


def _leave(indices: Sequence[int]) -> None:
    for index in indices:
        entry = _connected.pop(index, None)
        if entry is not None:
            _lose(index, entry[0].name)
            assign([(index, local_engine)])
            entry[0].close()
            entry[1].stop()


def _lose(index: int, name: str) -> None:
    """What still lives on a device that is left is lost; whoever reads it is told."""
    for value in _living(index):
        value.concrete = None
        error = WorkerLostError(f"the {name} was disconnected\n  made at {value.node.site}")
        fail(value.node, error)
    handles.tape(index).fail_dependents()


def _living(index: int) -> list[Value]:
    tape = handles.tape(index)
    return [*tape.pending(), *tape.resident_values()]


def _refuse_living(indices: Sequence[int], what: str) -> None:
    if any(_living(index) for index in indices):
        gc.collect()  # what only errors and cycles hold is nobody's
    for index in indices:
        values = _living(index)
        if values:
            oldest = min((value.node for value in values), key=lambda node: node.seq)
            raise LazyTensorError(
                f"marid.{what}() at a moment when {len(values)} value(s) live on {handles.DEVICE_TYPE}:{index} (the "
                f"oldest was made at {oldest.site}): they belong to {engine_of(index).name}. Do it before tensors are "
                "made there, or after they are dropped"
            )


def _end() -> None:
    for index in tuple(_connected):
        engine, connection = _connected.pop(index)
        engine.close()
        connection.stop()
