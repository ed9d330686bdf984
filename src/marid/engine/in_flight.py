"""Tasks that run on the device's own thread (``native/queue.cpp``) while the user's threads go on recording.

What a value holds in place of its tensor until then is the flight that makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from marid.execute.kernel_warnings import warn_of
from marid.execute.specialisation import Launchable
from marid.execute.table import TableRun
from marid.graph.arguments import input_values
from marid.graph.node import Node, Value, land, root_of
from marid.graph.program import Task
from marid.native import module
from marid.report.hooks import Ran, ran, run_of

_PLAIN, _WATCHED, _PLANNED = range(3)
_free = module.job_free


class TaskInFlight:
    """A task that was submitted to the device's thread.

    ``number`` grows from task to task; they are done in that order. ``roots`` are the values whose memory it may
    write. Until it is done, its nodes count as run, and what they forgot is kept here, to be given back if it is not.
    """

    __slots__ = (
        "_kept",
        "_placement",
        "_sources",
        "_writes",
        "give_back",
        "job",
        "number",
        "queued",
        "roots",
        "run",
        "runnable",
        "task",
    )

    def __init__(
        self,
        task: Task,
        runnable: Launchable,
        run: TableRun,
        give_back: Callable[[list[Node]], None],
        positioned: Callable[[int], int | None],
    ) -> None:
        """``positioned`` gives generators to what ``job`` says."""
        self.task = task
        self.runnable = runnable
        self._placement = placement = runnable.placement
        self.run = run
        self.give_back = give_back
        self.number = 0
        self.queued = time.perf_counter() if ran.listeners else 0.0
        writes = [node for node in task.nodes if node.op is not None and node.op.mutates]
        self._writes = writes
        self.roots = [root_of(value) for node in writes for value in input_values(node)]
        self._kept: list[Any] = []
        self._sources, slots, from_slots = _links(task)
        if placement is None:
            memory, plan, peak = _PLAIN, None, 0
        elif placement.plan is None:
            memory, plan, peak = _WATCHED, None, placement.forecast
        else:
            memory, plan, peak = _PLANNED, placement.native, placement.plan.peak
        pointers = [source.pointer for source in self._sources]
        self.job: int = module.job_new(run.pointer, slots, pointers, from_slots, memory, plan, peak, positioned)

    def __del__(self) -> None:
        job = getattr(self, "job", None)  # None where Ctrl-C came before there was one
        if _free is not None and job is not None:  # the end of the interpreter takes the function away
            _free(job)

    def start(self) -> bool:
        """Hand it over; False when the process is about to end."""
        self.number = module.job_submit(self.job)
        if self.number == 0:
            return False
        module.hand_over(self.task, self, self._kept)
        return True

    def land(self) -> None:
        """It is done: give its values their tensors."""
        self.run.tensors(self.runnable.output_slots, self.task)
        land(self._writes)
        self._note_memory(True)
        self.runnable.ran(module.job_seconds(self.job))

    def tell(self) -> None:
        """Tell listeners that it is done."""
        if self.queued and ran.listeners:
            began = module.job_began(self.job)
            ended = began + module.job_seconds(self.job)
            compiled = self.runnable.compiled
            ran.tell(Ran(*run_of(self.task.nodes), began, ended, self.queued, "device", compiled, self.task.timing))

    def take_back(self) -> None:
        """It will not run, or did not come to its end: let its nodes be pending again."""
        for value in self.task.outputs:
            value.concrete = None
        kept = iter(self._kept)  # empty where an interrupt came before anything was handed over
        for node, args, kwargs, after, overwrites in zip(self.task.nodes, kept, kept, kept, kept, strict=False):
            node.args, node.kwargs, node.after, node.overwrites = args, kwargs, after, overwrites
        self._note_memory(False)
        self.give_back(self.task.nodes)

    def warn(self) -> None:
        """Warn of what its kernels have warned of."""
        warnings = module.job_warnings(self.job)
        if warnings is not None:
            warn_of(module.warnings_of(warnings))

    def _note_memory(self, completed: bool) -> None:
        if self._placement is not None:
            watched = module.job_watched(self.job)
            self._placement.ended(completed, watched, module.job_left(self.job))


def _links(task: Task) -> tuple[list[TableRun], list[int], list[int]]:
    """For each input that is still in flight: the run that makes it, its slot here, and its slot there."""
    sources: list[TableRun] = []
    slots: list[int] = []
    from_slots: list[int] = []
    values: list[Value] = []
    for slot, buffer in zip(task.input_slots, task.inputs, strict=True):
        if not isinstance(buffer, torch.Tensor):
            values = values or list(task.slots)
            flight: TaskInFlight = buffer
            sources.append(flight.run)
            slots.append(slot)
            from_slots.append(flight.task.slots[values[slot]])
    return sources, slots, from_slots
