"""The journal: every step that made or wrote something that is still alive on a worker, in order.

When a worker is lost, its replacement is sent the steps again that what lives depends on, and nothing else: a slice
backwards over handles and blocks of memory, the *lineage*. A step is needed when it made a needed handle, or made or
wrote needed memory; then all that it read, and the memory that it wrote as it was before, is needed too. Doing a slice
in order gives every block of it the content that it had, because all that ever wrote it is in the slice.

A training run depends on all of its steps, so the journal is bounded by *checkpoints*: what lives is brought to the
host, and steps before that are forgotten. When, is a matter of cost (``is_due``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from marid.engine.plain import interned
from marid.graph.node import Spec
from marid.remote.client.blocks import Block
from marid.remote.client.contents import Content, content_of
from marid.remote.client.runs import RunStep
from marid.remote.client.steps import FetchStep, Sent, Step
from marid.remote.client.uploads import upload_requests
from marid.remote.wire.fields import Handle
from marid.remote.wire.requests import Call, Free, Request
from marid.report.traffic import traffic
from marid.settings import settings

if TYPE_CHECKING:
    from marid.remote.client.delivery import Delivery

_FEWEST = 256  # steps that are kept before it is looked at which of them are still needed
_MOST = 4096  # steps after which there is a checkpoint, whatever it costs
_EVERY = 1.0  # seconds between such looks, at least, where there are waits
_BANDWIDTH = 200e6  # bytes a second, until one was measured
_NUMBER = 64  # bytes of a number or handle that a run was given
_WORTH = 10  # times the cost of a checkpoint that doing again may cost
_SHARE = 4  # of the memory of the worker that keeps a copy: a part of so many is for copies that may be needed again


class Journal:
    """The steps of one worker. Not thread-safe: the engine calls it under its lock."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.bandwidth = _BANDWIDTH
        """Of checkpoints, in bytes a second."""
        self._looked_at = 0  # the number of steps then
        self._looked = 0.0  # when
        self._copied = 0  # bytes that other workers keep for steps since then
        self._room: float = math.inf  # bytes that they have for such copies

    def add(self, step: Step) -> None:
        """A step was given to the worker."""
        if step.lasting:
            self.steps.append(step)
            self.note_copy(step)

    def remove(self, steps: Iterable[Step]) -> None:
        """Steps were taken back."""
        gone = {id(step) for step in steps}
        self.steps = [step for step in self.steps if id(step) not in gone]

    def needed(self, handles: Iterable[int], blocks: Iterable[Block], steps: list[Step] | None = None) -> list[Step]:
        """Those of ``steps`` (all, if not given) that these handles and the content of these blocks depend on."""
        wanted = set(handles)
        content = {block.identity for block in blocks}
        found: list[Step] = []
        for step in reversed(self.steps if steps is None else steps):
            changed = (*step.makes, *step.writes)
            if not any(block.identity in content for block in changed) and wanted.isdisjoint(step.handles):
                continue
            found.append(step)
            wanted.update(step.inputs)
            content.update([block.identity for block in (*step.reads, *changed)])
        found.reverse()
        return found

    def prune(self, handles: Iterable[int], blocks: Iterable[Block]) -> None:
        """Forget what neither these depend on nor a step that was not answered yet."""
        pending = [step for step in self.steps if not step.answered]
        handles = [*handles, *[handle for step in pending for handle in (*step.inputs, *step.handles)]]
        blocks = [*blocks, *[block for step in pending for block in (*step.reads, *step.writes, *step.makes)]]
        self._begin(self.needed(handles, blocks))

    def _begin(self, steps: list[Step]) -> None:
        self.steps = steps
        self._looked_at, self._looked, self._room = len(steps), time.monotonic(), math.inf
        for step in steps:
            self.note_copy(step)
        self._copied = 0

    def note_copy(self, step: Step) -> None:
        """Another worker keeps something for a step."""
        self._copied += step.held
        for source in step.sources if step.held else ():
            limit = source.link.welcome["limits"].get("memory")
            self._room = min(self._room, limit // _SHARE if limit else math.inf)

    def is_to_be_pruned(self) -> bool:
        """Whether it is time to look at which steps are still needed."""
        if len(self.steps) > 2 * self._looked_at + _FEWEST or time.monotonic() - self._looked >= _EVERY:
            return True
        return self._copied > min(settings.copies_bytes, self._room) / 2

    @property
    def seconds(self) -> float:
        """How long doing all of it again would take, uploads aside."""
        return sum(step.seconds for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes that the client keeps: of what was uploaded, and of what runs were given (about)."""
        contents = {id(content): content for step in self.steps for content in step.contents}
        given = sum(len(step.inputs) + len(step.params) for step in self.steps)
        kept = sum(content.nbytes for content in contents.values() if content.path is None)  # not the user's files
        return kept + _NUMBER * given

    def is_due(self, checkpoint_seconds: float) -> bool:
        """Whether a checkpoint that takes so long is worth it: doing again would cost many times that, and more than
        ``settings.replay_seconds``; or too much is kept for it."""
        if len(self.steps) > _MOST or self.nbytes > settings.journal_bytes:
            return True
        if sum(step.held for step in self.steps) > min(settings.copies_bytes, self._room):
            return True
        return self.seconds > max(settings.replay_seconds, _WORTH * checkpoint_seconds)

    def checkpoint(self, replaced: Iterable[Step], kept: Iterable[Step]) -> None:
        """Begin anew with these."""
        self._begin([*kept, *replaced])

    def written(self) -> set[int]:
        """The blocks, by identity, whose content is more than what was uploaded or kept for them."""
        computed = [step for step in self.steps if not step.contents]
        return {block.identity for step in computed for block in (*step.makes, *step.writes)}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def compact(delivery: Delivery) -> None:
    """To be called when a wait has ended: prune, and take a checkpoint if it is time."""
    journal = delivery.queue.journal
    if not journal.is_to_be_pruned() or any(isinstance(step, RunStep) for step in delivery.queue.steps()):
        return
    delivery.queue.drop()
    blocks = [block for block, _ in delivery.queue.memory.alive.values()]
    journal.prune(delivery.queue.memory.alive, blocks)
    written = journal.written()
    nbytes = sum(block.nbytes for block in {b.identity: b for b in blocks}.values() if block.identity in written)
    if journal.is_due(nbytes / journal.bandwidth):
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
        delivery.queue.journal.bandwidth = total / seconds
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
        flat = interned((count,), (1,), 0, geometry.dtype)
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
        self, block: Block, content: Content, flat: Spec, scratch: int, tensors: list[tuple[int, Spec]]
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


def _as_viewed(base: int, flat: Spec, handle: int, of: Spec) -> list[Request]:
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
