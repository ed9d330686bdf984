"""A program with compiled parts: for which shapes it is right, and how it runs.

A *variant* is a set of parts of one program, compiled for one shapes rule. It is *bound* to a run when the run fits it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from marid import policy
from marid.execute.compiled.compile_request import CompileRequest
from marid.execute.compiled.describe import describe, solve
from marid.execute.compiled.eligibility import DTYPES
from marid.execute.compiled.partition import Partition, Specs
from marid.graph.node import Operation
from marid.graph.program import Instruction, ListOf, Param, Program, Result, Slot
from marid.native import module
from marid.recent import Recent

if TYPE_CHECKING:
    from marid.execute.compiled.disk import Entry


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the C++ half is told of one set of sizes of a part."""

    inputs: int
    shapes: list[int]
    values: tuple[int, ...]
    """Of the symbols."""


class CompiledPartition:
    """A part with its code."""

    __slots__ = ("__weakref__", "_asked", "_slots", "conditions", "part", "path", "pointer")

    def __init__(self, program: Program, asked: CompileRequest, entry: Entry, threads: int) -> None:
        """Load the code. Raises ``OSError``."""
        self._asked, self.part, self.conditions = asked, asked.part, entry.conditions
        self.path, part = entry.path, asked.part
        results = (r for i in program.instructions[part.start : part.stop] for r in i.results)
        self._slots = (*part.inputs, *(result.slot for result in results))
        try:
            self.pointer: int = module.compiled_load(os.fsencode(entry.path), threads)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        weakref.finalize(self, module.compiled_unload, self.pointer).atexit = False

    def key(self, specs: Specs, params: list[Any]) -> Any:
        """Parts with the same key have the same sizes: the layers of a network."""
        return self.path, tuple([specs[s] for s in self._slots]), tuple([params[i] for i in self.part.baked])

    def sizes(self, program: Program, specs: Specs, params: list[Any]) -> _Sizes | None:
        """None when the part was not compiled for them."""
        concrete = describe(self.part, program, specs, params)
        values = solve(self._asked.fits, concrete, self._asked.symbols)
        if values is None or not all(_evaluate(condition, values) for condition in self.conditions):
            return None
        results = {r["slot"]: r for i in concrete["instructions"] for r in i["results"]}
        outputs = [results[slot] for slot in concrete["outputs"]]
        shapes: list[int] = []
        for shape in (*concrete["inputs"], *outputs):
            dtype = getattr(torch, shape["dtype"])
            shapes += [DTYPES[dtype], shape.get("written", False), shape.get("base", -1), shape.get("offset", 0)]
            shapes += [len(shape["size"]), *shape["size"], *shape["stride"]]
        return _Sizes(len(concrete["inputs"]), shapes, values)

    def instance(self, sizes: _Sizes) -> int:
        """What calls with these sizes name the part by."""
        numbers = [DTYPES[number.dtype] for number in self.part.numbers]
        return module.compiled_instance(self.pointer, sizes.inputs, sizes.shapes, numbers, sizes.values)


class _Instances:
    """The names of the parts for one set of sizes."""

    __slots__ = ("__weakref__", "names")

    def __init__(self, names: list[int]) -> None:
        self.names = names
        for name in names:
            weakref.finalize(self, module.compiled_drop, name).atexit = False


class Variant:
    """The compiled parts of a program under one shapes rule."""

    def __init__(self, program: Program, parts: list[CompiledPartition], threads: int) -> None:
        self.program, self.parts, self.threads = program, parts, threads
        self.checked = 0
        """How many of the parts were compared with the flat tier, in their order."""
        self.bad: set[int] = set()
        """Those that gave something else."""
        self.turns = 0
        """Runs that fitted it since all were compared."""
        self._baked = [index for part in parts for index in part.part.baked]
        self._instances: Recent[Any, _Instances | None] = Recent(policy.COMPILE_SIZES)

    def bind(self, specs: Specs, params: list[Any]) -> list[Any] | None:
        """The parameters of a run with the parts: those of the program, then numbers and name of each part. None when
        the run does not fit."""
        if torch.get_num_threads() != self.threads:
            return None
        key = (specs, tuple([params[index] for index in self._baked]))
        if key in self._instances:
            found = self._instances.used(key)
        else:
            found = self._fit(specs, params)
            self._instances.put(key, found)
        if found is None:
            return None
        extended = [*params]
        for part, name in zip(self.parts, found.names, strict=True):
            numbers = tuple([number.of(params) for number in part.part.numbers])
            if None in numbers:
                return None
            extended += [numbers, name]
        return extended

    def reject(self, specs: Specs, params: list[Any]) -> None:
        """Runs like this one are not to be bound again."""
        self._instances[specs, tuple([params[index] for index in self._baked])] = None

    @property
    def is_checked(self) -> bool:
        """Whether all of its parts were."""
        return self.checked == len(self.parts)

    def without_bad(self) -> Variant | None:
        """The variant of those that were right; None when nothing is left."""
        parts = [part for index, part in enumerate(self.parts) if index not in self.bad]
        if not parts:
            return None
        rest = Variant(self.program, parts, self.threads)
        rest.checked = len(parts)
        return rest

    def _fit(self, specs: Specs, params: list[Any]) -> _Instances | None:
        known: dict[Any, _Sizes | None] = {}
        found: list[_Sizes] = []
        for part in self.parts:
            key = part.key(specs, params)
            if key not in known:
                known[key] = part.sizes(self.program, specs, params)
            sizes = known[key]
            if sizes is None:
                return None
            found.append(sizes)
        return _Instances([part.instance(sizes) for part, sizes in zip(self.parts, found, strict=True)])


def assemble(program: Program, parts: list[Partition], operation: Operation) -> tuple[Program, list[int]]:
    """The program with a call in the place of each part, and for each of its instructions which one of ``program``
    comes next when it has not run. Its parameters are those of ``program``, and two for each part."""
    given = [arg for instruction in program.instructions for arg in instruction.operands()]
    own = 1 + max((arg.index for arg in given if isinstance(arg, Param)), default=-1)
    instructions: list[Instruction] = []
    origins: list[int] = []
    index = 0
    for number, part in enumerate(parts):
        instructions += program.instructions[index : part.start]
        origins += range(index, part.start)
        arguments = ListOf(tuple(Slot(slot) for slot in part.inputs))
        results = tuple(Result((position,), slot) for position, slot in enumerate(part.outputs))
        numbers, name = Param(own + 2 * number, False), Param(own + 2 * number + 1, False)
        instructions.append(Instruction(operation, (arguments, numbers, name), (), results))
        origins.append(part.start)
        instructions += part.again
        origins += [part.stop] * len(part.again)
        index = part.stop
    instructions += program.instructions[index:]
    origins += range(index, len(program.instructions))
    made = Program((), tuple(instructions), program.input_slots, program.output_slots, program.slot_count)
    return made, origins


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "+": lambda *items: sum(items),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "max": max,
    "min": min,
    "and": lambda *items: all(items),
    "or": lambda *items: any(items),
    "not": lambda a: not a,
}


def _evaluate(condition: Any, values: tuple[int, ...]) -> Any:
    """A condition of ``lower.py``; anything that is none does not hold."""
    if not isinstance(condition, list):
        return condition
    name, *arguments = condition
    if name == "symbol":
        return values[arguments[0]]
    items = [_evaluate(argument, values) for argument in arguments]
    if name == "*":
        product = 1
        for item in items:
            product *= item
        return product
    operation = _OPERATIONS.get(name)
    if operation is None or (name in ("//", "%") and not items[1]):
        return False
    return operation(*items)
