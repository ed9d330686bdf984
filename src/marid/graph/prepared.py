"""A program taken out of a recording, to be run again on other inputs without recording anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marid.graph.analysis import forecast
from marid.graph.node import Node, Spec
from marid.graph.program import Program, Task

GUARD = "marid::guard"
"""The operator that holds a number to a test (``native/guard.cpp``)."""


class GuardFailed(Exception):
    """The test that ``node`` stands for has come out otherwise than when it was recorded. What came before it has
    run."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"a test at {node.site} has come out otherwise")
        self.node = node


class Prepared:
    """A program with what its runs share.

    ``nodes`` stand for its instructions where an error is explained; they hold no arguments and no results.
    ``transient_bytes`` is the forecast of what its results take at once. ``ready`` belongs to the engine.
    """

    __slots__ = ("input_slots", "key", "nodes", "program", "ready", "specs", "transient_bytes")

    def __init__(
        self, program: Program, specs: tuple[Spec | None, ...], nodes: list[Node], transient_bytes: int
    ) -> None:
        self.key = program.key
        self.program = program
        self.input_slots = list(program.input_slots)
        self.nodes = nodes
        self.transient_bytes = transient_bytes
        self.ready: Any = None
        self.specs = specs

    @classmethod
    def of(cls, task: Task) -> Prepared:
        """The program of a recorded task."""
        program = task.build()
        nodes = [Node(node.seq, node.op, None, None, None, None, node.site, node.scope) for node in task.nodes]
        return cls(program, task.specs, nodes, forecast(program, task.specs).nbytes)


class Replay:
    """One run of a prepared program: what a ``Task`` is to a cut. ``between`` is called now and then while it runs,
    before an instruction."""

    __slots__ = ("_prepared", "between", "inputs", "params", "timing")

    def __init__(self, prepared: Prepared, inputs: list[Any], params: list[Any]) -> None:
        self._prepared = prepared
        self.inputs = inputs
        self.params = params
        self.timing: Any = None
        self.between: Callable[[], None] | None = None

    @property
    def nodes(self) -> list[Node]:
        """What stands for the instructions."""
        return self._prepared.nodes

    @property
    def input_slots(self) -> list[int]:
        """The slots of the inputs, in their order."""
        return self._prepared.input_slots

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """The spec of every tensor, by slot."""
        return self._prepared.specs
