"""Ways of running a program of the flat tier: as recorded or improved by passes, with or without planned memory.

An improved program and a memory plan belong to specs, so a program has a set of forms for each of those that recur.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from marid.execute.arena import Placement
from marid.execute.interrupted import Interrupted
from marid.execute.kernel_warnings import report
from marid.execute.resume import recover
from marid.execute.source import SourceProgram
from marid.execute.table import DONE, DRAWS, RAISED, Table, TableRun, donors
from marid.graph.node import Draw, Spec
from marid.graph.program import Param, Program, Task
from marid.optimize.passes.lowering import Improved
from marid.optimize.passes.registry import PassFailed, improve
from marid.report.stats import counters
from marid.settings import settings

if TYPE_CHECKING:
    from marid.execute.flat import FlatProgram

__all__ = ["Form", "Forms", "Positioned", "Way"]

Positioned = Callable[[Draw], torch.Generator]

_AT_ONCE = 200  # instructions; larger programs are improved in pieces, one a run, so that no run takes much longer
_VARIANTS = 4  # times that a program is improved for the same specs, because numbers changed
_complaints: set[str] = set()  # passes that failed, each told once


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

    def run(
        self, inputs: list[torch.Tensor], params: list[Any], generator: Positioned, task: Task | None = None, /
    ) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to ``task`` by then, which
        no interrupt comes in between of. Raises ``Interrupted``."""
        ...

    def start(self, inputs: list[Any], params: list[Any], /) -> TableRun | None:
        """A run that needs no Python, to be begun; None where there is none. Inputs that are no tensors come later."""
        ...

    def resume(self, run: TableRun, params: list[Any], generator: Positioned, /) -> list[torch.Tensor]:
        """Go on in Python where a run has stopped, to raise what the operation raises. Raises ``Interrupted``."""
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
        prepared: Table | SourceProgram | None = None,
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

    def run(
        self, inputs: list[torch.Tensor], params: list[Any], generator: Positioned, task: Task | None = None
    ) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. They may be delivered to ``task`` by then, which
        no interrupt comes in between of. Raises ``Interrupted``."""
        start = time.perf_counter()
        results = self._run(inputs, params, generator, task)
        self.ran(time.perf_counter() - start)
        return results

    def ran(self, seconds: float) -> None:
        """A run that was begun with ``start`` came to its end."""
        self._owner.note(seconds)

    def _run(
        self, inputs: list[torch.Tensor], params: list[Any], generator: Positioned, task: Task | None
    ) -> list[torch.Tensor]:
        owner, prepared = self._owner, self._table_or_source()
        owner.runs += 1
        if isinstance(prepared, Table):
            try:
                found = prepared.run(*self._given(inputs, params), self._donors(), self.output_slots, task)
            except OverflowError:  # a number of more than 64 bits
                pass
            else:
                return found if isinstance(found, list) else self._finish(*found, params, generator, task)
        if isinstance(prepared, SourceProgram):
            try:
                return prepared.run(*self._given(inputs, params), generator)
            except Interrupted as stop:
                if self.improved is None:
                    raise
                return self._recover(stop, params, generator)
        return owner.interpret(dict(zip(owner.program.input_slots, inputs, strict=True)), params, generator, 0)

    def start(self, inputs: list[Any], params: list[Any]) -> TableRun | None:
        """A run that needs no Python, to be begun; None where there is none. Inputs that are no tensors come later."""
        prepared = self._table_or_source()
        if not isinstance(prepared, Table):
            return None
        try:
            run = prepared.start(*self._given(inputs, params), self._donors())
        except OverflowError:
            return None
        self._owner.runs += 1
        return run

    def resume(self, run: TableRun, params: list[Any], generator: Positioned) -> list[torch.Tensor]:
        """Go on in Python where a run has stopped, to raise what the operation raises. Raises ``Interrupted``."""
        tensors, index = run.existing(), run.next
        del run
        if self.improved is not None:
            return self._recover(Interrupted(index, False, tensors, RuntimeError()), params, generator)
        return self._owner.interpret(tensors, params, generator, index)

    def draw(self, index: int, params: list[Any]) -> Draw:
        """What instruction ``index`` of a run draws."""
        return _draw(self._program, index, self._given([], params)[1])

    @property
    def _program(self) -> Program:
        return self._owner.program if self.improved is None else self.improved.program

    def _table_or_source(self) -> Table | SourceProgram | None:
        return self._owner.prepared() if self.improved is None else self._prepared

    def _donors(self) -> Any:
        placement = self.placement
        return None if placement is None else placement.donors

    def _given(self, inputs: list[Any], params: list[Any]) -> tuple[list[Any], list[Any]]:
        if self.improved is None:
            return inputs, params
        return [*inputs, *self.improved.constants], [*params, *self.improved.numbers]

    def _finish(
        self, status: int, run: TableRun, params: list[Any], generator: Positioned, task: Task | None
    ) -> list[torch.Tensor]:
        """Go on with a run that has come so far."""
        try:
            results = self._go(status, run, params, generator, task)
        except BaseException as error:
            tensors, index = run.existing(), run.next
            del run
            if self.improved is None:
                raise self._owner.stopped(index, tensors, error) from error
            return self._recover(Interrupted(index, False, tensors, error), params, generator)
        return self.resume(run, params, generator) if results is None else results

    def _go(
        self, status: int, run: TableRun, params: list[Any], generator: Positioned, task: Task | None
    ) -> list[torch.Tensor] | None:
        """The results; None where an operation raises."""
        while status != RAISED:
            status = run.go(generator(self.draw(run.next, params)) if status == DRAWS else None)
            if status == DONE:
                return run.tensors(self.output_slots, task)
        return None

    def _recover(self, stop: Interrupted, params: list[Any], generator: Positioned) -> list[torch.Tensor]:
        """Say in terms of the recorded program how far an improved one came. After an error the recorded one goes on
        from there, to raise what its operations raise."""
        improved = self.improved
        assert improved is not None
        instructions = improved.program.instructions
        written = stop.finished and stop.index < len(instructions) and instructions[stop.index].op.mutates
        before = improved.indices[stop.index] + written if written else improved.done[stop.index]
        tensors, lost, interrupt = recover(improved, stop.tensors, before, params, generator)
        error = stop.error if interrupt is None else interrupt
        if lost or not isinstance(error, Exception):
            index = before - 1 if written else before
            raise Interrupted(index, bool(written), tensors, error, lost) from error
        return self._owner.interpret(tensors, params, generator, before)


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
