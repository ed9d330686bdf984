"""The journal: every step that made or wrote something that is still alive on a worker, in order.

When a worker is lost, its replacement is told the steps again that what lives depends on, and nothing else: a slice
backwards over handles and blocks of memory. A step is needed when it made a needed handle, or made or wrote needed
memory; then all that it read, and the memory that it wrote as it was before, is needed too. Doing a slice in order
gives every block of it the content that it had, because all that ever wrote it is in the slice.

A training run depends on all of its steps, so the journal is bounded by *checkpoints*: what lives is brought to the
host, and steps before that are forgotten. When, is a matter of cost (``is_due``).
"""

from __future__ import annotations

from collections.abc import Iterable

from marid.remote.client.memory import Block
from marid.remote.client.steps import Step
from marid.settings import settings

__all__ = ["Journal"]

_FEWEST = 256  # steps that are kept before it is looked at which of them are still needed
_MOST = 4096  # steps after which there is a checkpoint, whatever it costs
_NUMBER = 64  # bytes of a number or handle that a run was given
_WORTH = 10  # times the cost of a checkpoint that doing again may cost


class Journal:
    """The steps of one worker. Not thread-safe: the engine calls it under its lock."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._looked_at = 0

    def add(self, step: Step) -> None:
        """A step was given to the worker."""
        if step.lasting:
            self.steps.append(step)

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
        self.steps = self.needed(handles, blocks)
        self._looked_at = len(self.steps)

    @property
    def is_long(self) -> bool:
        """Whether it is time to prune."""
        return len(self.steps) > 2 * self._looked_at + _FEWEST

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
        if sum(step.held for step in self.steps) > settings.copies_bytes:
            return True
        return self.seconds > max(settings.replay_seconds, _WORTH * checkpoint_seconds)

    def checkpoint(self, replaced: Iterable[Step], kept: Iterable[Step]) -> None:
        """Begin anew with these."""
        self.steps = [*kept, *replaced]
        self._looked_at = len(self.steps)

    def written(self) -> set[int]:
        """The blocks, by identity, whose content is more than what was uploaded or kept for them."""
        computed = [step for step in self.steps if not step.contents]
        return {block.identity for step in computed for block in (*step.makes, *step.writes)}
