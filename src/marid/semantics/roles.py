"""What tensors are for: parameters, buffers, gradients, optimizer states, caches, states, activations, inputs, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marid.graph.computation import Recorded
from marid.graph.node import Node, Value, root_of
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER

if TYPE_CHECKING:
    from marid.semantics.patterns import Match

__all__ = ["roles_of"]


def roles_of(recorded: Recorded, known: Mapping[Value, str], matches: Sequence[Match]) -> dict[Node, str]:
    """The role of each source and of each operation's result."""
    found: dict[Node, str] = {}
    for source in recorded.sources:
        found[source] = known.get(root_of(source), "input")
    made = {BACKWARD: "gradient", OPTIMIZER: "optimizer state"}
    for node in recorded.operations:
        phase = node.scope.phase if node.scope is not None else FORWARD
        found[node] = known.get(root_of(node)) or made.get(phase, "activation")
    return found
