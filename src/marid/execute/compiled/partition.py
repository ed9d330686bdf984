"""Choosing what to compile: stretches of a program that Inductor takes, and what goes in and out of each.

A partition (*part*, for short) is a stretch of consecutive instructions, so program order and with it every hazard
stays as it was recorded. Views that somebody needs after a part are made again behind it, of a base that comes out of
it: no result of a part shares memory with another one or with an input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from marid import policy
from marid.execute.compiled.eligibility import admissible, is_row_product, lifted_arguments
from marid.graph.analysis import analysis_of
from marid.graph.node import Spec
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot
from marid.ops.facts import facts_of
from marid.settings import settings

_CONSTANTS = (bool, str, torch.dtype, torch.memory_format)
_INT64 = 1 << 63
_FLOAT32 = torch.finfo(torch.float32).max

Specs = tuple[Spec | None, ...]


@dataclass(frozen=True)
class Number:
    """A number that a part is given at each run: a parameter, or an element of one, as a tensor of type ``dtype``.

    ``kind`` is what type it must have in Python where that decides what is computed.
    """

    param: int
    element: int | None
    dtype: torch.dtype
    kind: type | None

    def value(self, params: list[Any]) -> Any:
        """The number in a run."""
        return params[self.param] if self.element is None else params[self.param][self.element]

    def of(self, params: list[Any]) -> Any:
        """The same; None where it cannot be passed on."""
        number = self.value(params)
        if self.kind is not None and type(number) is not self.kind:
            return None
        if self.dtype is torch.float32 and _FLOAT32 < abs(number) < math.inf:  # ATen may raise for it
            return None
        return number


@dataclass(frozen=True)
class Partition:
    """Instructions ``start`` to ``stop`` as one call.

    ``inputs`` are the slots it is given, ``written`` says which of them it writes, ``bases`` of which other input an
    input is a view (by position; -1 for none; known for memory that is written), ``outputs`` the slots it makes,
    ``numbers`` what it is given beside tensors, ``baked`` the parameters that are part of it, and ``again`` the
    instructions, all of them views, that run once more behind it.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    written: tuple[bool, ...]
    bases: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[Number, ...]
    baked: tuple[int, ...]
    again: tuple[Instruction, ...]

    def baking(self, positions: frozenset[int]) -> Partition:
        """The same part with these of its numbers compiled in."""
        baked = dict.fromkeys(self.numbers[position].param for position in sorted(positions))
        numbers = tuple([number for number in self.numbers if number.param not in baked])
        return replace(self, numbers=numbers, baked=(*self.baked, *baked))


def choose(
    program: Program, specs: Specs, params: list[Any], changing: set[int], shared: dict[int, int]
) -> list[Partition]:
    """The parts of ``program``. ``changing`` are parameters that came with other values before; ``shared`` says of
    inputs of the program in whose memory they lie, where that is another one's."""
    barred: set[int] = set()
    while True:
        try:
            return _Chooser(program, specs, params, changing, shared, barred).parts()
        except _Barred as found:
            barred.add(found.index)


class _Barred(Exception):
    """An instruction must stay flat, as was found out late."""

    def __init__(self, index: int) -> None:
        self.index = index


def arguments_of(instruction: Instruction) -> Iterator[tuple[str, Any]]:
    """The arguments of an instruction with their names in the operator's schema."""
    formal = instruction.op.func._schema.arguments
    for argument, value in zip(formal, instruction.args, strict=False):
        yield argument.name, value
    yield from instruction.kwargs


class _Chooser:
    def __init__(
        self,
        program: Program,
        specs: Specs,
        params: list[Any],
        changing: set[int],
        shared: dict[int, int],
        barred: set[int],
    ) -> None:
        self.program, self.specs, self.params, self.changing = program, specs, params, changing
        analysis = analysis_of(program)
        self.reads, self.writes, self.maker = analysis.reads, analysis.writes, analysis.made_by
        self.root = {slot: shared.get(root, root) for slot, root in analysis.roots.items()}
        self.allowed = [
            index not in barred and self._is_allowed(index, instruction)
            for index, instruction in enumerate(program.instructions)
        ]
        self.last_use = analysis.last_reads()

    def parts(self) -> list[Partition]:
        found, start = [], 0
        while start < len(self.allowed):
            stop = self._stretch(start)
            part = self._part(start, stop)
            if part is not None:
                found.append(part)
                stop = part.stop
            start = max(stop, start + 1)
        return found

    def _is_allowed(self, index: int, instruction: Instruction) -> bool:
        specs = [self.specs[slot] for slot in (*self.reads[index], *(r.slot for r in instruction.results))]
        if any(spec is None or not spec.numel or spec.conj or spec.neg for spec in specs):
            return False
        if not admissible(instruction.op, [spec.dtype for spec in specs if spec is not None]):
            return False
        lifted = lifted_arguments(instruction.op)
        return all(self._can_pass(value, name in lifted) for name, value in arguments_of(instruction))

    def _can_pass(self, value: Any, lifted: bool) -> bool:
        if isinstance(value, Param):
            given = self.params[value.index]
            numbers = given if isinstance(given, tuple) else (given,)
            if value.draw or any(isinstance(n, complex) or (type(n) is int and abs(n) >= _INT64) for n in numbers):
                return False
            return lifted or value.index not in self.changing or all(type(n) is int for n in numbers)
        if isinstance(value, ListOf):
            return all(
                isinstance(item, Slot) or (isinstance(item, Constant) and item.value is None) for item in value.items
            )
        return isinstance(value, Slot) or value.value is None or isinstance(value.value, _CONSTANTS)

    def _stretch(self, start: int) -> int:
        """Where the longest stretch from ``start`` on ends."""
        inside: set[int] = set()
        outside: dict[int, set[int]] = {}  # slots from outside, by the memory they lie in
        written: set[int] = set()
        for index in range(start, len(self.allowed)):
            if not self.allowed[index]:
                return index
            for slot in self.reads[index]:
                if slot not in inside:
                    outside.setdefault(self.root[slot], set()).add(slot)
            written |= {self.root[slot] for slot in self.writes[index] if self.root[slot] not in inside}
            # Memory from outside that is written must be seen through one input, and whatever else is a view of that.
            if any(self._base(outside.get(root, set())) is None for root in written):
                return index
            inside |= {result.slot for result in self.program.instructions[index].results}
        return len(self.allowed)

    def _base(self, slots: set[int]) -> int | None:
        """Of inputs that lie in the same memory, the one that all others are views of."""
        base = max(slots, key=lambda slot: (self._spec(slot).numel, -slot), default=None)
        if base is None or self._spec(base).overlaps:
            return None
        own = self._spec(base)
        if len(slots) > 1 and (
            not own.numel
            or own.span != own.numel
            or any(
                spec.dtype is not own.dtype
                or spec.offset < own.offset
                or spec.offset + spec.span > own.offset + own.numel
                for spec in map(self._spec, slots)
            )
        ):
            return None
        return base

    def _spec(self, slot: int) -> Spec:
        spec = self.specs[slot]
        assert spec is not None
        return spec

    def _part(self, start: int, stop: int) -> Partition | None:
        while True:  # without what need not be in it at either end
            fusible = [self._is_fusible(index) for index in range(start, stop)]
            if not any(fusible):
                return None
            stop = start + len(fusible) - fusible[::-1].index(True)
            start += fusible.index(True)
            reached = self._stretch(start)  # views that are outside now may make it shorter
            if reached >= stop:
                break
            stop = reached
        if sum(self._weight(index) for index in range(start, stop)) < policy.COMPILE_FUSIBLE:
            return None
        inside = {r.slot for i in self.program.instructions[start:stop] for r in i.results}
        inputs = list(dict.fromkeys(s for index in range(start, stop) for s in self.reads[index] if s not in inside))
        written = {self.root[slot] for index in range(start, stop) for slot in self.writes[index]}
        needed = {slot for slot in inside if self.last_use.get(slot, -1) >= stop}
        again = self._again(start, stop, needed)
        outputs = sorted(slot for slot in needed if self.root[slot] == slot)
        for slot in outputs:
            spec = self.specs[slot]
            if spec is None or not spec.numel or spec.overlaps or spec.span != spec.numel or spec.offset:
                raise _Barred(self.maker[slot])
        if not outputs and not any(self.root[slot] in written for slot in inputs):
            return None
        numbers, baked = self._numbers(start, stop)
        bases = []
        for slot in inputs:
            base = (
                self._base({s for s in inputs if self.root[s] == self.root[slot]})
                if self.root[slot] in written
                else slot
            )
            bases.append(-1 if base is None or base == slot else inputs.index(base))
        flags = tuple(self.root[slot] in written and base < 0 for slot, base in zip(inputs, bases, strict=True))
        return Partition(
            *(start, stop, tuple(inputs), flags, tuple(bases)),
            *(tuple(outputs), tuple(numbers), tuple(baked), tuple(again)),
        )

    def _weight(self, index: int) -> int:
        """How many kernels the flat tier runs for an instruction that Inductor can fuse."""
        if not self._is_fusible(index):
            return 0
        first = self.program.instructions[index].args[0]
        return len(first.items) if isinstance(first, ListOf) else 1

    def _is_fusible(self, index: int) -> bool:
        op = self.program.instructions[index].op
        facts = facts_of(op.func)
        if settings.fast_math and facts.fused_by_passes:
            return True
        return facts.fusible or is_row_product(op, [self._spec(slot) for slot in self.reads[index]])

    def _again(self, start: int, stop: int, needed: set[int]) -> list[Instruction]:
        """The views to make behind a part; adds to ``needed`` what they are views of."""
        found = []
        for index in range(stop - 1, start - 1, -1):
            instruction = self.program.instructions[index]
            views = {r.slot for r in instruction.results if self.root[r.slot] != r.slot}
            if not views & needed:
                continue
            if self.writes[index]:  # the result of a write, as a value of its own
                raise _Barred(index)
            found.append(instruction)
            # What it is a view of was made in the part, or lives outside of it.
            needed |= {slot for slot in self.reads[index] if self.maker.get(slot, -1) >= start}
        return found[::-1]

    def _numbers(self, start: int, stop: int) -> tuple[list[Number], list[int]]:
        numbers, baked = [], []
        for index in range(start, stop):
            instruction = self.program.instructions[index]
            lifted = lifted_arguments(instruction.op)
            dtypes = {spec.dtype for slot in self.reads[index] if (spec := self.specs[slot]) is not None}
            for name, value in arguments_of(instruction):
                if not isinstance(value, Param):
                    continue
                given = self.params[value.index]
                if name not in lifted or not dtypes:
                    baked.append(value.index)
                elif isinstance(given, tuple):
                    numbers += [Number(value.index, i, *_type_of(n, dtypes)) for i, n in enumerate(given)]
                else:
                    numbers.append(Number(value.index, None, *_type_of(given, dtypes)))
        return numbers, baked


def _type_of(number: Any, dtypes: set[torch.dtype]) -> tuple[torch.dtype, type | None]:
    """What a number is passed as, among tensors of these types: what the ATen kernel computes with."""
    if any(dtype.is_floating_point for dtype in dtypes):
        return torch.float64 if torch.float64 in dtypes else torch.float32, None
    kind = type(number)
    return torch.float32 if kind is float else torch.bool if kind is bool else torch.int64, kind
