"""Workers on a Ray cluster: one actor for each, placed by Ray, and reached over Marid's own wire.

A cluster connection has a key pair of its own. The public part goes to the actors, whose workers let nobody else in;
they say their public keys in return. Whether what comes through Ray can be trusted is up to Ray's authentication
(``RAY_AUTH_MODE=token``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zmq

from marid.errors import LazyTensorError, WorkerLostError
from marid.remote.client.link import Link
from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.wire.endpoints import ClientKey, make_worker, public_key_of
from marid.settings import settings

_START = 120.0  # seconds for actors to be placed, and for a worker to start
_REACH = 2.0  # seconds for the head of a cluster on this machine to accept a connection
_RETRY = 0.5


def workers_on_ray(
    address: str, count: int, resources: Mapping[str, float] | None, options: tuple[str, ...] = ()
) -> list[OnRay]:
    """Have as many workers placed on the cluster at ``address`` (``ray:auto``, ``ray://host:port``), each with these
    ``resources``: a GPU where the cluster has as many, else a CPU, if not given.

    Raises ``LazyTensorError`` when Ray is not installed or the cluster has not what was asked for, and what Ray raises
    when the cluster cannot be reached.
    """
    cluster = _Cluster(address)
    try:
        return cluster.place(count, resources, options)
    except BaseException:
        cluster.end()
        raise


class _Cluster:
    """A connection to a cluster, for as long as one of its workers is used."""

    def __init__(self, address: str) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise LazyTensorError("marid.connect() to a Ray cluster needs Ray: pip install 'marid[ray]'") from None
        self.ray: Any = ray
        self.key: tuple[bytes, bytes] = zmq.curve_keypair()
        self.name = os.urandom(3).hex()
        self._started = not ray.is_initialized()
        self._group: Any = None
        self._used: set[OnRay] = set()
        if self._started:
            where = _found_here() if address == "ray:auto" else address
            ray.init(where, namespace="marid", log_to_driver=False)

    def place(self, count: int, resources: Mapping[str, float] | None, options: tuple[str, ...]) -> list[OnRay]:
        """Start the actors, and wait until each has a place."""
        from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        has = self.ray.cluster_resources()
        usual = {"GPU": 1.0} if has.get("GPU", 0) >= count else {"CPU": 1.0}
        wanted: dict[str, float] = dict(resources) if resources else usual
        self._group = placement_group([wanted] * count, name=f"marid-{self.name}")
        if not self._group.wait(settings.worker_patience):
            inventory = {name: amount for name, amount in has.items() if ":" not in name}
            raise LazyTensorError(
                f"the Ray cluster has found no room for {count} worker(s) with {wanted} each within "
                f"{settings.worker_patience} s: it has {inventory} in all, of which others may use some"
            )
        device = "cuda:0" if wanted.get("GPU") else "cpu"  # of those that Ray lets the actor see
        custom = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU", "memory")}
        found = []
        for index in range(count):
            actor = self.ray.remote(WorkerActor).options(
                name=f"marid-worker-{self.name}-{index}",
                num_cpus=wanted.get("CPU", 0),
                num_gpus=wanted.get("GPU", 0),
                memory=wanted.get("memory"),
                resources=custom,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            handle = actor.remote(self.key[0].decode(), device, torch.get_num_threads(), options)
            found.append(OnRay(self, handle, f"worker {index} on Ray ({device})"))
        self._used.update(found)
        return found

    def leave(self, worker: OnRay) -> None:
        """One of them is not needed any more."""
        self._used.discard(worker)
        if not self._used:
            self.end()

    def end(self) -> None:
        """Give back what the cluster had set aside; end Ray where it was started for this."""
        if not self.ray.is_initialized():
            return
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group  # pyright: ignore[reportMissingImports]

            with contextlib.suppress(self.ray.exceptions.RayError):
                remove_placement_group(self._group)
            self._group = None
        if self._started:
            self.ray.shutdown()


def _found_here() -> str | None:
    """What to tell Ray of the cluster of this machine: None to let it look for one, or start one; "local" for a new one
    where the last one that it knows of is gone without a word, since it would wait for that for minutes."""
    if os.environ.get("RAY_ADDRESS"):
        return None
    note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    try:
        host, _, port = note.read_text().strip().rpartition(":")
    except OSError:
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
    except (OSError, ValueError):
        return "local"
    return None


class OnRay:
    """A worker that an actor keeps: its process is started again by the actor, the actor by Ray."""

    def __init__(self, cluster: _Cluster, actor: Any, name: str) -> None:
        self.name = name
        self.actor = actor
        self._cluster = cluster
        self._pid = 0
        self._asked: Any = None

    def open(self) -> Link:
        """A link to it, wherever it is now."""
        ray = self._cluster.ray
        try:
            found = ray.get(self.actor.where.remote(), timeout=_START)
        except ray.exceptions.RayError as error:
            raise WorkerLostError(f"{self.name} cannot be reached through Ray: {error}") from error
        self._pid, self._asked = found["pid"], None
        public, secret = self._cluster.key
        return Link(found["address"], ClientKey(public, secret, found["key"]), patience=settings.worker_patience)

    def reopen(self, reason: str) -> Link:
        """The same, once Ray has found it another place."""
        deadline = time.monotonic() + max(settings.worker_patience, _START)
        while True:
            try:
                return self.open()
            except WorkerLostError as error:
                if time.monotonic() > deadline:
                    raise WorkerLostError(f"{self.name} was lost ({reason}), and Ray has not restarted it") from error
                time.sleep(_RETRY)

    def is_gone(self) -> bool:
        """Whether the actor has said, or Ray, that the process is another one; asked for, but not waited for."""
        ray = self._cluster.ray
        if self._asked is None:
            self._asked = self.actor.where.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            return ray.get(asked)["pid"] != self._pid
        except ray.exceptions.RayError:
            return True

    def stop(self) -> None:
        """End worker and actor."""
        ray = self._cluster.ray
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self.actor.stop.remote(), timeout=5)
            ray.kill(self.actor)
        self._cluster.leave(self)


# --- on a node of the cluster ----------------------------------------------------------------------------------------


class WorkerActor:
    """Keeps one worker on this node, with ``device`` and as many threads as the client has, for who proves the secret
    key to ``client`` (Z85)."""

    def __init__(self, client: str, device: str, threads: int, options: tuple[str, ...]) -> None:
        self._start = device, threads, options
        self._keys = Path(tempfile.mkdtemp(prefix="marid-keys-"))
        self._public = public_key_of(make_worker(self._keys))
        (self._keys / "clients" / "client.pub").write_text(client + "\n")
        self._worker: LocalWorker | None = None

    def where(self) -> dict[str, Any]:
        """Address, public key and process number of the worker, which is started (again) if it does not run."""
        if self._worker is None or not self._worker.is_alive:
            device, threads, options = self._start
            if self._worker is not None:
                self._worker.stop(0.1)
            import ray.util  # pyright: ignore[reportMissingImports]

            host = ray.util.get_node_ip_address()
            (self._worker,) = start_workers(
                1, device, "tcp", options=("--keys", str(self._keys), *options), host=host, threads=threads
            )
        return {"address": self._worker.address, "key": self._public, "pid": self._worker.process.pid}

    def stop(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.stop()
        shutil.rmtree(self._keys, ignore_errors=True)
