"""Programs that ran, as graphs again, and what they hold in memory while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marid.graph.arguments import input_values, values_in
from marid.graph.computation import ComputationGraph, Meaning, Recorded
from marid.graph.node import Node, Value, root_of
from marid.graph.program_nodes import nodes_of_program as nodes_of
from marid.ops.facts import facts_of
from marid.report.operator_times import Profile


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


def shown(profile: Profile, understand: Callable[[Recorded], Meaning]) -> ShownProgram:
    """The program of a profile as a graph, in which reads come behind the writes that they see."""
    recorded = profile.recorded
    places = [profile.place(index) for index in range(len(recorded.instructions))]
    sites, scopes = [site for site, _ in places], [scope for _, scope in places]
    nodes, values = nodes_of(recorded, profile.specs, profile.params, sites, scopes)
    last_write: dict[Value, Node] = {}
    for node in nodes:
        read = [root_of(value) for value in input_values(node)]
        node.after = tuple(dict.fromkeys(last_write[root] for root in read if root in last_write)) or None
        for root in _written(node):
            last_write[root] = node
    asked = [value for slot in recorded.output_slots if (value := values[slot]).node.op is not None]
    graph = ComputationGraph(nodes, asked, _unreadable, understand)
    return ShownProgram(profile, graph, nodes, *_measured(profile))


def _written(node: Node) -> list[Value]:
    """The memory that a node writes, as the values that made it."""
    assert node.op is not None
    if not node.op.mutates:
        return []
    formals = [formal.name for formal in node.op.func._schema.arguments]
    given = {**dict(zip(formals, node.args or (), strict=False)), **dict(node.kwargs or ())}
    marked = zip(formals, facts_of(node.op.func).written, strict=True)
    return [root_of(value) for name, is_written in marked if is_written for value in values_in((given.get(name),))]


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
