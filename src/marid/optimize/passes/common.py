"""Common subexpressions: what was computed before from the same values is not computed again.

The same values: a tensor that was written in between is another one. Two views of one tensor are the same whatever is
written. Nothing is merged where that would keep memory that the program lets go: activations that somebody computes
twice to save memory (checkpointing) stay computed twice.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from marid.optimize.passes.rewriter import Rewriter, is_draw, op_of, pure, slot_of
from marid.optimize.passes.storages import Storages

__all__ = ["merge"]

_SMALL = 4096  # bytes that may be kept for longer
_NEVER = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted")


def merge(rewriter: Rewriter) -> int:
    """Let readers of a repeated value read the first."""
    storages = rewriter.storages
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in rewriter.calls():
        if "slot" not in node.meta or not pure(node):
            continue
        view = op_of(node).view
        key = _view_key(node) if view else _key(rewriter, storages, node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        fits = _is_same_view(storages, first, node) if view else _is_same_value(rewriter, storages, first, node)
        if fits:
            storages.join(node, first)
            rewriter.replace(node, first)
            merged += 1
        elif view is False:
            seen[key] = node  # one that is nearer to those that follow
    return merged


def _view_key(node: fx.Node) -> Any:
    base = node.args[0]
    if not isinstance(base, fx.Node) or node.meta["spec"] is None:
        return None
    return ("view", slot_of(base), id(node.meta["spec"]))


def _is_same_view(storages: Storages, first: fx.Node, node: fx.Node) -> bool:
    return not (slot_of(first) in storages.outputs and slot_of(node) in storages.outputs)


def _key(rewriter: Rewriter, storages: Storages, node: fx.Node) -> Any:
    if op_of(node).name.partition("::")[2] in _NEVER:
        return None
    index = node.meta["index"]
    key: list[Any] = [node.target]

    def add(arg: Any) -> None:
        if isinstance(arg, fx.Node):
            if "slot" in arg.meta:
                key.extend((slot_of(arg), storages.version(storages.of(arg), index)))
            else:
                key.append(repr(rewriter.peek(arg)))
        elif isinstance(arg, (list, tuple)):
            key.append(len(arg))
            for item in arg:
                add(item)
        else:
            key.append((type(arg), arg))

    for arg in node.args:
        add(arg)
    for name, arg in node.kwargs.items():
        key.append(name)
        add(arg)
    return tuple(key)


def _is_same_value(rewriter: Rewriter, storages: Storages, first: fx.Node, node: fx.Node) -> bool:
    mine, others = storages.of(node), storages.of(first)
    if first.meta["spec"] is not node.meta["spec"] or storages.writes.get(mine) or storages.writes.get(others):
        return False
    if mine in storages.escaping and others in storages.escaping:
        return False
    spec = node.meta["spec"]
    if storages.last.get(others, -1) < node.meta["index"] and (spec is None or spec.nbytes > _SMALL):
        return False
    pairs = [*zip(first.args, node.args, strict=True), *((first.kwargs[k], v) for k, v in node.kwargs.items())]
    numbers = [(a, b) for a, b in pairs if isinstance(a, fx.Node) and "slot" not in a.meta]
    return not any(is_draw(a) for a, _ in numbers) and all(rewriter.same(a, b) for a, b in numbers)
