"""Process groups of ``torch.distributed`` inside of workers: reductions of tensors that lie on several of them.

A group has a thread, on which it is formed and reduces, so that the worker goes on with other sessions. Everything in
it ends after its timeout, and as soon as a member's connection breaks; a group that has failed is of no more use.
Tensors travel as ``torch.distributed`` sends them: neither encrypted nor authenticated.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from marid.errors import WireError
from marid.remote.wire import requests as ask


class WouldBlock(Exception):
    """A request is to be asked again when something ``is_over``; until then its session is set aside."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.is_over = is_over


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_threads = threading.BoundedSemaphore(256)  # that of a group that was left ends with what it waits for


class CollectiveFailed(Exception):
    """A group was not formed, or did not come to an end with what it was to reduce."""


class Store:
    """Where the members of a group meet, on the worker of the first one."""

    def __init__(self, timeout: float) -> None:
        try:  # it listens at all addresses, and is a client of its own: by one that no network can keep it waiting for
            self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), False)
        except (RuntimeError, ValueError) as error:
            raise CollectiveFailed(f"no store: {error}") from error
        self.port = self.store.port


class Job:
    """Something that a group does on its thread. ``error`` is why it failed."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self.is_over = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Do it; on the thread of the group."""
        try:
            self._do()
        except Exception as error:  # raised where it is waited for
            self.error = CollectiveFailed(str(error))
        self.is_over = True


class Group:
    """One member of a process group: ``rank`` of ``size``. ``changed`` is called when a job is over."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float, changed: Callable[[], None]) -> None:
        self._rank, self._size, self._device, self._timeout = rank, size, device, timedelta(seconds=timeout)
        self._group: Any = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = changed
        if not _threads.acquire(blocking=False):
            raise CollectiveFailed("as many groups as there may be wait for their members, or their timeouts")
        threading.Thread(target=self._serve, name="marid-group", daemon=True).start()

    def join(self, store: Store | None, host: str, port: int, own: str) -> Job:
        """Form it: meet at ``host``, be reached at ``own``."""

        def form() -> None:
            met = store.store if store is not None else TCPStore(host, port, None, False, self._timeout, False)
            if self._device.type == "cuda":
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                torch.cuda.set_device(self._device)
                self._group = dist.ProcessGroupNCCL(met, self._rank, self._size, options)
                return
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportPrivateUsage]
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
            self._group = dist.ProcessGroupGloo(met, self._rank, self._size, options)

        return self._do(form)

    def reduce(self, tensor: torch.Tensor, operation: str) -> Job:
        """Reduce a tensor of this worker, in place, with those of the other members."""

        def reduce() -> None:
            if self._group is None:
                raise RuntimeError("the group was not formed")
            options = dist.AllreduceOptions()
            options.reduceOp = _OPERATIONS[operation]
            options.timeout = self._timeout
            self._group.allreduce([tensor], options).wait()
            if operation == "mean":
                tensor.div_(self._size)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return self._do(reduce)

    def close(self) -> None:
        """It is not needed any more; what it still does comes to its end, or its timeout."""
        self._jobs.put(None)

    def _do(self, do: Callable[[], None]) -> Job:
        job = Job(do)
        self._jobs.put(job)
        return job

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._changed()
        self._group = None
        _threads.release()


# --- the groups of a session -----------------------------------------------------------------------------------------


_GROUPS = 64  # of one session


class _Holder(Protocol):
    """Who has the tensors."""

    def reduced(self, request: ask.Reduce) -> torch.Tensor:
        """What is to be reduced in place."""
        ...

    def keep(self, handle: int, tensor: torch.Tensor) -> None:
        """What has come of it."""
        ...


class Groups:
    """The groups that a session is a member of. Used on the thread that runs programs."""

    def __init__(self, device: torch.device, changed: Callable[[], None]) -> None:
        self._device = device
        self._changed = changed
        self._stores: dict[bytes, Store] = {}
        self._groups: dict[bytes, Group] = {}
        self._jobs: dict[ask.Join | ask.Reduce, tuple[Job, torch.Tensor | None]] = {}  # by the request that waits

    def do(self, request: Any, holder: _Holder) -> int | None:
        """Do what a request says. Raises ``WouldBlock`` while others have to do their part, ``CollectiveFailed``."""
        if isinstance(request, ask.Meet):
            if len(self._stores) + len(self._groups) >= _GROUPS:
                raise WireError("a session has more groups than it may have")
            store = self._stores[request.group] = Store(request.timeout)
            return store.port
        if isinstance(request, ask.Leave):
            self._leave(request.group)
            return None
        job, tensor = self._jobs.get(request) or self._begin(request, holder)
        if not job.is_over:
            raise WouldBlock(lambda: job.is_over)
        del self._jobs[request]
        if job.error is not None:
            self._leave(request.group)
            raise job.error
        if tensor is not None:
            holder.keep(request.handle, tensor)
        return None

    def _begin(self, request: Any, holder: _Holder) -> tuple[Job, torch.Tensor | None]:
        if isinstance(request, ask.Join):
            if request.group in self._groups or len(self._stores) + len(self._groups) >= _GROUPS:
                raise WireError("a group was joined before, or a session has more than it may have")
            group = Group(request.rank, request.size, self._device, request.timeout, self._changed)
            self._groups[request.group] = group
            store = self._stores.get(request.group)
            begun = group.join(store, request.host, request.port, request.own), None
        else:
            group = self._groups.get(request.group)
            if group is None:
                raise CollectiveFailed("there is no such group here (any more)")
            tensor = holder.reduced(request)
            begun = group.reduce(tensor, request.operation), tensor
        self._jobs[request] = begun
        return begun

    def _leave(self, number: bytes) -> None:
        self._stores.pop(number, None)
        for request in [one for one in self._jobs if one.group == number]:
            del self._jobs[request]
        group = self._groups.pop(number, None)
        if group is not None:
            group.close()

    def clear(self) -> None:
        """The session has ended."""
        for number in {*self._stores, *self._groups}:
            self._leave(number)
