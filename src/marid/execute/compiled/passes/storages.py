"""Which tensors of a part share memory, and when that is written: what makes rewriting safe."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from marid.execute.compiled.passes.rewriter import Rewriter, op_of, shared_with, val_of, written_by


class Storages:
    """A snapshot of a graph. A storage is named by the node of the tensor that was first in it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.place: dict[fx.Node, int] = {}
        """In which order the nodes run."""
        self.outputs = set(rewriter.outputs())
        self._root: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, list[int]] = {}
        for place, node in enumerate(rewriter.graph.nodes):
            self.place[node] = place
            if node.op == "placeholder":
                self._root[node] = rewriter.base_of(node)
            elif node.op == "call_function":
                self._add(node, place)

    def of(self, node: fx.Node) -> fx.Node:
        """The storage of a tensor."""
        return self._root[node]

    def is_written(self, node: fx.Node, after: int = -1, until: int | None = None) -> bool:
        """Whether an operation behind place ``after``, up to ``until``, writes the memory of a tensor."""
        return any(after < place and (until is None or place <= until) for place in self._writes.get(self.of(node), ()))

    def only_read_by(self, parts: list[fx.Node], reader: fx.Node) -> bool:
        """Whether each of ``parts`` has one reader, the next or ``reader``, and is neither an output nor written."""
        for part, following in zip(parts, [*parts[1:], reader], strict=True):
            if list(part.users) != [following] or part in self.outputs or self.is_written(part):
                return False
        return True

    def unwritten(self, args: list[Any], since: fx.Node, until: fx.Node) -> bool:
        """Whether what ``since`` reads is still the same where ``until`` runs."""
        tensors = [arg for arg in args if val_of(arg) is not None]
        return not any(self.is_written(arg, self.place[since], self.place[until]) for arg in tensors)

    def _add(self, node: fx.Node, place: int) -> None:
        if node.target is operator.getitem:
            call: Any = node
            path: list[Any] = []
            while call.target is operator.getitem:
                path.insert(0, call.args[1])
                call = call.args[0]
            source = shared_with(call, op_of(call), path)
        else:
            op = op_of(node)
            source = shared_with(node, op, [0] if len(op.func._schema.returns) > 1 else [])
            if op.mutates:
                for written in _nodes(written_by(node, op)):
                    self._writes.setdefault(self.of(written), []).append(place)
        self._root[node] = node if source is None else self.of(source)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument alone."""
    return hasattr(node.target, "_schema") and val_of(node) is not None and op_of(node).view


def _nodes(args: list[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for arg in args:
        items = arg if isinstance(arg, (list, tuple)) else (arg,)
        found += [item for item in items if val_of(item) is not None]
    return found
