"""What a run will hold in memory at its fullest moment, known before it runs.

Results alone are counted, from their specs: what kernels use while they run comes on top, and a plan saves some of it.
Memory is held from the operation that makes it to the last one that sees it, itself or through a view, or for good
where anything that lies in it outlives the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from marid.graph.node import Node, Spec, Value, input_values, root_of
from marid.graph.operators import shared_slots, slots_of
from marid.graph.program import Program, Task

__all__ = ["Forecast", "forecast", "forecast_program"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Forecast:
    """``nbytes`` that the results of a run take at once at its fullest moment, and ``held``: what they are then, each
    with its bytes and the node that makes it, the largest first."""

    nbytes: int
    held: list[tuple[int, Node]]


def forecast(task: Task) -> Forecast:
    """What a run of ``task`` will hold; O(n log n) in its nodes."""
    born: dict[Value, int] = {}
    dies: dict[Value, int] = {}
    for index, (node, outs) in enumerate(zip(task.nodes, task.results, strict=True)):
        made: list[Value] = [node] if outs is None else [*outs]
        for value in made:
            if value.spec is not None and value.root is None:
                born[value] = index
        for value in (*input_values(node), *made):
            dies[root_of(value)] = index
    for value in task.outputs:
        dies[root_of(value)] = len(task.nodes)
    lives = [
        (value.node, value.spec.nbytes, index, dies[value]) for value, index in born.items() if value.spec is not None
    ]
    nbytes, held = _fullest(lives, len(task.nodes))
    return Forecast(nbytes, held)


def forecast_program(program: Program, specs: Sequence[Spec | None]) -> tuple[int, list[tuple[int, int]]]:
    """The same for a program without nodes, given the specs of its slots: bytes, and what is held with its slot."""
    root: dict[int, int] = {slot: slot for slot in program.input_slots}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        for slot in slots_of(instruction):
            dies[root[slot]] = index
        shared = shared_slots(instruction)
        for slot in [result.slot for result in instruction.results]:
            root[slot] = root[shared[slot]] if slot in shared else slot
            dies[root[slot]] = index
            if slot not in shared:
                born[slot] = index
    for slot in program.output_slots:
        dies[root[slot]] = len(program.instructions)
    lives = [(slot, spec.nbytes, at, dies[slot]) for slot, at in born.items() if (spec := specs[slot]) is not None]
    return _fullest(lives, len(program.instructions))


def _fullest(lives: list[tuple[_T, int, int, int]], count: int) -> tuple[int, list[tuple[int, _T]]]:
    """The bytes at the fullest moment of ``count``, and what is held then, the largest first; given for each its
    bytes, and when it is made and seen last."""
    changes = [0] * (count + 2)
    for _, nbytes, start, end in lives:
        changes[start] += nbytes
        changes[end + 1] -= nbytes
    held = peak = fullest = 0
    for index, change in enumerate(changes):
        held += change
        if held > peak:
            peak, fullest = held, index
    then = [(nbytes, what) for what, nbytes, start, end in lives if start <= fullest <= end]
    return peak, sorted(then, key=lambda one: -one[0])
