"""``marid.process_group`` and ``marid.all_reduce``: what several workers reduce together, asked for by one script.

The members reduce through ``torch.distributed``; this process tells each of them to, before it waits for any. When one
is lost, the others are told by their connections to it, or by the group's timeout; the lost one is replaced, a new
group is formed, and what was to be reduced is reduced again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from marid.errors import LazyTensorError, MaterializationError, WorkerLostError
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import fail_dependents, materialize
from marid.remote.client import transfers as exchange
from marid.remote.client.engine import RemoteEngine
from marid.remote.client.journal import compact
from marid.remote.client.link import Link
from marid.remote.client.steps import AskStep
from marid.remote.client.transfers import ReduceStep, TakeStep
from marid.remote.wire.endpoints import host_of, is_loopback
from marid.remote.wire.requests import OPERATIONS, Join, Leave, Meet
from marid.semantics.scopes import current_site
from marid.semantics.tracebacks import folded

_ATTEMPTS = 3


class ProcessGroup:
    """Devices that are workers, and reduce together; made by ``marid.process_group``."""

    def __init__(self, devices: Sequence[torch.device], timeout: int) -> None:
        self.devices = tuple(devices)
        self.timeout = timeout
        self._number = b""
        self._links: tuple[Link, ...] = ()  # on which it was formed

    def __repr__(self) -> str:
        return f"ProcessGroup({', '.join(map(str, self.devices))})"

    @property
    def engines(self) -> list[RemoteEngine]:
        """The engines of the devices. Raises ``LazyTensorError`` when one is no worker (any more)."""
        engines = [engine_of(device.index) for device in self.devices]
        for device, engine in zip(self.devices, engines, strict=True):
            if not isinstance(engine, RemoteEngine):
                raise LazyTensorError(f"{device} is this process: marid.connect() makes it a worker")
        return engines  # pyright: ignore[reportReturnType]

    def formed(self) -> bytes:
        """Its number on the workers, after forming it where that is necessary. Raises ``WorkerLostError``."""
        engines = self.engines
        links = tuple([engine.link for engine in engines])
        if self._number and all(a is b for a, b in zip(links, self._links, strict=True)):
            return self._number
        number = os.urandom(16)
        hosts = [host_of(engine.link.address) for engine in engines]
        if len(hosts) > 1 and any(is_loopback(host) for host in hosts) and not all(map(is_loopback, hosts)):
            raise LazyTensorError(
                f"{self}: some of these workers are reached at addresses of this machine only ({', '.join(hosts)}), "
                "where the others cannot find them; connect() to all of them by addresses of the network"
            )
        meeting = engines[0].ask(Meet(number, self.timeout))
        engines[0].finish(meeting)
        size = len(engines)
        joins = [
            engine.ask(Join(number, rank, size, hosts[0], meeting.result, hosts[rank], self.timeout))
            for rank, engine in enumerate(engines)
        ]
        _finish(engines, joins)
        self._number, self._links = number, tuple([engine.link for engine in engines])
        return number

    def abandon(self) -> None:
        """Ctrl-C: let no member wait for others that were not asked, or have stopped."""
        for engine in self.engines:
            with contextlib.suppress(LazyTensorError):
                engine.cancel()
        self.forget()

    def forget(self) -> None:
        """It has failed: the next use forms it anew."""
        number, self._number = self._number, b""
        if number:
            for engine in self.engines:
                with contextlib.suppress(LazyTensorError):
                    engine.ask(Leave(number))


@folded
def process_group(devices: Sequence[str | int | torch.device], *, timeout: int = 60) -> ProcessGroup:
    """Devices that reduce together (``marid.all_reduce``); each must be a worker of its own (``marid.connect``).

    Their workers form a process group of ``torch.distributed``, gloo on CPUs and NCCL on CUDA devices, when it is first
    used, and again when one of them had to be replaced. The workers must reach each other at the addresses by which
    they were connected to; what they send each other is not encrypted. ``timeout`` is how many seconds members wait for
    each other.
    """
    chosen = [torch.device(handles.DEVICE_TYPE, one) if isinstance(one, int) else torch.device(one) for one in devices]
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError("process_group() takes one or more devices, each once")
    for device in chosen:
        if device.type != handles.DEVICE_TYPE or device.index is None:
            raise ValueError(f"process_group() takes devices like '{handles.DEVICE_TYPE}:0', but got {str(device)!r}")
        handles.check_index(device)
    if not 1 <= timeout <= 3600:
        raise ValueError("the timeout of a process group is 1 to 3600 seconds")
    group = ProcessGroup(chosen, timeout)
    assert group.engines
    return group


@folded
def all_reduce(tensors: Sequence[torch.Tensor], op: str = "sum", *, group: ProcessGroup) -> list[torch.Tensor]:
    """New tensors, one for each member of ``group``: what the given ones, one on each member's device, in its order,
    are together. ``op`` is "sum", "mean" (of floating-point numbers), "max" or "min". No gradient flows through.

    All must have the same shape and dtype. Waits until it is done. Raises ``ValueError`` for tensors that do not fit,
    ``MaterializationError`` when what they need fails, and ``WorkerLostError`` when it could not be done in
    some attempts.
    """
    _check(tensors, op, group)
    with torch.no_grad():
        given: list[Any] = [tensor.detach().contiguous() for tensor in tensors]
    for attempt in range(_ATTEMPTS):
        _ready(given)
        try:
            made = _reduced(given, op, group)
        except KeyboardInterrupt:
            group.abandon()
            raise
        except MaterializationError:
            fail_dependents()
            continue  # it is raised where they are made ready, if they need what failed
        except WorkerLostError:
            group.forget()
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        spec = given[0]._value.spec
        specs = [handles.spec(spec.shape, spec.stride, 0, spec.dtype, device.index) for device in group.devices]
        return [handles.wrap(handles.source(buffer, of), of) for buffer, of in zip(made, specs, strict=True)]
    raise WorkerLostError(f"all_reduce() at {current_site()} failed {_ATTEMPTS} times")


def _check(tensors: Sequence[torch.Tensor], op: str, group: ProcessGroup) -> None:
    if op not in OPERATIONS:
        raise ValueError(f"all_reduce() can do {', '.join(OPERATIONS)}, but was asked for {op!r}")
    if len(tensors) != len(group.devices):
        raise ValueError(f"all_reduce() got {len(tensors)} tensor(s) for the {len(group.devices)} members of {group}")
    first = tensors[0]
    for tensor, device in zip(tensors, group.devices, strict=True):
        if not handles.is_lazy(tensor) or tensor.device != device:
            raise ValueError(f"all_reduce() expects a tensor on {device}, but got one on {tensor.device}")
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"all_reduce() expects tensors that are alike, but got {first.dtype}{list(first.shape)} and "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
    if first.dtype in (torch.bool, torch.complex32, torch.complex64, torch.complex128) or (
        op == "mean" and not first.dtype.is_floating_point
    ):
        raise ValueError(f"all_reduce() cannot take the {op} of {first.dtype} tensors")


def _ready(given: list[Any]) -> None:
    """Have all that the tensors need run, on all workers at once: a member whose tensor fails must not keep the others
    waiting for it."""
    for tensor in given:
        materialize((tensor,), "all_reduce()", "buffer")
        with contextlib.suppress(MaterializationError):  # raised below
            engine_of(tensor._value.spec.device).flush()  # pyright: ignore[reportAttributeAccessIssue]
    for tensor in given:
        materialize((tensor,), "all_reduce()")


def _reduced(given: list[Any], op: str, group: ProcessGroup) -> list[Any]:
    """The buffers of the results."""
    engines = group.engines
    for engine in engines:
        engine.revive()
    number = group.formed()
    steps = [exchange.reduce(engine, number, op, t._value.concrete) for engine, t in zip(engines, given, strict=True)]
    _finish(engines, steps)
    if len(engines) > 1:
        _keep_for_each_other(engines, steps)
    return [step.result for step in steps]


def _keep_for_each_other(engines: list[RemoteEngine], steps: list[ReduceStep]) -> None:
    """Let each member keep what its predecessor would need to have the result again."""
    packed = [exchange.pack(engine, step.result) for engine, step in zip(engines, steps, strict=True)]
    for index, (engine, step) in enumerate(zip(engines, steps, strict=True)):
        other = (index + 1) % len(engines)
        copy = TakeStep(engines[other], engine, packed[other], step.result, step.site, False)
        copy.done(None)
        with engine.lock:
            step.had_from(copy)
            engine.queue.journal.note_copy(step)
            compact(engine.delivery)


def _finish(engines: list[RemoteEngine], steps: Sequence[AskStep | ReduceStep]) -> None:
    """Wait for all of them; raise what went wrong first, ``WorkerLostError`` where one was refused."""
    raised: Exception | None = None
    for engine, step in zip(engines, steps, strict=True):
        try:
            engine.finish(step)
        except LazyTensorError as error:
            raised = raised or error
    if raised is not None:
        raise raised
    if not all(step.answered for step in steps):
        raise WorkerLostError(f"a member of a process group did not do its part at {current_site()}")
