"""The engine of this process where memory is limited: what is idle may wait in a file (``settings.spill_limit``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from marid.engine.inprocess import InProcessEngine
from marid.engine.memory_limit import within
from marid.engine.protocol import Called, GiveBack
from marid.engine.snapshot import snapshot
from marid.execute.residency import ROLES, Residency
from marid.execute.specialisation import Runnable
from marid.graph.arguments import input_values, values_in
from marid.graph.dispatch_state import concretely
from marid.graph.node import Operation, Value, root_of
from marid.graph.prepared import Prepared
from marid.graph.program import Task
from marid.report.stats import counters
from marid.semantics.memory_roles import made_as, written_as
from marid.settings import settings

_ALL = sys.maxsize


class SpillingEngine(InProcessEngine):
    """Runs programs in this process. Where a program has no room, not even when it computes results again, memory that
    it does not use goes to a file, by role, and comes back when something uses it.

    What the limit counts is known in ``run`` alone. So memory is looked at there, and whatever else uses buffers has
    them brought. ``held`` says which values are alive.
    """

    def __init__(self, held: Callable[[], Iterable[Value]]) -> None:
        super().__init__()
        self._held = held
        self._residency = Residency(torch.device("cpu"))

    @property
    def spilled(self) -> int:
        if self._residency.spilled:
            with self.lock:
                self._residency.forget()  # what nobody holds any more
        return self._residency.spilled

    def run(self, nodes: list[Any], give_back: GiveBack, ahead: bool = False, room: int | None = None) -> int:
        with self.lock:
            if room is None and self.spilled:
                self._bring_everything()  # the limit is gone
            return super().run(nodes, give_back, ahead, room)

    def replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> list[torch.Tensor]:
        with self.lock:
            self._bring(inputs)
            return super().replay(prepared, inputs, params)

    def call(
        self, op: Operation, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], state: torch.Tensor | None
    ) -> Called:
        with self.lock:
            if self.spilled:
                self._bring([value.concrete for value in values_in((*args, *[arg for _, arg in kwargs]))])
            return super().call(op, args, kwargs, state)

    def read(self, buffer: torch.Tensor, whole: bool = False) -> torch.Tensor:
        if not self._residency.spilled and not settings.spill_limit:
            return buffer
        with self.lock, concretely():
            if not whole:
                return snapshot(self._residency.looked_at(buffer))  # by then another thread may let the memory go
            self._bring([buffer])
            self._residency.release(buffer)
            return buffer

    def download(self, buffer: torch.Tensor) -> torch.Tensor:
        if not self._residency.spilled and not settings.spill_limit:
            return super().download(buffer)
        return self.read(buffer)

    def memory(self, buffer: Any) -> tuple[int, int] | None:
        if self._residency.spilled and isinstance(buffer, torch.Tensor) and self._residency.away([buffer]):
            return -buffer.untyped_storage()._cdata, 0
        return super().memory(buffer)

    def resize(self, buffer: torch.Tensor, nbytes: int) -> None:
        with self.lock:
            self._bring([buffer])
            super().resize(buffer, nbytes)

    def _within(self, room: int, program: Any, task: Task) -> Runnable:
        if not settings.spill_limit and not self.spilled:
            return within(room, task, program)
        self._note_inputs(task)
        room -= self._residency.away(task.inputs)
        found = within(room, task, program, lambda nbytes: self._make_room(nbytes, task))
        self._bring(task.inputs)
        return found

    def _make_room(self, nbytes: int, task: Task) -> int:
        """Send so many bytes away that the task does not use; how many went."""
        for value in self._held():
            self._note(value)
        went = self._residency.make_room(nbytes, task.inputs)
        counters.spill_moved += went
        return went

    def _note_inputs(self, task: Task) -> None:
        """A task is about to use these, and may say what they are for."""
        self._residency.spill_limit = settings.spill_limit
        values = list(task.slots)
        for slot in task.input_slots:
            self._note(values[slot])
        self._residency.use(task.inputs)
        for node in task.nodes:
            role = written_as(node)
            for value in input_values(node) if role in ROLES else ():
                if isinstance(value.concrete, torch.Tensor):
                    self._residency.hint(value.concrete, ROLES.index(role))

    def _note(self, value: Value) -> None:
        if isinstance(value.concrete, torch.Tensor):
            role = made_as(root_of(value))
            self._residency.note(value.concrete, ROLES.index(role if role in ROLES else "other"))

    def _bring(self, buffers: Iterable[torch.Tensor]) -> None:
        """Have these in memory, whatever room there is."""
        if self.spilled:
            before = self._residency.moved
            with concretely():
                self._residency.bring(buffers, _ALL)
            counters.spill_moved += self._residency.moved - before

    def _bring_everything(self) -> None:
        if self.spilled:
            counters.spill_moved += self.spilled
            with concretely():
                self._residency.bring_everything()
