"""Which module an operation belongs to: that of the stack, and for a backward that of what it is the backward of."""

from __future__ import annotations

from marid.graph.computation import Recorded
from marid.graph.node import Node
from marid.semantics.scopes import Scope

__all__ = ["scopes_of"]


def scopes_of(recorded: Recorded) -> dict[Node, Scope]:
    """The scope of each operation that has one."""
    return {node: node.scope for node in recorded.operations if node.scope is not None}
