"""A program as straight-line Python over ATen: how programs read."""

from __future__ import annotations

import itertools
from typing import Any

from marid.graph.program import Param, Program, filled


def source_of(program: Program, dying: list[list[int]]) -> str:
    """The text of a program, one operation a line, with what is dropped behind each."""
    constants = itertools.count()
    lines = ["def program(inputs, c, generator):"]

    def number(param: Param) -> str:
        return f"c[{param.index}]" if not param.draw else f"generator(c[{param.index}])"

    def constant(value: Any) -> str:
        return repr(value) if _is_literal(value) else f"k{next(constants)}"

    def text_of(arg: Any) -> str:
        return filled(arg, "t{}".format, number, lambda items: f"[{', '.join(items)}]", constant)

    if program.input_slots:
        lines.append(f" [{_names(program.input_slots)}] = inputs")
    for index, instruction in enumerate(program.instructions):
        args = [text_of(arg) for arg in instruction.args]
        args += [f"{name}={text_of(arg)}" for name, arg in instruction.kwargs]
        call = f"f{index}({', '.join(args)})"
        results = instruction.results
        if len(results) == 1 and not results[0].path:
            lines.append(f" t{results[0].slot} = {call}")
        elif results:
            lines.append(f" r = {call}")
            lines += [f" t{r.slot} = r{''.join(f'[{step}]' for step in r.path)}" for r in results]
        else:
            lines.append(f" {call}")
        if dying[index]:
            lines.append(f" del {_names(dying[index])}")
    lines.append(f" return [{_names(program.output_slots)}]")
    return "\n".join(lines)


def _names(slots: Any) -> str:
    return ", ".join(f"t{slot}" for slot in slots)


def _is_literal(value: Any) -> bool:
    return value is None or value is True or value is False
