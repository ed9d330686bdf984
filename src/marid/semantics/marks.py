"""What users have said about values."""

from __future__ import annotations

import weakref

from marid.graph.node import Node, Value, root_of

marks: weakref.WeakKeyDictionary[Value, str] = weakref.WeakKeyDictionary()
"""The roles that were given to tensors, by the value whose operation made their memory."""


def marked(node: Node) -> str | None:
    """The role that was given to the result of a node, the first of several, if one was."""
    if not marks:
        return None
    if node.outs is None:
        return marks.get(root_of(node))
    outs = [out for ref in node.outs if (out := ref()) is not None]
    return next((role for out in outs if (role := marks.get(root_of(out))) is not None), None)
