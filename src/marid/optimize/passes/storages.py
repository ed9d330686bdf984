"""Which tensors share memory, when it is written, and how long it is in use: what makes rewriting safe.

Inputs may share memory with each other without the program saying so. So they count as one storage where writes are
concerned, and none of them can be given away.
"""

from __future__ import annotations

import bisect
import operator
from typing import Any

from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.rewriter import Rewriter, op_of, shared_with, slot_of, written_by

__all__ = ["Storages"]

INPUTS = -1
_FOREVER = 1 << 60


class Storages:
    """Storages are named by the slot of the tensor that was first in them, or ``INPUTS``.

    ``writes``: by storage, the instructions that write it, rising. ``last``: the last instruction that reads a tensor
    of it. ``escaping``: storages in which an output lies. ``outputs``: slots of outputs.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.root: dict[int, int] = {}
        self.writes: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.specs: dict[int, Spec | None] = {}
        self._members: dict[int, list[int]] = {}
        for node in rewriter.graph.nodes:
            if node.op == "placeholder":
                if "slot" in node.meta:
                    slot = slot_of(node)
                    self.root[slot] = slot if "constant" in node.meta else INPUTS
                    self.specs[slot] = node.meta["spec"]
            elif node.op == "call_function":
                self._add(node)
        self.outputs = {slot_of(node) for node in rewriter.outputs()}
        self.escaping = {self.root[slot] for slot in self.outputs}
        for root in (*self.escaping, INPUTS):
            self.last[root] = _FOREVER

    def copy(self) -> Storages:
        """One that can be changed without changing this one."""
        made = Storages.__new__(Storages)
        made.root, made.writes, made.last = dict(self.root), dict(self.writes), dict(self.last)
        made.specs, made.outputs, made.escaping = dict(self.specs), set(self.outputs), set(self.escaping)
        made._members = {root: list(slots) for root, slots in self._members.items()}
        return made

    def of(self, node: fx.Node) -> int:
        """The storage of a tensor."""
        return self.root[slot_of(node)]

    def is_written(self, storage: int, after: int, until: int) -> bool:
        """Whether an instruction after ``after``, up to and with ``until``, writes a storage."""
        writes = self.writes.get(storage)
        if not writes:
            return False
        place = bisect.bisect_right(writes, after)
        return place < len(writes) and writes[place] <= until

    def version(self, storage: int, index: int) -> int:
        """How often a storage was written before an instruction."""
        writes = self.writes.get(storage)
        return bisect.bisect_left(writes, index) if writes else 0

    def may_stand_in(self, by: fx.Node, node: fx.Node) -> bool:
        """Whether ``by``, which has the value of ``node`` when that is made, may take its place for good.

        Not where somebody could tell: one of them is written later, or the result escapes and is not the only tensor
        to lie in its memory.
        """
        mine, others = self.of(node), self.of(by)
        if by.meta["spec"] is not node.meta["spec"] or mine == others or self.writes.get(mine):
            return False
        index: Any = node.meta["index"]
        last: Any = self.last.get(mine, index)
        if self.is_written(others, index, last):
            return False
        if mine in self.escaping:
            whole = others == slot_of(by) and by.op == "call_function" and by.target is not operator.getitem
            return whole and others not in self.escaping
        # A part must not keep the whole.
        root = self.specs.get(others)
        small = root is not None and root.nbytes <= node.meta["spec"].nbytes
        return small or others == INPUTS or self.last.get(others, 0) >= last

    def join(self, node: fx.Node, by: fx.Node) -> None:
        """``by`` takes the place of ``node``: to be called before the graph says so."""
        mine, others = self.of(node), self.of(by)
        if slot_of(node) in self.outputs:
            self.outputs.add(slot_of(by))
        if mine == others:
            return
        self.last[others] = max(self.last.get(others, 0), self.last.get(mine, 0))
        if mine in self.escaping:
            self.escaping.add(others)
        self.writes[others] = sorted({*self.writes.get(others, ()), *self.writes.get(mine, ())})
        moved = self._members.pop(mine, [mine])
        for slot in moved:
            self.root[slot] = others
        self._members.setdefault(others, [others]).extend(moved)

    def _add(self, node: fx.Node) -> None:
        index = node.meta["index"]
        if node.target is operator.getitem:
            call: Any = node
            path: list[Any] = []
            while call.target is operator.getitem:
                path.insert(0, call.args[1])
                call = call.args[0]
            if "slot" in node.meta:
                self._name(node, call, path)
            return
        for source in node.all_input_nodes:
            slot = source.meta.get("slot")
            if slot is not None:
                root = self.root[slot]
                self.last[root] = max(self.last.get(root, 0), index)
        op = op_of(node)
        if op.mutates:
            for source in _nodes(written_by(node, op)):
                writes = self.writes.setdefault(self.of(source), [])
                if not writes or writes[-1] != index:
                    writes.append(index)
        if "slot" in node.meta:
            self._name(node, node, [])

    def _name(self, node: fx.Node, call: fx.Node, path: list[Any]) -> None:
        slot = slot_of(node)
        self.specs[slot] = node.meta["spec"]
        source = shared_with(call, op_of(call), path)
        self.root[slot] = root = slot if source is None else self.of(source)
        self._members.setdefault(root, []).append(slot)


def _nodes(args: list[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for arg in args:
        items = arg if isinstance(arg, (list, tuple)) else (arg,)
        found += [item for item in items if isinstance(item, fx.Node) and "slot" in item.meta]
    return found
