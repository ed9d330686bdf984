"""A program taken out of a recording, to be run again on other inputs without recording anything."""

from __future__ import annotations

from typing import Any

from marid.graph.node import Node, Spec
from marid.graph.program import Program, Task

__all__ = ["Prepared"]


class Prepared:
    """A program with what its runs share.

    ``nodes`` stand for its instructions where an error is explained; they hold no arguments and no results.
    ``transient_bytes`` is the forecast of what its results take at once. ``ready`` belongs to the engine.
    """

    __slots__ = ("_specs", "key", "nodes", "program", "ready", "transient_bytes")

    def __init__(self, task: Task, transient_bytes: int) -> None:
        self.key = task.key
        self.program: Program = task.build()
        self.nodes = [Node(node.seq, node.op, None, None, None, None, node.site, node.scope) for node in task.nodes]
        self.transient_bytes = transient_bytes
        self.ready: Any = None
        self._specs = task.specs()

    def specs(self) -> tuple[Spec | None, ...]:
        """The spec of every tensor, by slot."""
        return self._specs
