"""Keeping the journal short: forgetting what nothing depends on any more, and bringing to the host what lives when
doing it all again would cost much more."""

from __future__ import annotations

import time

import torch

from marid.engine.protocol import Geometry
from marid.remote.client.contents import content_of
from marid.remote.client.delivery import Delivery
from marid.remote.client.journal import CheckpointWork
from marid.remote.client.runs import RunWork
from marid.remote.client.steps import FetchWork
from marid.report.traffic import traffic

__all__ = ["keep_short", "take_checkpoint"]

_BANDWIDTH = 200e6  # bytes a second, until one was measured
_EVERY = 1.0  # seconds between looks at what the journal costs


class _Pace:
    looked_at = 0.0
    bandwidth = _BANDWIDTH


def keep_short(delivery: Delivery) -> None:
    """To be called when a wait has ended: prune, and take a checkpoint if it is time."""
    journal, now = delivery.journal, time.monotonic()
    if not journal.is_long and now - _Pace.looked_at < _EVERY:
        return
    _Pace.looked_at = now
    if any(isinstance(step, RunWork) for step in delivery.steps()):
        return
    delivery.drop()
    blocks = [block for block, _ in delivery.memory.alive.values()]
    journal.prune(delivery.memory.alive, blocks)
    written = journal.written()
    nbytes = sum(block.nbytes for block in {b.identity: b for b in blocks}.values() if block.identity in written)
    if journal.is_due(nbytes / _Pace.bandwidth):
        take_checkpoint(delivery)


def take_checkpoint(delivery: Delivery) -> None:
    """Bring to the host what lives on the worker and is more than what was uploaded; forget how it came about."""
    started = time.monotonic()
    delivery.drop()
    delivery.holding = True  # what is dropped meanwhile is in the checkpoint all the same, and freed afterwards
    try:
        total = _take(delivery)
    finally:
        delivery.holding = False
    seconds = max(time.monotonic() - started, 1e-6)
    if total:
        _Pace.bandwidth = total / seconds
    traffic.add(checkpoints=1, checkpoint_bytes=total)


def _take(delivery: Delivery) -> int:
    journal = delivery.journal
    written = journal.written()
    uploaded = {handle for step in journal.steps if step.contents for handle in step.handles}
    kept: list[int] = []
    taken: list[CheckpointWork] = []
    total = 0
    for block, tensors in delivery.memory.blocks().values():
        if block.error is not None:
            continue
        if block.identity not in written and all(handle in uploaded for handle, _ in tensors):
            kept += [handle for handle, _ in tensors]
            continue
        # The smallest numbers: whatever lies in the memory ends where one of them ends.
        handle, geometry = min(tensors, key=lambda tensor: tensor[1].dtype.itemsize)
        count = block.nbytes // geometry.dtype.itemsize
        got: list[torch.Tensor] = []
        step = FetchWork(handle, block, (0, (count,), (1,)), got.append, (geometry.dtype, (count,)))
        delivery.do(step)
        delivery.wait(step)
        flat = Geometry((count,), (1,), 0, geometry.dtype)
        content = content_of(got[0])
        content.spool()
        total += block.nbytes
        scratch = delivery.memory.take(1 + 4 * len(tensors))
        taken.append(CheckpointWork(block, content, flat, scratch, tensors))
    uploads = journal.needed(kept, [delivery.memory.alive[handle][0] for handle in kept])
    journal.checkpoint(taken, uploads)
    return total
