"""The flat tier: a program as straight-line Python over ATen.

A program runs through a loop the first time and as generated source from the second time on, because compiling source
costs more than running it once. Both drop every tensor right after its last use, and both can say after a failure
which instruction failed and which results exist by then.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from marid.execute.arena import Placement
from marid.graph.node import Draw
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot, Task
from marid.settings import settings

__all__ = ["FlatProgram", "Interrupted"]

Generator = Callable[[Draw], torch.Generator]

_SOURCE_LIMIT = 20_000  # instructions; beyond it, compiling one function costs more than the loop ever will
_PLACEMENTS = 16  # plans that a program keeps
_SEEN = 256
_file_numbers = itertools.count(1)


@dataclass
class Interrupted(Exception):
    """Instruction ``index`` raised ``error``; ``finished`` says whether its effect has happened all the same.

    ``tensors`` maps slots to the tensors that exist: every input, and every result still needed.
    """

    index: int
    finished: bool
    tensors: dict[int, torch.Tensor]
    error: BaseException


class FlatProgram:
    """A program ready to run on concrete tensors. ``source`` is the generated Python text.

    ``transient_bytes`` is the largest sum of live results, with the sizes (by slot) of the run it was built for.
    """

    def __init__(self, program: Program, result_bytes: dict[int, int]) -> None:
        self.program = program
        self.dying = _last_uses(program)
        self.transient_bytes = _peak(program, self.dying, result_bytes)
        self.runs = 0
        self._placements: OrderedDict[tuple[Any, ...], Placement] = OrderedDict()
        self._seen: set[int] = set()
        self._function: Callable[..., list[torch.Tensor]] | None = None
        self._line_of: list[int] = []
        self._call_line: list[int] = []
        self._filename = ""

    def run(self, inputs: list[torch.Tensor], params: list[Any], generator: Generator) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. Raises ``Interrupted``."""
        self.runs += 1
        if self._function is None:
            if self.runs == 1 or len(self.program.instructions) > _SOURCE_LIMIT:
                return self._interpret(inputs, params, generator)
            self._compile()
        assert self._function is not None
        try:
            return self._function(inputs, params, generator)
        except BaseException as error:
            raise self._interrupted(error) from error

    def placement(self, task: Task) -> Placement | None:
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
        found = self._placements[specs] = Placement()
        if len(self._placements) > _PLACEMENTS:
            self._placements.popitem(last=False)
        return found

    @property
    def source(self) -> str:
        return "\n".join(_generate(self.program, self.dying)[0])

    def _compile(self) -> None:
        lines, self._line_of, self._call_line = _generate(self.program, self.dying)
        self._filename = f"<marid program {next(_file_numbers)}>"
        names: dict[str, Any] = {f"f{i}": ins.op.call for i, ins in enumerate(self.program.instructions)}
        names.update({f"k{i}": value for i, value in enumerate(_constants(self.program))})
        exec(compile("\n".join(lines), self._filename, "exec"), names)  # our own text, made from slot numbers only
        self._function = names["program"]

    def _interpret(self, inputs: list[torch.Tensor], params: list[Any], generator: Generator) -> list[torch.Tensor]:
        tensors: dict[int, Any] = dict(zip(self.program.input_slots, inputs, strict=True))
        index, called = 0, False
        try:
            for index, instruction in enumerate(self.program.instructions):
                called = False
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

    def _interrupted(self, error: BaseException) -> Interrupted:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._filename:
            trace = trace.tb_next
        if trace is None:
            raise error
        index, frame = self._line_of[trace.tb_lineno - 1], trace.tb_frame
        tensors = {int(name[1:]): value for name, value in frame.f_locals.items() if name[0] == "t"}
        # An operator is one C call: an interrupt cannot stop it halfway, so one that surfaces on the line of the call
        # or below came after it.
        finished = isinstance(error, KeyboardInterrupt) and trace.tb_lineno > self._call_line[index]
        return Interrupted(index, finished, tensors, error)


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


def _peak(program: Program, dying: list[list[int]], result_bytes: dict[int, int]) -> int:
    live = peak = 0
    for instruction, dead in zip(program.instructions, dying, strict=True):
        live += sum(result_bytes.get(result.slot, 0) for result in instruction.results)
        peak = max(peak, live)
        live -= sum(result_bytes.get(slot, 0) for slot in dead)
    return peak


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


def _constants(program: Program) -> list[Any]:
    found: list[Any] = []

    def collect(arg: Any) -> None:
        if isinstance(arg, Constant) and not _is_literal(arg.value):
            found.append(arg.value)
        elif isinstance(arg, ListOf):
            for item in arg.items:
                collect(item)

    for instruction in program.instructions:
        for arg in instruction.args:
            collect(arg)
        for _, arg in instruction.kwargs:
            collect(arg)
    return found


def _is_literal(value: Any) -> bool:
    return value is None or value is True or value is False


def _generate(program: Program, dying: list[list[int]]) -> tuple[list[str], list[int], list[int]]:
    """The source lines, for each line the instruction it belongs to, and for each instruction the line of its call."""
    constants = itertools.count()
    lines, line_of, call_line = ["def program(inputs, c, generator):"], [0], list[int]()

    def emit(text: str, index: int) -> None:
        lines.append(text)
        line_of.append(index)

    def text_of(arg: Any) -> str:
        if isinstance(arg, Slot):
            return f"t{arg.index}"
        if isinstance(arg, Param):
            return f"c[{arg.index}]" if not arg.draw else "g"
        if isinstance(arg, ListOf):
            return f"[{', '.join(text_of(item) for item in arg.items)}]"
        return repr(arg.value) if _is_literal(arg.value) else f"k{next(constants)}"

    if program.input_slots:
        emit(f" [{', '.join(f't{slot}' for slot in program.input_slots)}] = inputs", 0)
    for index, instruction in enumerate(program.instructions):
        for arg in (*instruction.args, *(value for _, value in instruction.kwargs)):
            if isinstance(arg, Param) and arg.draw:
                emit(f" g = generator(c[{arg.index}])", index)
        args = [text_of(arg) for arg in instruction.args]
        args += [f"{sys.intern(name)}={text_of(arg)}" for name, arg in instruction.kwargs]
        call = f"f{index}({', '.join(args)})"
        results = instruction.results
        call_line.append(len(lines))  # the index of a line is the number of the line before it
        if len(results) == 1 and not results[0].path:
            emit(f" t{results[0].slot} = {call}", index)
        elif results:
            emit(f" r = {call}", index)
            for result in results:
                steps = "".join(f"[{step}]" for step in result.path)
                emit(f" t{result.slot} = r{steps}", index)
            emit(" del r", index)
        else:
            emit(f" {call}", index)
        if dying[index]:
            emit(f" del {', '.join(f't{slot}' for slot in dying[index])}", index)
    emit(f" return [{', '.join(f't{slot}' for slot in program.output_slots)}]", len(program.instructions) - 1)
    return lines, line_of, call_line
