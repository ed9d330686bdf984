"""What operators read and write and whose memory their results lie in: the one place that everybody asks.

The schema says most of it; the tables here say what it leaves out.
"""

from __future__ import annotations

import functools
from typing import Any

from marid.graph.node import Operation
from marid.graph.program import Instruction, ListOf, Program, Slot

__all__ = [
    "last_uses",
    "marked_name",
    "operation_of",
    "resized_slots",
    "shared_arguments",
    "shared_slots",
    "slots_of",
    "unsettled_slots",
    "written_arguments",
    "written_slots",
]

# Operators that write arguments which their schema does not mark as written, by argument name.
_UNMARKED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}
# Operators whose results lie in the memory of their first argument although the schema does not say so, with the
# operators that compute the same and whose schema says so.
_UNMARKED_VIEWS = {
    "aten::_unsafe_view": "aten::view",
    "aten::unsafe_split": "aten::split",
    "aten::unsafe_split_with_sizes": "aten::split_with_sizes",
    "aten::unsafe_chunk": "aten::chunk",
}

# Operators that change the geometry of what they write, beside those that are given the place of a result.
_RESIZING = {"aten::resize_", "aten::resize_as_", "aten::_resize_output_"}


def written_arguments(func: Any) -> list[bool]:
    """For each argument of an operator overload, whether a call writes it."""
    unmarked = _UNMARKED_WRITES.get(func._schema.name, ())
    return [
        bool((a.alias_info is not None and a.alias_info.is_write) or a.name in unmarked) for a in func._schema.arguments
    ]


def slots_of(instruction: Instruction) -> list[int]:
    """The tensors that an instruction is called with."""
    given = (*instruction.args, *(value for _, value in instruction.kwargs))
    items = [arg.items if isinstance(arg, ListOf) else (arg,) for arg in given]
    return [item.index for listed in items for item in listed if isinstance(item, Slot)]


def last_uses(program: Program) -> list[list[int]]:
    """For each instruction, the slots that nobody needs after it."""
    dying: list[list[int]] = []
    needed = set(program.output_slots)
    for instruction in reversed(program.instructions):
        touched = set(slots_of(instruction)) | {r.slot for r in instruction.results}
        dying.append(sorted(touched - needed))
        needed |= touched
    dying.reverse()
    return dying


def written_slots(instruction: Instruction) -> list[int]:
    """The slots of the tensors that an instruction writes."""
    func = instruction.op.func
    marks = zip(_given(instruction), written_arguments(func), strict=True)
    items = [arg.items if isinstance(arg, ListOf) else (arg,) for arg, written in marks if written]
    return [item.index for listed in items for item in listed if isinstance(item, Slot)]


def resized_slots(instruction: Instruction) -> list[int]:
    """The slots of the tensors whose geometry an instruction may change: where results are to go, and what is resized.
    Operators of others may resize whatever they write."""
    func = instruction.op.func
    if not instruction.op.mutates:
        return []
    name = func._schema.name
    if not name.startswith("aten::") or name in _RESIZING:
        return written_slots(instruction)
    marks = zip(_given(instruction), func._schema.arguments, strict=True)
    items = [arg.items if isinstance(arg, ListOf) else (arg,) for arg, formal in marks if formal.is_out]
    return [item.index for listed in items for item in listed if isinstance(item, Slot)]


def unsettled_slots(program: Program) -> set[int]:
    """The slots of a program whose tensors do not keep the geometry that they are made with."""
    return {slot for instruction in program.instructions for slot in resized_slots(instruction)}


@functools.cache
def shared_arguments(func: Any) -> tuple[int | None, ...]:
    """For each return of an operator overload, the position of the argument in whose memory it lies: the argument
    itself, where that is written, or a view of it. None for memory of its own."""
    schema = func._schema
    if schema.name in _UNMARKED_VIEWS:
        return (0,) * len(schema.returns)
    marked = [(i, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    found: list[int | None] = []
    for info in [returned.alias_info for returned in schema.returns]:
        named = [i for i, other in marked if info is not None and info.before_set & other.before_set]
        # Of a list of views, PyTorch keeps no name: it is of the only argument that has one.
        found.append(None if info is None or not marked else (named or [marked[0][0]])[0])
    return tuple(found)


def shared_slots(instruction: Instruction) -> dict[int, int]:
    """By slot of a result that lies in the memory of an argument, the slot of that argument."""
    shared = shared_arguments(instruction.op.func)
    found: dict[int, int] = {}
    if any(position is not None for position in shared):
        given = _given(instruction)
        for result in instruction.results:
            which, *element = result.path if len(shared) > 1 else (0, *result.path)
            position = shared[which]
            item = None if position is None else given[position]
            if isinstance(item, ListOf) and element:
                item = item.items[element[0]]
            if isinstance(item, Slot):
                found[result.slot] = item.index
    return found


def marked_name(func: Any) -> str:
    """The name of an operator, or of that which computes the same and has a schema that says all."""
    name: str = func._schema.name
    return _UNMARKED_VIEWS.get(name, name)


def _given(instruction: Instruction) -> list[Any]:
    """The arguments of an instruction by position in the schema; None for those that are left out."""
    named = dict(instruction.kwargs)
    formals = instruction.op.func._schema.arguments
    positional = len(instruction.args)
    return [instruction.args[i] if i < positional else named.get(a.name) for i, a in enumerate(formals)]


def operation_of(func: Any, target: Any = None) -> Operation:
    """The operation of an operator overload, which calls ``target`` in its place if there is one; a new one at each
    call."""
    mutates = any(written_arguments(func))
    shares = any(position is not None for position in shared_arguments(func))
    return Operation(func, mutates, shares and not mutates, target)
