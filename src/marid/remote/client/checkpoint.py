"""Keeping the journal short: forgetting what nothing depends on any more, and bringing to the host what lives when
doing it all again would cost much more."""

from __future__ import annotations

import time
from typing import Any

import torch

from marid.engine.protocol import Geometry
from marid.remote.client.contents import Content, content_of
from marid.remote.client.delivery import Delivery
from marid.remote.client.memory import Block
from marid.remote.client.runs import RunStep
from marid.remote.client.steps import FetchStep, Sent, Step
from marid.remote.client.uploads import upload_requests
from marid.remote.wire.requests import Call, Free, Handle, Request
from marid.report.traffic import traffic

__all__ = ["CheckpointStep", "compact", "take_checkpoint"]

_BANDWIDTH = 200e6  # bytes a second, until one was measured
_EVERY = 1.0  # seconds between looks at what the journal costs


class _Pace:
    looked_at = 0.0
    bandwidth = _BANDWIDTH


def compact(delivery: Delivery) -> None:
    """To be called when a wait has ended: prune, and take a checkpoint if it is time."""
    journal, now = delivery.queue.journal, time.monotonic()
    if not journal.is_long and now - _Pace.looked_at < _EVERY:
        return
    _Pace.looked_at = now
    if any(isinstance(step, RunStep) for step in delivery.queue.steps()):
        return
    delivery.queue.drop()
    blocks = [block for block, _ in delivery.queue.memory.alive.values()]
    journal.prune(delivery.queue.memory.alive, blocks)
    written = journal.written()
    nbytes = sum(block.nbytes for block in {b.identity: b for b in blocks}.values() if block.identity in written)
    if journal.is_due(nbytes / _Pace.bandwidth):
        take_checkpoint(delivery)


def take_checkpoint(delivery: Delivery) -> None:
    """Bring to the host what lives on the worker and is more than what was uploaded; forget how it came about."""
    started = time.monotonic()
    delivery.queue.drop()
    delivery.queue.holding = True  # what is dropped meanwhile is in the checkpoint all the same, and freed afterwards
    try:
        total = _take(delivery)
    finally:
        delivery.queue.holding = False
    seconds = max(time.monotonic() - started, 1e-6)
    if total:
        _Pace.bandwidth = total / seconds
    traffic.add(checkpoints=1, checkpoint_bytes=total)


def _take(delivery: Delivery) -> int:
    journal = delivery.queue.journal
    written = journal.written()
    uploaded = {handle for step in journal.steps if step.contents for handle in step.handles}
    kept: list[int] = []
    taken: list[CheckpointStep] = []
    total = 0
    for block, tensors in delivery.queue.memory.blocks().values():
        if block.error is not None:
            continue
        if block.identity not in written and all(handle in uploaded for handle, _ in tensors):
            kept += [handle for handle, _ in tensors]
            continue
        # The smallest numbers: whatever lies in the memory ends where one of them ends.
        handle, geometry = min(tensors, key=lambda tensor: tensor[1].dtype.itemsize)
        count = block.nbytes // geometry.dtype.itemsize
        got: list[torch.Tensor] = []
        step = FetchStep(handle, block, (0, (count,), (1,)), got.append, (geometry.dtype, (count,)))
        delivery.queue.do(step)
        delivery.wait(step)
        flat = Geometry((count,), (1,), 0, geometry.dtype)
        content = content_of(got[0])
        content.spool()
        total += block.nbytes
        scratch = delivery.queue.memory.take(1 + 4 * len(tensors))
        taken.append(CheckpointStep(block, content, flat, scratch, tensors))
    uploads = journal.needed(kept, [delivery.queue.memory.alive[handle][0] for handle in kept])
    journal.checkpoint(taken, uploads)
    return total


class CheckpointStep(Step):
    """The content of a block as it was at one moment, and the handles of tensors that lie in it."""

    answered = True

    def __init__(
        self, block: Block, content: Content, flat: Geometry, scratch: int, tensors: list[tuple[int, Geometry]]
    ) -> None:
        self.makes = (block,)
        self.handles = tuple([handle for handle, _ in tensors])
        self.contents = (content,)
        self._upload = content, flat, scratch
        self._tensors = tensors

    def requests(self, sent: Sent) -> list[Request]:
        content, flat, scratch = self._upload
        found = upload_requests(content, flat, scratch, sent)
        for handle, geometry in self._tensors:
            found += _as_viewed(scratch, flat, handle, geometry)
        return [*found, Free((scratch,))]


def _as_viewed(base: int, flat: Geometry, handle: int, of: Geometry) -> list[Request]:
    """Requests that make ``handle`` a view of this geometry of the flat tensor ``base``, whose numbers are not larger;
    the next handles are free."""
    between = base + 1
    steps: list[tuple[str, tuple[Any, ...]]] = []
    if of.dtype is not flat.dtype:
        (count,) = flat.shape
        whole = count - count % (of.dtype.itemsize // flat.dtype.itemsize)
        if whole != count:  # not all of it can be seen in this dtype
            steps.append(("aten.as_strided.default", ([whole], [1], 0)))
        steps.append(("aten.view.dtype", (of.dtype,)))
    steps.append(("aten.as_strided.default", (list(of.shape), list(of.stride), of.offset)))
    if of.conj:
        steps.append(("aten._conj.default", ()))
    if of.neg:
        steps.append(("aten._neg_view.default", ()))
    found: list[Request] = []
    source = base
    for index, (operator, rest) in enumerate(steps):
        last = index == len(steps) - 1
        target = handle if last else between
        found.append(Call(operator, (Handle(source), *rest), (), None, target))
        if source != base:
            found.append(Free((source,)))
        source, between = target, between + 1
    return found
