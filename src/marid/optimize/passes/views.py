"""Views of views: one step from the tensor that stays, or none where they lead back to it."""

from __future__ import annotations

from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.rewriter import Rewriter, op_of, overloads, slot_of

__all__ = ["collapse"]

_RESHAPES = overloads("view", "_unsafe_view")
_AS_STRIDED = overloads("as_strided").pop()
_VIEW = overloads("view").pop()


def collapse(rewriter: Rewriter) -> int:
    """``x.t().t()`` is ``x``; a view of a view that has no other reader is one view."""
    storages = rewriter.storages
    changed = 0
    for node in rewriter.calls():
        if not _is_view(node) or not _is_view(node.args[0]):
            continue
        base = node.args[0]
        assert isinstance(base, fx.Node)
        back = _same_ancestor(node)
        if back is not None and slot_of(node) not in storages.outputs:
            storages.join(node, back)
            rewriter.replace(node, back)
            changed += 1
        elif len(base.users) == 1 and slot_of(base) not in storages.outputs and _steps_over(rewriter, node, base):
            rewriter.graph.erase_node(base)
            changed += 1
    return changed


def _is_view(node: object) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and isinstance(node.meta.get("spec"), Spec)
        and bool(node.args)
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("spec"), Spec)
        and hasattr(node.target, "_schema")
        and op_of(node).view
    )


def _same_ancestor(node: fx.Node) -> fx.Node | None:
    """The furthest tensor that ``node`` is a view of and that looks just like it."""
    found, at = None, node
    while _is_view(at):
        at = at.args[0]
        assert isinstance(at, fx.Node)
        if at.meta["spec"] is node.meta["spec"]:
            found = at
    return found


def _steps_over(rewriter: Rewriter, node: fx.Node, base: fx.Node) -> bool:
    """Make ``node`` a view of what ``base`` is a view of."""
    start = base.args[0]
    assert isinstance(start, fx.Node)
    spec, first = node.meta["spec"], start.meta["spec"]
    if spec.dtype is not first.dtype or (spec.conj, spec.neg) != (first.conj, first.neg):
        return False
    middle = base.meta["spec"]
    if middle.dtype is not first.dtype or (middle.conj, middle.neg) != (first.conj, first.neg):
        return False
    if node.target in _RESHAPES and base.target in _RESHAPES and first.is_contiguous:
        rewriter.rewrite(node, _VIEW, (start, node.args[1]))
    else:
        rewriter.rewrite(node, _AS_STRIDED, (start, spec.shape, spec.stride, spec.offset))
    return True
