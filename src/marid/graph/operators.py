"""What the schema of an operator does not say, and what it does, as an ``Operation``."""

from __future__ import annotations

from typing import Any

from marid.graph.node import Operation
from marid.graph.program import Instruction, ListOf, Slot

__all__ = ["operation_of", "written_arguments", "written_slots"]

# Operators that write arguments which their schema does not mark as written, by argument name.
_UNMARKED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}
# Operators whose result lies in the memory of its first argument although the schema does not say so.
_UNMARKED_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}


def written_arguments(func: Any) -> list[bool]:
    """For each argument of an operator overload, whether a call writes it."""
    unmarked = _UNMARKED_WRITES.get(func._schema.name, ())
    return [
        bool((a.alias_info is not None and a.alias_info.is_write) or a.name in unmarked) for a in func._schema.arguments
    ]


def written_slots(instruction: Instruction) -> list[int]:
    """The slots of the tensors that an instruction writes."""
    func = instruction.op.func
    formals = [argument.name for argument in func._schema.arguments]
    marks = dict(zip(formals, written_arguments(func), strict=True))
    given = [*zip(formals, instruction.args, strict=False), *instruction.kwargs]
    items = [arg.items if isinstance(arg, ListOf) else (arg,) for name, arg in given if marks[name]]
    return [item.index for listed in items for item in listed if isinstance(item, Slot)]


def operation_of(func: Any) -> Operation:
    """The operation of an operator overload; a new one at each call."""
    schema = func._schema
    mutates = any(written_arguments(func))
    view = schema.name in _UNMARKED_VIEWS or any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    return Operation(func, mutates, view and not mutates)
