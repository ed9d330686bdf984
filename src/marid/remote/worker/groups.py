"""The process groups of one session, on the worker: what requests about them do, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from marid.errors import WireError
from marid.remote.wire import requests as ask
from marid.remote.worker.collectives import CollectiveFailed, Group, Job, Store
from marid.remote.worker.waits import Waits

__all__ = ["Groups"]

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
        self._jobs: dict[ask.Join | ask.Reduce, tuple[Job, torch.Tensor | None]] = {}  # what a request waits for

    def do(self, request: Any, holder: _Holder) -> int | None:
        """Do what a request says. Raises ``Waits`` while others have to do their part, and ``CollectiveFailed``."""
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
            raise Waits(lambda: job.is_over)
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
            known = self._groups.get(request.group)
            if known is None:
                raise CollectiveFailed("there is no such group here (any more)")
            tensor = holder.reduced(request)
            begun = known.reduce(tensor, request.operation), tensor
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
