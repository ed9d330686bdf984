"""A program specialised for the specs of its tensors: what a run begins with, and where it puts its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from marid import policy
from marid.errors import LazyTensorError
from marid.execute.arena import Placement
from marid.execute.table import DONE, DRAWS, RAISED, Seen, TableRun
from marid.graph.node import Draw
from marid.graph.prepared import Replay
from marid.graph.program import Param, Task
from marid.report.operator_times import Timing, labels_of, operator_times

if TYPE_CHECKING:
    from marid.execute.executable import Executable

Positioned = Callable[[Draw], torch.Generator]


@dataclass(slots=True)
class Frame:
    """A run in Python: what it was begun with, and the tensors that exist, by slot."""

    task: Task | Replay
    tensors: dict[int, Any]
    params: list[Any]
    generator: Positioned
    timing: Timing | None = None
    """Where the time of each instruction is noted, where that is asked for."""
    labels: tuple[str, ...] | None = None
    """What profilers call the instructions, where one is at work."""

    @classmethod
    def of(cls, task: Task | Replay, params: list[Any], generator: Positioned) -> Frame:
        """The beginning of a run."""
        return cls(task, dict(zip(task.input_slots, task.inputs, strict=True)), params, generator)


class Runnable(Protocol):
    """How a task is run."""

    compiled: bool
    """Whether compiled parts stand for some of its operations."""

    @property
    def placement(self) -> Placement | None:
        """Where a run puts its blocks; None where that is not planned."""
        ...

    @property
    def transient_bytes(self) -> int:
        """The forecast of what the results take at once."""
        ...

    def run(self, task: Task | Replay, generator: Positioned, /) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to a ``Task`` by then,
        which no interrupt comes in between of. Raises ``Interrupted``."""
        ...


class Launchable(Runnable, Protocol):
    """How a task is run that may be handed to another thread."""

    @property
    def in_cpp(self) -> bool:
        """Whether no operator calls Python."""
        ...

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Where the results are that escape."""
        ...

    def start(self, task: Task | Replay, /) -> TableRun | None:
        """A run that needs no Python, to be begun; None where there is none. Inputs that are no tensors come later."""
        ...

    def resume(self, run: TableRun, task: Task | Replay, generator: Positioned, /) -> list[torch.Tensor]:
        """Go on in Python where a run has stopped: to raise what the operation raises, or with its result laid out as
        recorded. Raises ``Interrupted``."""
        ...

    def draw(self, index: int, params: list[Any], /) -> Draw:
        """What instruction ``index`` of a run draws."""
        ...

    def ran(self, seconds: float, /) -> None:
        """A run that was begun with ``start`` came to its end."""
        ...


class Specialisation:
    """A program as it runs for certain specs, with planned memory, or (without a placement) for any."""

    __slots__ = ("_owner", "planned", "uses")
    compiled = False

    def __init__(self, owner: Executable, planned: Placement | None) -> None:
        self._owner = owner
        self.planned = planned
        """Where a run is to put its blocks, hopeless or not."""
        self.uses = 0

    @property
    def placement(self) -> Placement | None:
        """Where a run puts its blocks; None where that is not planned."""
        return None if self.planned is None or self.planned.hopeless else self.planned

    @property
    def transient_bytes(self) -> int:
        """The forecast of what the results take at once."""
        return self._owner.transient_bytes

    @property
    def in_cpp(self) -> bool:
        """Whether no operator calls Python."""
        return self._owner.in_cpp

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Where the results are that escape."""
        return self._owner.program.output_slots

    def run(self, task: Task | Replay, generator: Positioned, params: list[Any] | None = None) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to a ``Task`` by then,
        which no interrupt comes in between of. ``params`` stand for those of the task. Raises ``Interrupted``."""
        start = time.perf_counter()
        results = self._run(task, generator, task.params if params is None else params)
        self.ran(time.perf_counter() - start)
        return results

    def ran(self, seconds: float) -> None:
        """A run that was begun with ``start`` came to its end."""
        if self._owner.ran is not None:
            self._owner.ran(seconds)

    def _run(self, task: Task | Replay, generator: Positioned, params: list[Any]) -> list[torch.Tensor]:
        owner, table = self._owner, self._owner.prepared()
        owner.runs += 1
        seen = self._seen(task)
        if table is not None:
            receiver = task if isinstance(task, Task) else None
            try:
                given = task.inputs, params, self._donors(), task.specs
                found = table.run(*given, self.output_slots, receiver, seen, _seconds(task))
            except OverflowError:  # a number of more than 64 bits
                pass
            else:
                return found if isinstance(found, list) else self._finish(*found, task, generator, params)
        frame = Frame.of(task, params, generator)
        frame.timing, frame.labels = task.timing, seen[2]
        return owner.interpret(frame, 0)

    def _seen(self, task: Task | Replay) -> Seen:
        """What is to be measured of a run, which notes it."""
        task.timing = timing = operator_times.timing(self._owner, task)
        sums, spans = (None, None) if timing is None else timing.addresses
        return sums, spans, labels_of(self._owner, task.nodes)

    def start(self, task: Task | Replay, params: list[Any] | None = None) -> TableRun | None:
        """A run that needs no Python, to be begun; None where there is none. Inputs that are no tensors come later.
        ``params`` stand for those of the task."""
        table = self._owner.prepared()
        if table is None:
            return None
        given = task.params if params is None else params
        try:
            run = table.start(task.inputs, given, self._donors(), task.specs, self._seen(task))
        except OverflowError:
            return None
        self._owner.runs += 1
        return run

    def resume(
        self, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any] | None = None
    ) -> list[torch.Tensor]:
        """Go on in Python where a run has stopped: to raise what the operation raises, or with its result laid out as
        recorded. ``params`` stand for those of the task. Raises ``Interrupted``."""
        owner, frame = self._owner, Frame(task, run.existing(), task.params if params is None else params, generator)
        frame.timing = task.timing if owner.origins is None else None  # a compiled program goes on in the recorded one
        index, differs = run.next, run.differs
        del run
        if differs:
            try:
                owner.settle(index - 1, frame)
            except LazyTensorError as error:
                stop = owner.stopped(index - 1, frame, error)
                stop.finished = True
                raise stop from error
            owner.drop(index - 1, frame)
        return owner.interpret(frame, index)

    def draw(self, index: int, params: list[Any]) -> Draw:
        """What instruction ``index`` of a run draws."""
        given = self._owner.program.instructions[index].operands()
        return next(params[arg.index] for arg in given if isinstance(arg, Param) and arg.draw)

    def _donors(self) -> bytes | None:
        placement = self.placement
        return None if placement is None else placement.donors

    def _finish(
        self, status: int, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any]
    ) -> list[torch.Tensor]:
        """Go on with a run that has come so far."""
        try:
            results = self._go(status, run, task, generator, params)
        except BaseException as error:
            frame, index = Frame(task, run.existing(), params, generator), run.next
            del run
            raise self._owner.stopped(index, frame, error) from error
        return self.resume(run, task, generator, params) if results is None else results

    def _go(
        self, status: int, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any]
    ) -> list[torch.Tensor] | None:
        """The results; None where an operation raises, or gives something else than was recorded."""
        while status != RAISED:
            if status != DRAWS:
                give_way(task)
            drawing = generator(self.draw(run.next, params)) if status == DRAWS else None
            status = run.go(drawing, _seconds(task))
            if status == DONE:
                return run.tensors(self.output_slots, task if isinstance(task, Task) else None)
        return None


def give_way(task: Task | Replay) -> None:
    """Let others run in between, or end the run: what is raised there is what it ends with."""
    if task.between is not None:
        task.between()


def _seconds(task: Task | Replay) -> float:
    """For how long a run goes on before it comes back to Python."""
    return policy.UNHEARD_SECONDS if task.between is None else policy.BETWEEN_SECONDS
