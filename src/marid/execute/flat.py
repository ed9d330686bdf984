"""The flat tier: a program run operation by operation, exactly as it was recorded.

The first time a program runs through a loop in Python, because preparing it costs more than running it once. From the
second time on it runs as a table in C++ (``table.py``), or as generated source (``source.py``) where that cannot be.
All of them drop every tensor right after its last use, and can say after a failure which instruction failed and which
results exist by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from marid.execute.arena import Placement
from marid.execute.interrupted import Interrupted
from marid.execute.source import SourceProgram, source_of
from marid.execute.table import DONE, DRAWS, RAISED, Table, TableRun, Untranslatable, donors, translate
from marid.graph.node import Draw
from marid.graph.prepared import Prepared
from marid.graph.program import Instruction, ListOf, Param, Program, Slot, Task
from marid.native import library
from marid.settings import settings

__all__ = ["FlatProgram"]

Generator = Callable[[Draw], torch.Generator]

_SOURCE_LIMIT = 20_000  # instructions; beyond it, compiling one function costs more than the loop ever will
_PLACEMENTS = 16  # plans that a program keeps
_SEEN = 256


class FlatProgram:
    """A program ready to run on concrete tensors. ``source`` is it as Python text.

    ``transient_bytes`` is the forecast of what its results take at once, with the sizes of the run it was built for.
    """

    def __init__(self, program: Program, transient_bytes: int) -> None:
        self.program = program
        self.dying = _last_uses(program)
        self.transient_bytes = transient_bytes
        self.runs = 0
        self._placements: OrderedDict[tuple[Any, ...], Placement] = OrderedDict()
        self._seen: set[int] = set()
        self._prepared: Table | SourceProgram | None = None

    def run(
        self, inputs: list[torch.Tensor], params: list[Any], generator: Generator, placement: Placement | None
    ) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. Raises ``Interrupted``."""
        if self.runs == 1:
            self._prepared = self._prepare()
        self.runs += 1
        if isinstance(self._prepared, SourceProgram):
            return self._prepared.run(inputs, params, generator)
        if self._prepared is not None:
            try:
                run = self._prepared.start(inputs, params, None if placement is None else placement.donors)
            except OverflowError:  # a number of more than 64 bits
                pass
            else:
                return self._finish(run, params, generator)
        return self._interpret(dict(zip(self.program.input_slots, inputs, strict=True)), params, generator, 0)

    def placement(self, task: Task | Prepared) -> Placement | None:
        """Where a run of ``task`` puts its blocks; None where planning would not pay: for small programs, and for
        shapes that have not come twice."""
        if self.transient_bytes < settings.plan_bytes:
            return None
        specs = task.specs()
        found = self._placements.get(specs)
        if found is not None:
            self._placements.move_to_end(specs)
            return None if found.hopeless else found
        if not self.runs or hash(specs) not in self._seen:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen.add(hash(specs))
            return None
        found = Placement(donors(self.program, self.dying, specs))
        self._placements[specs] = found
        if len(self._placements) > _PLACEMENTS:
            self._placements.popitem(last=False)
        return found

    @property
    def source(self) -> str:
        return source_of(self.program, self.dying)

    def _prepare(self) -> Table | SourceProgram | None:
        if library is not None:
            try:
                return translate(self.program, self.dying)
            except Untranslatable:
                pass
        return SourceProgram(self.program, self.dying) if len(self.program.instructions) <= _SOURCE_LIMIT else None

    def _finish(self, run: TableRun, params: list[Any], generator: Generator) -> list[torch.Tensor]:
        try:
            drawn = None
            while True:
                status = run.go(drawn)
                if status == DONE:
                    return run.tensors(self.program.output_slots)
                if status == RAISED:
                    break
                drawn = generator(self._draw(run.next, params)) if status == DRAWS else None
        except BaseException as error:
            raise Interrupted(run.next, False, run.existing(), error) from error
        tensors, index = run.existing(), run.next
        del run
        return self._interpret(tensors, params, generator, index)  # to raise what the operation raises

    def _draw(self, index: int, params: list[Any]) -> Draw:
        instruction = self.program.instructions[index]
        arguments = (*instruction.args, *[value for _, value in instruction.kwargs])
        return next(params[arg.index] for arg in arguments if isinstance(arg, Param) and arg.draw)

    def _interpret(
        self, tensors: dict[int, Any], params: list[Any], generator: Generator, start: int
    ) -> list[torch.Tensor]:
        index, called = start, False
        try:
            for index in range(start, len(self.program.instructions)):
                instruction, called = self.program.instructions[index], False
                args, kwargs = _arguments(instruction, tensors, params, generator)
                returned = instruction.op.call(*args, **kwargs)
                called = True
                for result in instruction.results:
                    value = returned
                    for step in result.path:
                        value = value[step]
                    tensors[result.slot] = value
                for slot in self.dying[index]:
                    del tensors[slot]
        except BaseException as error:
            raise Interrupted(index, called, tensors, error) from error
        return [tensors[slot] for slot in self.program.output_slots]


def _last_uses(program: Program) -> list[list[int]]:
    """For each instruction, the slots that nobody needs after it."""
    dying: list[list[int]] = []
    needed = set(program.output_slots)
    for instruction in reversed(program.instructions):
        touched = set(_slots_of(instruction)) | {r.slot for r in instruction.results}
        dying.append(sorted(touched - needed))
        needed |= touched
    dying.reverse()
    return dying


def _slots_of(instruction: Instruction) -> list[int]:
    slots: list[int] = []
    for arg in (*instruction.args, *(value for _, value in instruction.kwargs)):
        if isinstance(arg, Slot):
            slots.append(arg.index)
        elif isinstance(arg, ListOf):
            slots += [item.index for item in arg.items if isinstance(item, Slot)]
    return slots


def _arguments(
    instruction: Instruction, tensors: dict[int, Any], params: list[Any], generator: Generator
) -> tuple[list[Any], dict[str, Any]]:
    def value_of(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return tensors[arg.index]
        if isinstance(arg, Param):
            return generator(params[arg.index]) if arg.draw else params[arg.index]
        if isinstance(arg, ListOf):
            return [value_of(item) for item in arg.items]
        return arg.value

    return [value_of(a) for a in instruction.args], {name: value_of(a) for name, a in instruction.kwargs}
