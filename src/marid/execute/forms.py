"""Ways of running a program of the flat tier: as recorded or improved by passes, with or without planned memory.

An improved program and a memory plan belong to specs, so a program has a set of forms for each of those that recur.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from marid.errors import LazyTensorError
from marid.execute.arena import Placement
from marid.execute.geometry import settle
from marid.execute.interrupted import Interrupted
from marid.execute.kernel_warnings import report
from marid.execute.resume import recover
from marid.execute.table import DONE, DRAWS, RAISED, Table, TableRun, donors
from marid.graph.node import Draw, Spec
from marid.graph.operators import unsettled_slots
from marid.graph.prepared import Replay
from marid.graph.program import Param, Program, Task
from marid.optimize.passes.lowering import Improved
from marid.optimize.passes.registry import PassFailed, improve
from marid.report.stats import counters
from marid.settings import settings

if TYPE_CHECKING:
    from marid.execute.flat import FlatProgram

__all__ = ["Form", "Forms", "Frame", "Positioned", "Way"]

Positioned = Callable[[Draw], torch.Generator]

_AT_ONCE = 200  # instructions; larger programs are improved in pieces, one a run, so that no run takes much longer
_VARIANTS = 4  # times that a program is improved for the same specs, because numbers changed
_complaints: set[str] = set()  # passes that failed, each told once


@dataclass(slots=True)
class Frame:
    """A run in Python: what it was begun with, and the tensors that exist, by slot."""

    task: Task | Replay
    tensors: dict[int, Any]
    params: list[Any]
    generator: Positioned

    @classmethod
    def of(cls, task: Task | Replay, params: list[Any], generator: Positioned) -> Frame:
        """The beginning of a run."""
        return cls(task, dict(zip(task.input_slots, task.inputs, strict=True)), params, generator)


class Way(Protocol):
    """How a task is run."""

    @property
    def placement(self) -> Placement | None:
        """Where a run puts its blocks; None where that is not planned."""
        ...

    @property
    def transient_bytes(self) -> int:
        """The forecast of what the results take at once."""
        ...

    @property
    def in_cpp(self) -> bool:
        """Whether all operators are PyTorch's own."""
        ...

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Where the results are that escape."""
        ...

    def run(self, task: Task | Replay, generator: Positioned, /) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to a ``Task`` by then,
        which no interrupt comes in between of. Raises ``Interrupted``."""
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


class Form:
    """One way of running a program: as recorded, or ``improved`` for certain specs, with or without planned memory."""

    __slots__ = ("_owner", "_placement", "_prepared", "improved")

    def __init__(
        self,
        owner: FlatProgram,
        placement: Placement | None,
        improved: Improved | None = None,
        prepared: Table | None = None,
    ) -> None:
        self._owner = owner
        self._placement = placement
        self._prepared = prepared
        self.improved = improved

    @property
    def placement(self) -> Placement | None:
        """Where a run puts its blocks; None where that is not planned."""
        return None if self._placement is None or self._placement.hopeless else self._placement

    @property
    def planned(self) -> Placement | None:
        """The same, hopeless or not."""
        return self._placement

    @property
    def transient_bytes(self) -> int:
        """The forecast of what the results take at once."""
        return self._owner.transient_bytes

    @property
    def in_cpp(self) -> bool:
        """Whether all operators are PyTorch's own."""
        return self._owner.in_cpp

    @property
    def output_slots(self) -> tuple[int, ...]:
        """Where the results are that escape."""
        return self._program.output_slots

    def run(self, task: Task | Replay, generator: Positioned, params: list[Any] | None = None) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to a ``Task`` by then,
        which no interrupt comes in between of. ``params`` stand for those of the task. Raises ``Interrupted``."""
        start = time.perf_counter()
        results = self._run(task, generator, task.params if params is None else params)
        self.ran(time.perf_counter() - start)
        return results

    def ran(self, seconds: float) -> None:
        """A run that was begun with ``start`` came to its end."""
        self._owner.note(seconds)

    def _run(self, task: Task | Replay, generator: Positioned, params: list[Any]) -> list[torch.Tensor]:
        owner, prepared = self._owner, self._table()
        owner.runs += 1
        if prepared is not None:
            inputs, numbers = self._given(task.inputs, params)
            receiver = task if isinstance(task, Task) else None
            try:
                found = prepared.run(inputs, numbers, self._donors(), self._specs(task), self.output_slots, receiver)
            except OverflowError:  # a number of more than 64 bits
                pass
            else:
                return found if isinstance(found, list) else self._finish(*found, task, generator, params)
        return owner.interpret(Frame.of(task, params, generator), 0)

    def start(self, task: Task | Replay) -> TableRun | None:
        """A run that needs no Python, to be begun; None where there is none. Inputs that are no tensors come later."""
        prepared = self._table()
        if prepared is None:
            return None
        try:
            run = prepared.start(*self._given(task.inputs, task.params), self._donors(), self._specs(task))
        except OverflowError:
            return None
        self._owner.runs += 1
        return run

    def resume(
        self, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any] | None = None
    ) -> list[torch.Tensor]:
        """Go on in Python where a run has stopped: to raise what the operation raises, or with its result laid out as
        recorded. Raises ``Interrupted``."""
        frame = Frame(task, run.existing(), task.params if params is None else params, generator)
        index, differs = run.next, run.differs
        del run
        if differs:
            try:
                self._settle(index - 1, frame)
            except LazyTensorError as error:
                return self._stopped(index - 1, True, frame, error)
        if self.improved is not None:
            return self._recover(Interrupted(index, False, frame.tensors, RuntimeError()), frame)
        return self._owner.interpret(frame, index)

    def draw(self, index: int, params: list[Any]) -> Draw:
        """What instruction ``index`` of a run draws."""
        return _draw(self._program, index, self._given([], params)[1])

    @property
    def _program(self) -> Program:
        return self._owner.program if self.improved is None else self.improved.program

    def _table(self) -> Table | None:
        return self._owner.prepared() if self.improved is None else self._prepared

    def _specs(self, task: Task | Replay) -> tuple[Spec | None, ...]:
        return task.specs if self.improved is None else self.improved.specs

    def _donors(self) -> Any:
        placement = self.placement
        return None if placement is None else placement.donors

    def _given(self, inputs: list[Any], params: list[Any]) -> tuple[list[Any], list[Any]]:
        if self.improved is None:
            return inputs, params
        return [*inputs, *self.improved.constants], [*params, *self.improved.numbers]

    def _finish(
        self, status: int, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any]
    ) -> list[torch.Tensor]:
        """Go on with a run that has come so far."""
        try:
            results = self._go(status, run, task, generator, params)
        except BaseException as error:
            frame, index = Frame(task, run.existing(), params, generator), run.next
            del run
            return self._stopped(index, False, frame, error)
        return self.resume(run, task, generator, params) if results is None else results

    def _go(
        self, status: int, run: TableRun, task: Task | Replay, generator: Positioned, params: list[Any]
    ) -> list[torch.Tensor] | None:
        """The results; None where an operation raises, or gives something else than was recorded."""
        while status != RAISED:
            status = run.go(generator(self.draw(run.next, params)) if status == DRAWS else None)
            if status == DONE:
                return run.tensors(self.output_slots, task if isinstance(task, Task) else None)
        return None

    def _settle(self, index: int, frame: Frame) -> None:
        """Lay the results of an instruction out as recorded. Raises ``LazyTensorError``."""
        improved = self.improved
        if improved is None:
            self._owner.settle(index, frame)
            self._owner.drop(index, frame)
            return
        node = frame.task.nodes[improved.indices[index]]
        instruction, params = improved.program.instructions[index], self._given([], frame.params)[1]
        settle(instruction, node, frame.tensors, improved.specs, params, unsettled_slots(improved.program))
        for slot in improved.dying[index]:
            frame.tensors.pop(slot, None)

    def _stopped(self, index: int, finished: bool, frame: Frame, error: BaseException) -> list[torch.Tensor]:
        """A run has stopped in instruction ``index``. Raises ``Interrupted``, unless the recorded program goes on."""
        if self.improved is None:
            stop = self._owner.stopped(index, frame, error)
            stop.finished = finished
            raise stop from error
        return self._recover(Interrupted(index, finished, frame.tensors, error), frame)

    def _recover(self, stop: Interrupted, frame: Frame) -> list[torch.Tensor]:
        """Say in terms of the recorded program how far an improved one came. After an error the recorded one goes on
        from there, to raise what its operations raise."""
        improved, params = self.improved, frame.params
        assert improved is not None
        instructions = improved.program.instructions
        written = stop.finished and stop.index < len(instructions) and instructions[stop.index].op.mutates
        before = improved.indices[stop.index] + written if written else improved.done[stop.index]
        tensors, lost, interrupt = recover(improved, stop.tensors, before, params, frame.generator)
        error = stop.error if interrupt is None else interrupt
        if lost or not isinstance(error, Exception):
            index = before - 1 if written else before
            raise Interrupted(index, bool(written), tensors, error, lost) from error
        return self._owner.interpret(Frame(frame.task, tensors, params, frame.generator), before)


class Forms:
    """The ways of running a program for one set of specs."""

    def __init__(self, owner: FlatProgram, specs: tuple[Spec | None, ...], earlier: list[Any] | None) -> None:
        self._owner = owner
        self._specs = specs
        self._earlier = earlier
        self.uses = 0
        self._improved: list[Form] = []
        self._recorded: Form | None = None
        self._attempts = 0
        self._varying: set[int] = set()
        self._unequal: set[tuple[int, int]] = set()
        self._result: Improved | None = None
        self._work: Generator[None, None, Improved | None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the program was improved for these specs, or is about to be."""
        return self._attempts > 0 or self._work is not None

    def made(self) -> list[Form]:
        return [*self._improved, *([] if self._recorded is None else [self._recorded])]

    def pick(self, params: list[Any], improves: bool, is_worth_it: bool) -> Form:
        """The way for a run with these numbers, improved now if there is none and it ``is_worth_it``."""
        self.uses += 1
        if not improves:
            return self._as_recorded()
        for form in self._improved:
            assert form.improved is not None
            if form.improved.guards.hold(params):
                return form
        if is_worth_it and self._attempts < _VARIANTS:
            try:
                if not self._is_done(params):
                    return self._as_recorded() if self._owner.takes_much else self._owner.plain
                made = None if self._result is None else self._form(self._result)
            except BaseException:
                self._work = None  # an interrupt: from the start again, the next time
                raise
            self._work = None
            self._attempts += 1
            if made is None:
                self._attempts = _VARIANTS
            else:
                assert made.improved is not None
                self._improved.append(made)
                if made.improved.guards.hold(params):  # it may have been begun with other numbers
                    return made
        return self._as_recorded()

    def _learn(self, params: list[Any]) -> None:
        """Numbers that changed are numbers that change."""
        if self._earlier is not None:
            self._varying |= {
                index
                for index, (a, b) in enumerate(zip(self._earlier, params, strict=True))
                if type(a) in (int, float, complex) and (type(a) is not type(b) or repr(a) != repr(b))
            }
            self._earlier = None
        for form in self._improved:
            assert form.improved is not None
            varying, unequal = form.improved.guards.failing(params)
            self._varying |= varying
            self._unequal |= unequal

    def _is_done(self, params: list[Any]) -> bool:
        """Do the next piece of improving; whether there is a result now."""
        if self._work is None:
            self._learn(params)
            self._owner.invested += self._owner.pass_cost
            self._work = improve(self._owner.program, self._specs, params, self._varying, self._unequal)
        self._result = None
        try:
            next(self._work)
            while len(self._owner.program.instructions) <= _AT_ONCE:
                next(self._work)
            return False
        except StopIteration as end:
            self._result = end.value
        except PassFailed as failure:
            if failure.own and settings.verify_passes:
                raise
            if failure.name not in _complaints:
                _complaints.add(failure.name)
                report(f"{failure}; the program runs as it was recorded")
        return True

    def _form(self, improved: Improved) -> Form | None:
        owner = self._owner
        prepared = owner.prepare(improved.program, improved.dying)
        if prepared is None:
            return None
        counters.count_passes(improved.changes)
        placement = self._placement(improved.program, improved.dying, improved.specs)
        return Form(owner, placement, improved, prepared)

    def _as_recorded(self) -> Form:
        if self._recorded is None:
            owner = self._owner
            self._recorded = Form(owner, self._placement(owner.program, owner.dying, self._specs))
        return self._recorded

    def _placement(self, program: Program, dying: list[list[int]], specs: tuple[Spec | None, ...]) -> Placement | None:
        if self._owner.transient_bytes < settings.plan_bytes:
            return None
        return Placement(donors(program, dying, specs), self._owner.transient_bytes)


def _draw(program: Program, index: int, params: list[Any]) -> Draw:
    instruction = program.instructions[index]
    given = (*instruction.args, *[value for _, value in instruction.kwargs])
    return next(params[arg.index] for arg in given if isinstance(arg, Param) and arg.draw)
