"""What the instructions of a program do to memory, worked out once for each program.

Whose memory a result lies in, what is written, what is seen for the last time where, and how much a run holds at its
fullest moment: planning, execution, the partition for the compiler, capturing, forecasts and workers all ask here.
What a single operator does is in its record (``ops/facts.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marid.graph.node import Spec
from marid.graph.program import Instruction, ListOf, Program, Slot
from marid.ops.facts import facts_of

_NOTHING: dict[int, int] = {}


class Analysis:
    """The memory of one program. Lists without more are by instruction; tensors are named by their slots."""

    __slots__ = (
        "_lifetimes",
        "_program",
        "dying",
        "made_by",
        "reads",
        "resized",
        "roots",
        "shared",
        "unsettled",
        "writes",
    )

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lifetimes: list[tuple[int, int, int]] | None = None
        self.reads: list[list[int]] = []
        """The tensors that it is called with."""
        self.writes: list[Sequence[int]] = []
        """Those of them that it writes."""
        self.resized: list[Sequence[int]] = []
        """Those of them whose geometry it may change."""
        self.shared: list[dict[int, int]] = []
        """By result that lies in the memory of an argument, that argument."""
        self.roots: dict[int, int] = {slot: slot for slot in program.input_slots}
        """By tensor, the one that was first in the memory that it lies in. Inputs are taken to be apart."""
        self.made_by: dict[int, int] = {}
        """By result, the instruction that makes it."""
        for index, instruction in enumerate(program.instructions):
            self._add(index, instruction)
        self.dying = self._dying(program)
        """The tensors that nobody needs after it."""
        self.unsettled = frozenset([slot for slots in self.resized for slot in slots])
        """The tensors that do not keep the geometry that they are made with."""

    def _add(self, index: int, instruction: Instruction) -> None:
        facts = facts_of(instruction.op.func)
        args, kwargs = instruction.args, instruction.kwargs
        self.reads.append(_slots((*args, *[value for _, value in kwargs]) if kwargs else args))
        given: list[Any] | None = None
        if facts.mutates:
            given = _given(instruction)
            self.writes.append(_slots([arg for arg, is_so in zip(given, facts.written, strict=True) if is_so]))
            self.resized.append(_slots([arg for arg, is_so in zip(given, facts.resized, strict=True) if is_so]))
        else:
            self.writes.append(())
            self.resized.append(())
        shared = _NOTHING
        if facts.shares:
            shared = _shared(instruction, given or _given(instruction), facts.shared)
        self.shared.append(shared)
        for result in instruction.results:
            slot = result.slot
            self.made_by[slot] = index
            self.roots[slot] = self.roots[shared[slot]] if slot in shared else slot

    def _dying(self, program: Program) -> list[list[int]]:
        last = dict(self.made_by)
        for index, slots in enumerate(self.reads):
            for slot in slots:
                last[slot] = index
        for slot in program.output_slots:
            last.pop(slot, None)
        dying: list[list[int]] = [[] for _ in program.instructions]
        for slot in sorted(last):
            dying[last[slot]].append(slot)
        return dying

    def die_together(self) -> None:
        """Have all tensors that lie in one memory die with the last of them, and never where that outlives the run: so
        a memory that exists is there with all its tensors."""
        last = {self.roots[slot]: index for index, slots in enumerate(self.dying) for slot in slots}
        for slot in (*self._program.input_slots, *self._program.output_slots):
            last.pop(self.roots[slot], None)
        dead = sorted({slot for slots in self.dying for slot in slots})
        self.dying = [[] for _ in self.dying]
        for slot in dead:
            if self.roots[slot] in last:
                self.dying[last[self.roots[slot]]].append(slot)

    def last_reads(self) -> dict[int, int]:
        """By tensor, the last instruction that reads it; the number of instructions for outputs."""
        last = {slot: index for index, slots in enumerate(self.reads) for slot in slots}
        last.update(dict.fromkeys(self._program.output_slots, len(self.reads)))
        return last

    @property
    def written(self) -> set[int]:
        """The roots of the memory that a run writes."""
        return {self.roots[slot] for slots in self.writes for slot in slots}

    @property
    def lifetimes(self) -> list[tuple[int, int, int]]:
        """For each result that has memory of its own: its slot, the instruction that makes it, and the last one that
        sees its memory, itself or through a view; the number of instructions where that outlives the run."""
        if self._lifetimes is None:
            dies: dict[int, int] = {}
            for index, (slots, instruction) in enumerate(zip(self.reads, self._program.instructions, strict=True)):
                for slot in (*slots, *[result.slot for result in instruction.results]):
                    dies[self.roots[slot]] = index
            for slot in self._program.output_slots:
                dies[self.roots[slot]] = len(self.reads)
            own = [(slot, index) for slot, index in self.made_by.items() if self.roots[slot] == slot]
            self._lifetimes = [(slot, index, dies[slot]) for slot, index in own]
        return self._lifetimes


def analysis_of(program: Program) -> Analysis:
    """The analysis of a program, kept with it."""
    found = program.analysis
    if found is None:
        found = Analysis(program)
        object.__setattr__(program, "analysis", found)
    return found


@dataclass(frozen=True)
class Forecast:
    """``nbytes`` that the results of a run take at once at its fullest moment, and ``held``: what they are then, each
    with its bytes, the instruction that makes it, and its slot, the largest first."""

    nbytes: int
    held: list[tuple[int, int, int]]


def forecast(program: Program, specs: tuple[Spec | None, ...]) -> Forecast:
    """What a run with tensors of these specs, by slot, will hold; O(n log n).

    Results alone are counted, from their specs: what kernels use while they run comes on top, and a plan saves some of
    it. Memory is held from the instruction that makes it to the last one that sees it, or for good where anything that
    lies in it outlives the run.
    """
    sizes = [
        (spec.nbytes, start, end, slot)
        for slot, start, end in analysis_of(program).lifetimes
        if (spec := specs[slot]) is not None
    ]
    changes = [0] * (len(program.instructions) + 2)
    for nbytes, start, end, _ in sizes:
        changes[start] += nbytes
        changes[end + 1] -= nbytes
    held = peak = fullest = 0
    for index, change in enumerate(changes):
        held += change
        if held > peak:
            peak, fullest = held, index
    then = [(nbytes, start, slot) for nbytes, start, end, slot in sizes if start <= fullest <= end and nbytes]
    return Forecast(peak, sorted(then, key=lambda one: -one[0]))


def _slots(args: Sequence[Any]) -> list[int]:
    found: list[int] = []
    for arg in args:
        kind = type(arg)
        if kind is Slot:
            found.append(arg.index)
        elif kind is ListOf:
            found += [item.index for item in arg.items if isinstance(item, Slot)]
    return found


def _given(instruction: Instruction) -> list[Any]:
    """The arguments of an instruction by position in the schema; None for those that are left out."""
    named = dict(instruction.kwargs)
    formals = instruction.op.func._schema.arguments
    positional = len(instruction.args)
    return [instruction.args[i] if i < positional else named.get(a.name) for i, a in enumerate(formals)]


def _shared(instruction: Instruction, given: list[Any], shared: tuple[int | None, ...]) -> dict[int, int]:
    found: dict[int, int] = {}
    for result in instruction.results:
        which, *element = result.path if len(shared) > 1 else (0, *result.path)
        position = shared[which]
        item = None if position is None else given[position]
        if isinstance(item, ListOf) and element:
            item = item.items[element[0]]
        if isinstance(item, Slot):
            found[result.slot] = item.index
    return found
