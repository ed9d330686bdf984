"""What devices have from each other: copies from worker to worker, and reductions over several.

Each is one step or more of each device, in the order of that device.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from marid.engine.protocol import Geometry
from marid.errors import MaterializationError
from marid.remote.client.buffers import Block, RemoteBuffer
from marid.remote.client.delivery import Delivery
from marid.remote.client.link import Link
from marid.remote.client.memory import Memory
from marid.remote.client.steps import End, Work
from marid.remote.client.transfers import PackWork, ReduceWork, TakeWork
from marid.remote.wire.tensors import packing_of
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site

__all__ = ["Device", "pack", "reduce", "take"]


class Device(End, Protocol):
    """A device that is a worker's."""

    lock: threading.RLock
    remote: Memory
    delivery: Delivery
    reached: weakref.WeakKeyDictionary[Any, tuple[tuple[Link, Link], bool]]
    """The devices that a copy was to come from, by the sessions on both: whether their workers were reached."""

    def finish(self, step: Work) -> None:
        """Wait for a step. Raises what it raised."""
        ...


def take(target: Device, source: Device, buffer: RemoteBuffer) -> RemoteBuffer | None:
    """A copy of a tensor of ``source``, or None where it has to go through the client."""
    if buffer.geometry.conj or buffer.geometry.neg or not buffer.nbytes:
        return None
    links = source.link, target.link
    known = target.reached.get(source)
    if known is not None and known[0] == links and not known[1]:
        traffic.add(relayed=1)
        return None
    packed = pack(source, buffer)
    with target.lock:
        target.delivery.settle()
        taken = _made(target, buffer.geometry._replace(offset=0))
        is_first = known is None or known[0] != links
        step = TakeWork(source, target, packed, taken, current_site(), is_first)
        target.delivery.do(step)
        if not is_first:
            target.delivery.flush()
            return taken
        reached = _reach(target, step)
        target.reached[source] = (source.link, target.link), reached
        if not reached:
            traffic.add(relayed=1)
        return taken if reached else None


def _reach(target: Device, step: TakeWork) -> bool:
    """Wait for the first copy from another worker; whether this one reaches it. Raises, when that is known, what has
    gone wrong before."""
    raised: MaterializationError | None = None
    try:
        while not step.answered and step.error is None:
            try:
                target.finish(step)
            except MaterializationError as error:
                raised = raised or error
            except RuntimeError:
                if step.error is None or step.error.get("type") != "Unreachable":
                    raise
    finally:
        step.commit()
    if raised is not None:
        raise raised
    return step.answered


def pack(device: Device, buffer: RemoteBuffer) -> RemoteBuffer:
    """A snapshot of a tensor, as bytes that other workers may be let collect; waits until there is one."""
    with device.lock:
        device.delivery.settle()
        buffer.block.check()
        of = buffer.geometry
        packed = _made(device, Geometry((packing_of(of.shape, of.stride, of.dtype).nbytes,), (1,), 0, torch.uint8))
        step = PackWork(buffer, packed, current_site())
        device.delivery.do(step)
        device.finish(step)
        packed.block.check()
        return packed


def reduce(device: Device, group: bytes, operation: str, buffer: RemoteBuffer) -> ReduceWork:
    """Have a tensor reduced with those of the other members of a group; ``finish`` waits for it."""
    with device.lock:
        device.delivery.settle()
        buffer.block.check()
        made = _made(device, buffer.geometry._replace(offset=0))
        step = ReduceWork(group, operation, buffer, made, current_site())
        device.delivery.do(step)
        device.delivery.flush()
        return step


def _made(device: Device, geometry: Geometry) -> RemoteBuffer:
    return device.remote.made(device.remote.take(1), geometry, Block(geometry, current_site()), None)
