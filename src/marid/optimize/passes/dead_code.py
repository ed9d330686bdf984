"""Dead code: what nobody reads and what writes nothing is not computed."""

from __future__ import annotations

import operator

from marid.optimize.passes.rewriter import Rewriter, op_of

__all__ = ["remove"]


def remove(rewriter: Rewriter) -> int:
    """Take out operations whose results nobody reads. Random ones too: the numbers of others do not depend on them."""
    removed = 0
    for node in reversed(list(rewriter.graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if node.target is operator.getitem:
            rewriter.graph.erase_node(node)
            continue
        op = op_of(node)
        if not op.mutates and op.func._schema.returns:
            rewriter.graph.erase_node(node)
            removed += 1
    return removed
