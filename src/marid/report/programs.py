"""Programs that ran, as graphs again, and what they hold in memory while they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marid.graph.computation import ComputationGraph, Meaning, Recorded
from marid.graph.node import Node, Output, Value, input_values, root_of
from marid.graph.operators import shared_slots, written_slots
from marid.graph.program import Constant, Instruction, ListOf, Param, Slot
from marid.report.operators import Profile

__all__ = ["Alive", "Held", "ShownProgram", "held_by", "shown"]


@dataclass(eq=False)
class ShownProgram:
    """A program that ran: ``graph`` has its ``nodes``, one for each instruction that was recorded, in order.
    ``seconds`` and ``counts`` are what they took in all, and in how many runs; a compiled part's are those of its first
    instruction, and ``compiled`` has, by the number of that, how many it stands for."""

    profile: Profile
    graph: ComputationGraph
    nodes: list[Node]
    seconds: list[float]
    counts: list[int]
    compiled: dict[int, int]
    _outputs: list[Output] = field(default_factory=list)  # kept alive: nodes refer to them weakly


def shown(profile: Profile, understand: Callable[[Recorded], Meaning]) -> ShownProgram:
    """The program of a profile as a graph."""
    values: dict[int, Value] = {}
    outputs: list[Output] = []
    last_write: dict[Value, Node] = {}
    for slot in profile.recorded.input_slots:
        values[slot] = Node(slot, None, None, None, profile.specs[slot], None, None, None)
    first = profile.recorded.slot_count
    nodes = []
    for index, instruction in enumerate(profile.recorded.instructions):
        node = _node(profile, instruction, first + index, values, outputs)
        site, scope = profile.place(index)
        node.site, node.scope = site, scope
        read = [root_of(values[slot]) for slot in _slots(instruction)]
        after = dict.fromkeys(last_write[root] for root in read if root in last_write)
        node.after = tuple(after) or None
        for slot in written_slots(instruction):
            last_write[root_of(values[slot])] = node
        nodes.append(node)
    asked = [values[slot] for slot in profile.recorded.output_slots if slot in values]
    graph = ComputationGraph(nodes, asked, _unreadable, understand)
    seconds, counts, compiled = _measured(profile)
    return ShownProgram(profile, graph, nodes, seconds, counts, compiled, outputs)


def _node(
    profile: Profile, instruction: Instruction, number: int, values: dict[int, Value], outputs: list[Output]
) -> Node:
    def value_of(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return values[arg.index]
        if isinstance(arg, Param):
            return profile.params[arg.index] if arg.index < len(profile.params) else None
        if isinstance(arg, ListOf):
            return tuple([value_of(item) for item in arg.items])
        return arg.value if isinstance(arg, Constant) else arg

    args = tuple([value_of(arg) for arg in instruction.args])
    kwargs = tuple([(name, value_of(arg)) for name, arg in instruction.kwargs])
    node = Node(number, instruction.op, args, kwargs, None, None, None, None)
    shared = {slot: root_of(values[of]) for slot, of in shared_slots(instruction).items()}
    results = instruction.results
    if len(results) == 1 and not results[0].path:
        node.spec, node.root = profile.specs[results[0].slot], shared.get(results[0].slot)
        values[results[0].slot] = node
        return node
    made = []
    for result in results:
        spec = profile.specs[result.slot]
        assert spec is not None
        made.append(Output(node, result.path, spec, shared.get(result.slot)))
        values[result.slot] = made[-1]
    node.outs = [weakref.ref(one) for one in made]
    outputs += made
    return node


def _slots(instruction: Instruction) -> list[int]:
    given = [*instruction.args, *(value for _, value in instruction.kwargs)]
    flat = [item for arg in given for item in (arg.items if isinstance(arg, ListOf) else (arg,))]
    return [item.index for item in flat if isinstance(item, Slot)]


def _unreadable(_value: Value) -> Any:
    raise RuntimeError("what a program computed is not kept")


def _measured(profile: Profile) -> tuple[list[float], list[int], dict[int, int]]:
    count = len(profile.recorded.instructions)
    seconds, counts, compiled = [0.0] * count, [0] * count, dict[int, int]()
    for index, instruction in enumerate(profile.program.instructions):
        at = index if profile.origins is None else profile.origins[index]
        if at >= count:
            continue
        seconds[at] += int(profile.sums[2 * index]) / 1e9
        counts[at] = max(counts[at], int(profile.sums[2 * index + 1]))
        if profile.origins is not None and instruction.op.name == "marid::compiled":
            following = (origin for origin in profile.origins[index + 1 :] if origin > at)
            compiled[at] = next(following, count) - at
            counts[at : at + compiled[at]] = [counts[at]] * compiled[at]
    return seconds, counts, compiled


@dataclass(frozen=True)
class Alive:
    """A block of memory that is held at the peak: its bytes, and the number of the instruction that made it."""

    nbytes: int
    instruction: int


@dataclass(frozen=True)
class Held:
    """Bytes of the results that are held behind each instruction, the number of the fullest one, and what is held then,
    the largest first. Inputs are not counted: they are there before and after."""

    timeline: list[int]
    peak: int
    alive: list[Alive]


def held_by(one: ShownProgram) -> Held:
    """What the results of a program hold as it was recorded, from the instruction that makes each to the last that sees
    it, itself or through a view."""
    born: dict[Value, int] = {}
    dies: dict[Value, int] = {}
    for index, node in enumerate(one.nodes):
        made: list[Value] = [node] if node.outs is None else [out for ref in node.outs if (out := ref()) is not None]
        for value in made:
            if value.spec is not None and value.root is None:
                born[value] = index
        for value in (*input_values(node), *made):
            dies[root_of(value)] = index
    for value in one.graph.asked:
        dies[root_of(value)] = len(one.nodes)
    changes = [0] * (len(one.nodes) + 2)
    for value, index in born.items():
        assert value.spec is not None
        changes[index] += value.spec.nbytes
        changes[dies[value] + 1] -= value.spec.nbytes
    timeline, now = [], 0
    for change in changes[: len(one.nodes)]:
        now += change
        timeline.append(now)
    peak = max(range(len(timeline)), key=timeline.__getitem__, default=0)
    alive = [
        Alive(value.spec.nbytes, index)
        for value, index in born.items()
        if value.spec is not None and index <= peak <= dies[value]
    ]
    return Held(timeline, peak, sorted(alive, key=lambda block: -block.nbytes))
