"""What runs on a node of a Ray cluster: an actor that keeps one worker process there.

Ray places the actor, gives it its share of accelerators, and starts it again when it dies; the worker ends with it.
Only addresses and public keys go through Ray.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import ray.util  # pyright: ignore[reportMissingImports]

from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.wire.endpoints import make_worker, public_key_of

__all__ = ["WorkerActor"]


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
