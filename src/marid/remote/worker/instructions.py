"""Instructions as plain data, read into a program: ``wire/program_records.py`` has the form.

Slots are in range and defined before they are used, every argument is of a type that its operator's schema takes there,
and everything is bounded. So is what each run gives: ``_NUMBERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.engine.plain import as_int, as_list, as_text, constant_from
from marid.errors import WireError
from marid.graph.node import Draw, Operation
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Result, Slot
from marid.remote.worker.operators import kind_of, operator_named

SLOTS = 1 << 20
"""The most tensors of a program."""
_INSTRUCTIONS = 1 << 18
_ARGUMENTS = 64
_ITEMS = 1 << 14  # in a list of tensors
_RESULTS = 1 << 14  # of one instruction

Kinds = tuple[Callable[[Any], bool], ...]
"""What each number of a run must be."""


def read_program(parts: Any, key: tuple[Any, ...]) -> tuple[Program, Kinds]:
    """The program of a body, and what its numbers must be. Raises ``WireError``."""
    reader = _Reader()
    return reader.read(parts, key), tuple(reader.kinds)


def check_numbers(kinds: Kinds, params: list[Any]) -> None:
    """Raise ``WireError`` unless these can be the numbers of a run."""
    if len(params) != len(kinds):
        raise WireError(f"a run was given {len(params)} numbers, and its program takes {len(kinds)}")
    for index, (fits, value) in enumerate(zip(kinds, params, strict=True)):
        if not fits(value):
            raise WireError(f"number {index} of a run is {_shown(value)}, which its operator does not take")


class _Reader:
    def __init__(self) -> None:
        self.kinds: list[Callable[[Any], bool]] = []
        self._defined: set[int] = set()

    def read(self, data: Any, key: tuple[Any, ...]) -> Program:
        parts = as_list(data, 4, "a program")
        if len(parts) != 4:
            raise WireError("a program has four parts")
        names = [as_text(name, 256, "an operator") for name in as_list(parts[0], 4096, "operators")]
        ops = [operator_named(name) for name in names]
        inputs = [as_int(slot, 0, SLOTS, "an input slot") for slot in as_list(parts[1], SLOTS, "input slots")]
        self._defined.update(inputs)
        if len(self._defined) != len(inputs):
            raise WireError("an input slot is there twice")
        listed = as_list(parts[3], _INSTRUCTIONS, "instructions")  # none, where a function returns what it was given
        instructions = tuple([self._instruction(one, ops) for one in listed])
        outputs = [as_int(slot, 0, SLOTS, "an output slot") for slot in as_list(parts[2], SLOTS, "output slots")]
        if len(set(outputs)) != len(outputs) or not self._defined.issuperset(outputs):
            raise WireError("an output slot is there twice, or is never defined")
        count = len(self._defined)
        if self._defined and max(self._defined) != count - 1:
            raise WireError("slots are not numbered one by one")
        return Program(key, instructions, tuple(inputs), tuple(outputs), count)

    def _instruction(self, data: Any, ops: list[Operation]) -> Instruction:
        parts = as_list(data, 4, "an instruction")
        if len(parts) != 4:
            raise WireError("an instruction has four parts")
        op = ops[as_int(parts[0], 0, len(ops) - 1, "the operator of an instruction")]
        formals = op.func._schema.arguments
        given = as_list(parts[1], _ARGUMENTS, "arguments")
        named = as_list(parts[2], 2 * _ARGUMENTS, "named arguments")
        positional = sum(not formal.kwarg_only for formal in formals)
        if len(given) > positional or len(named) % 2:
            raise WireError(f"{op} is called with {len(given)} arguments and takes {positional}")
        args = tuple([self._argument(arg, kind_of(formals[i]), op) for i, arg in enumerate(given)])
        left = {formal.name: formal for formal in formals[len(given) :]}
        kwargs: list[tuple[str, Any]] = []
        for name, arg in zip(named[::2], named[1::2], strict=True):
            formal = left.pop(name, None) if type(name) is str else None
            if formal is None:
                raise WireError(f"{op} is given an argument that it does not take, or twice")
            kwargs.append((formal.name, self._argument(arg, kind_of(formal), op)))
        for formal in left.values():
            if not formal.has_default_value():
                raise WireError(f"{op} needs argument {formal.name}")
        return Instruction(op, args, tuple(kwargs), self._results(parts[3], op))

    def _argument(self, arg: Any, kind: str, op: Operation) -> Any:
        if kind.startswith("Optional["):
            if arg is None:
                return Constant(None)
            kind = kind[len("Optional[") : -1]
        made = self._made(arg, kind)
        if made is None:
            raise WireError(f"{op} is given {_shown(arg)} for an argument of type {kind}")
        return made

    def _made(self, arg: Any, kind: str) -> Any:
        """The argument, or None when it does not fit."""
        if type(arg) is int:
            return Slot(arg) if kind == "Tensor" and arg in self._defined else None
        if arg == "p" and kind in _NUMBERS:
            self.kinds.append(_NUMBERS[kind])
            return Param(len(self.kinds) - 1, False)
        if arg == "g" and kind == "Generator":
            self.kinds.append(_is_draw)
            return Param(len(self.kinds) - 1, True)
        if type(arg) is list:
            if len(arg) > _ITEMS or kind not in _LISTS:
                return None
            items = [Constant(None) if x is None and kind == _MAYBE else self._made(x, _LISTS[kind]) for x in arg]
            return None if any(item is None for item in items) else ListOf(tuple(items))
        value = constant_from(arg)
        return Constant(value) if kind in _CONSTANTS.get(type(value), ()) else None

    def _results(self, data: Any, op: Operation) -> tuple[Result, ...]:
        listed = as_list(data, 2 * _RESULTS, "results")
        if len(listed) % 2:
            raise WireError("a result has a slot and a path")
        returns = [str(one.type) for one in op.func._schema.returns]
        results = []
        for number, path in zip(listed[::2], listed[1::2], strict=True):
            slot = as_int(number, 0, SLOTS, "a result's slot")
            if slot in self._defined:
                raise WireError(f"slot {slot} is defined twice")
            self._defined.add(slot)
            steps = tuple(
                [as_int(step, 0, _RESULTS, "a result's path") for step in as_list(path, 2, "a result's path")]
            )
            if not _leads_to_tensor(steps, returns):
                raise WireError(f"{op} has no result at {list(steps)}")
            results.append(Result(steps, slot))
        return tuple(results)


def _leads_to_tensor(path: tuple[int, ...], returns: list[str]) -> bool:
    if len(returns) != 1:
        if not path or path[0] >= len(returns):
            return False
        kind, rest = returns[path[0]], path[1:]
    elif returns:
        kind, rest = returns[0], path
    return len(rest) == (1 if kind == "List[Tensor]" else 0) and kind in ("Tensor", "Optional[Tensor]", "List[Tensor]")


_MAYBE = "List[Optional[Tensor]]"
_CONSTANTS = {
    bool: ("bool", "number", "Tensor", "SymBool"),
    str: ("str",),
    torch.dtype: ("ScalarType",),
    torch.memory_format: ("MemoryFormat",),
    torch.layout: ("Layout",),
}
_LISTS = {"List[Tensor]": "Tensor", _MAYBE: "Tensor", "List[number]": "number"}


def _is_draw(value: Any) -> bool:
    return type(value) is Draw


def _one_of(*types: type) -> Callable[[Any], bool]:
    allowed = frozenset(types)
    return lambda value: type(value) in allowed and (type(value) is not int or -_WORD <= value < _WORD)


def _list_of(*types: type) -> Callable[[Any], bool]:
    one = _one_of(*types)
    return lambda value: all(map(one, value)) if type(value) is tuple else one(value)


def _empty(value: Any) -> bool:
    return value == ()


_WORD = 1 << 63
_NUMBERS: dict[str, Callable[[Any], bool]] = {
    "number": _one_of(int, float, complex),
    "Tensor": _one_of(int, float, complex),  # PyTorch makes a tensor of it
    "int": _one_of(int),
    "SymInt": _one_of(int),
    "float": _one_of(int, float),
    "SymFloat": _one_of(int, float),
    "List[int]": _list_of(int),
    "List[SymInt]": _list_of(int),
    "List[float]": _list_of(int, float),
    "List[number]": _list_of(int, float, bool),
    "List[bool]": _list_of(bool),
    "List[Tensor]": _empty,
    _MAYBE: _empty,
}


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
