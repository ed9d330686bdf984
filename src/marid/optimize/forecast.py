"""What a run will hold in memory at its fullest moment, known before it runs.

Results alone are counted, from their specs: what kernels use while they run comes on top, and a plan saves some of it.
Memory is held from the operation that makes it to the last one that sees it, itself or through a view, or for good
where anything that lies in it outlives the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from marid.graph.node import Node, Value, input_values, root_of
from marid.graph.program import Task

__all__ = ["Forecast", "forecast"]


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
    changes = [0] * (len(task.nodes) + 2)
    for value, index in born.items():
        nbytes = value.spec.nbytes if value.spec is not None else 0
        changes[index] += nbytes
        changes[dies[value] + 1] -= nbytes
    held = peak = fullest = 0
    for index, change in enumerate(changes):
        held += change
        if held > peak:
            peak, fullest = held, index
    then = [
        (value.spec.nbytes, value.node)
        for value, index in born.items()
        if value.spec is not None and index <= fullest <= dies[value]
    ]
    return Forecast(peak, sorted(then, key=lambda one: -one[0]))
