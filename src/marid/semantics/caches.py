"""Caches that grow, as a single operation tells."""

from __future__ import annotations

from marid.graph.node import Node, Output
from marid.semantics.scopes import BACKWARD, OPTIMIZER

_MADE_BY = {"aten::cat"}


def grows(node: Node) -> bool:
    """Whether an operation in a module puts what is new behind what was there before: ``cat([cache, new])`` of an empty
    tensor, of one that has run before, or of one that grew so, along a dimension before the last one."""
    if node.op is None or node.op.name not in _MADE_BY or node.scope is None or not node.args:
        return False
    if node.scope.module_path is None or node.scope.phase in (BACKWARD, OPTIMIZER):
        return False
    parts, dim = node.args[0], dict(node.kwargs or ()).get("dim", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(parts, tuple) or len(parts) != 2 or node.spec is None or not isinstance(dim, int):
        return False
    first, rank = parts[0], len(node.spec.shape)
    if not isinstance(first, (Node, Output)) or first.spec is None or rank < 3 or dim % rank in (0, rank - 1):
        return False
    return first.spec.shape == (0,) or first.node.args is None or grows(first.node)
