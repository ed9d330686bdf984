"""A program as straight-line Python over ATen: how it runs where there is no C++ half, and how it reads.

Every tensor is dropped right after its last use. After a failure it can say which instruction failed and which results
exist by then.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from marid.execute.interrupted import Interrupted
from marid.graph.node import Draw
from marid.graph.program import Constant, ListOf, Param, Program, Slot

__all__ = ["SourceProgram", "source_of"]

_file_numbers = itertools.count(1)


class SourceProgram:
    """A program compiled from generated source."""

    def __init__(self, program: Program, dying: list[list[int]]) -> None:
        lines, self._line_of, self._call_line = _generate(program, dying)
        self._filename = f"<marid program {next(_file_numbers)}>"
        names: dict[str, Any] = {f"f{i}": ins.op.call for i, ins in enumerate(program.instructions)}
        names.update({f"k{i}": value for i, value in enumerate(_constants(program))})
        exec(compile("\n".join(lines), self._filename, "exec"), names)  # our own text, made from slot numbers only
        self._function: Callable[..., list[torch.Tensor]] = names["program"]

    def run(
        self, inputs: list[torch.Tensor], params: list[Any], generator: Callable[[Draw], torch.Generator]
    ) -> list[torch.Tensor]:
        """Run on concrete tensors; the results that escape, in order. Raises ``Interrupted``."""
        try:
            return self._function(inputs, params, generator)
        except BaseException as error:
            raise self._interrupted(error) from error

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


def source_of(program: Program, dying: list[list[int]]) -> str:
    """The text of a program, one operation a line."""
    return "\n".join(_generate(program, dying)[0])


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
