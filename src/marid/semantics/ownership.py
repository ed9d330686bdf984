"""Which module an operation belongs to: that of the stack, and for a backward that of what it is the backward of.

Nothing is kept for that while recording. Autograd runs its nodes in the reverse of the order in which they were made,
so the operations of a backward, in program order, belong to operations of the forward from the last to the first. Which
ones is told by what they read and how large it is: the best alignment of both rows that keeps the order is taken, first
of what reads values of the forward, then of what lies between. Values never depend on any of it.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from marid.graph.computation import Recorded, spec_of
from marid.graph.node import Node, Value
from marid.semantics.canonical import CASTS
from marid.semantics.expressions import base_name
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER, Scope

_BACKWARD_OF: dict[str, tuple[str, ...]] = {
    "threshold_backward": ("relu",), "nll_loss_backward": ("nll_loss_forward",),
    "mm": ("addmm", "linear", "addmv", "mm"),
    "bmm": ("baddbmm", "bmm"), "sum": ("expand",), "expand": ("sum", "mean"), "div": ("mean",),
    "gelu_backward": ("gelu",), "index_put": ("index",), "scatter_add": ("gather",), "slice_backward": ("slice",),
}  # fmt: skip
"""Operators that others are made of when gradients are taken, where names do not say so."""
_MOST_READERS = 64
"""A value that more operations read than this tells nothing."""
_WIDEST_GAP = 400
"""What lies between is not aligned where more operations of the forward come into question."""


def scopes_of(recorded: Recorded) -> dict[Node, Scope]:
    """The scope of each operation that has one."""
    scopes = {node: node.scope for node in recorded.operations if node.scope is not None}
    forward, runs = _parted(recorded)
    if runs:
        rows = _Rows(recorded, forward)
        for node, first in rows.first.items():
            if first.scope is not None:
                scopes[node] = first.scope.backward
        for run in runs:
            for node, owner in rows.owners(run).items():
                scope = scopes.get(owner)
                if scope is not None and scope.module_path is not None:
                    scopes[node] = scope.backward
    return scopes


def _parted(recorded: Recorded) -> tuple[list[Node], list[list[Node]]]:
    """What forwards have run, also again, and the backwards, each by itself."""
    forward: list[Node] = []
    runs: list[list[Node]] = []
    open_ = False
    for node in recorded.operations:
        phase = node.scope.phase if node.scope is not None else FORWARD
        if phase == BACKWARD and (node.scope is None or node.scope.module_path is None):
            if not open_:
                runs.append([])
            open_ = True
            runs[-1].append(node)
        elif phase != OPTIMIZER:
            forward.append(node)
            open_ = open_ and phase == BACKWARD
    return forward, runs


class _Rows:
    """The forward's operations by their places, what they touch, and the alignment of a backward with them."""

    def __init__(self, recorded: Recorded, forward: Sequence[Node]) -> None:
        self._recorded = recorded
        self._place: dict[Node, int] = {}
        self._at: dict[int, Node] = {}
        self._touching: dict[Value, list[Node]] = defaultdict(list)
        self.first: dict[Node, Node] = {}
        for node, place in self._placed(forward):
            self._place[node] = place
            self._at.setdefault(place, node)
            for value in {self._base(value) for value in (*recorded.inputs_of(node), node)}:
                self._touching[value].append(node)

    def _placed(self, forward: Sequence[Node]) -> Iterator[tuple[Node, int]]:
        """Operations and their places. What a checkpoint runs again has the place of what it repeats, which is told by
        the first weight that both read; ``first`` has these."""
        readers: dict[tuple[str, Value], int] = {}
        originals: list[Node] = []
        groups: list[list[Node]] = []
        before: Node | None = None
        for node in forward:
            if node.scope is None or node.scope.phase != BACKWARD:
                for value in self._sources(node):
                    readers.setdefault((base_name(node), value), len(originals))
                yield node, len(originals)
                originals.append(node)
            elif before is not None and before.scope is not None and before.scope.phase == BACKWARD:
                groups[-1].append(node)
            else:
                groups.append([node])
            before = node
        for group in groups:
            start = self._start(group, readers)
            for offset, node in enumerate(group):
                place = len(originals) if start is None else min(start + offset, len(originals) - 1)
                if start is not None and originals[place].op is node.op:
                    self.first[node] = originals[place]
                yield node, place

    def _sources(self, node: Node) -> list[Value]:
        inputs = (self._base(value) for value in self._recorded.inputs_of(node))
        return [value for value in inputs if value.node not in self._recorded.arguments]

    def _start(self, group: Sequence[Node], readers: Mapping[tuple[str, Value], int]) -> int | None:
        for offset, node in enumerate(group):
            for value in self._sources(node):
                place = readers.get((base_name(node), value))
                if place is not None and place >= offset:
                    return place - offset
        return None

    def _base(self, value: Value) -> Value:
        """The value that views and casts show: an operation may have saved either."""
        while True:
            node = value.node
            moves = node.op is not None and node in self._recorded.arguments and node.outs is None and _moves(node)
            inputs = self._recorded.inputs_of(node) if moves else []
            if len(inputs) != 1:
                return node if node.outs else value
            value = inputs[0]

    def owners(self, run: Sequence[Node]) -> dict[Node, Node]:
        """The operation of the forward that each operation of a backward belongs to."""
        saved, derived = self._saved(run)
        readers = {value.node: node for node in reversed(run) for value in self._recorded.inputs_of(node)}
        prepared = [node for node in run if node in derived and node in readers]
        aside = set(prepared)
        run = [node for node in run if node not in aside]
        anchors = self._anchors(run, saved)
        if not anchors:
            return {}
        found = {run[index]: self._at[place] for index, place in anchors}
        ends = [(-1, anchors[0][1]), *anchors, (len(run), anchors[-1][1])]
        for (first, high), (last, low) in pairwise(ends):
            between = [run[index] for index in range(first + 1, last)]
            if between:
                found.update(self._fill(between, low, high))
        for node in reversed(prepared):
            owner = found.get(readers[node])
            if owner is not None:
                found[node] = owner
        return found

    def _saved(self, run: Sequence[Node]) -> tuple[dict[Node, set[Value]], set[Node]]:
        """The values of the forward that each operation reads, also through others that read nothing else; and these,
        which belong to those that read them."""
        mine = set(run)
        derived: dict[Node, set[Value]] = {}
        found: dict[Node, set[Value]] = {}
        for node in run:
            inputs = self._recorded.inputs_of(node)
            saved: set[Value] = set()
            own = False
            for value in inputs:
                if value.node not in mine:
                    saved.add(value)
                elif value.node in derived:
                    saved |= derived[value.node]
                else:
                    own = True
            found[node] = saved
            if not own and inputs and len(found) > 1:
                derived[node] = saved
        return found, set(derived)

    def _anchors(self, run: Sequence[Node], saved: dict[Node, set[Value]]) -> list[tuple[int, int]]:
        """The best row of (index in the run, place in the forward) whose places never grow."""
        chains: list[tuple[int, float, _Chain]] = []  # by place, best weights growing toward lower places
        best: _Chain | None = None
        for index, node in enumerate(run):
            fresh: list[_Chain] = []
            for place, weight in sorted(self._evidence(node, saved[node]).items(), reverse=True):
                above = _heaviest(chains, place)
                fresh.append(_Chain(index, place, weight + (above.weight if above is not None else 0.0), above))
            for chain in fresh:
                _insert(chains, chain)
                if best is None or chain.weight > best.weight:
                    best = chain
        row: list[tuple[int, int]] = []
        while best is not None:
            row.append((best.index, best.place))
            best = best.before
        return row[::-1]

    def _evidence(self, node: Node, saved: set[Value]) -> dict[int, float]:
        """What speaks for places in the forward, by what is read."""
        found: dict[int, float] = defaultdict(float)
        for value in saved:
            readers = self._touching.get(self._base(value), ())
            if len(readers) <= _MOST_READERS:
                for forward in readers:
                    reads = forward is value or value in self._recorded.inputs_of(forward)
                    found[self._place[forward]] += 5.0 if reads else 3.0
        for place in found:
            found[place] += self._likeness(node, self._at[place])
        return found

    def _likeness(self, node: Node, forward: Node) -> float:
        """How much an operation of a backward looks like that of another."""
        mine, name = base_name(node), base_name(forward)
        score = 0.0
        if mine.startswith(name) and "backward" in mine:
            score += 5.0
        elif name in _BACKWARD_OF.get(mine, ()):
            score += 2.0
        elif mine == name:
            score += 1.0
        made, given = spec_of(node), spec_of(forward)
        inputs = self._recorded.inputs_of(node)
        read = inputs[0].spec if inputs else None
        if made is None or given is None or read is None:
            return score
        taken = [value.spec.shape for value in self._recorded.inputs_of(forward) if value.spec is not None]
        score += 0.5 * (made.shape in taken) + 0.5 * (read.shape == given.shape)
        if _moves(node) and _moves(forward) and made.shape in taken and read.shape == given.shape:
            score += 2.0
        return score

    def _fill(self, between: Sequence[Node], low: int, high: int) -> dict[Node, Node]:
        """The owners of operations whose places lie in a range, by likeness."""
        places = [place for place in range(high, low - 1, -1) if place in self._at]
        if len(places) > _WIDEST_GAP:
            return dict.fromkeys(between, self._at[high])
        rows: list[list[int]] = []
        totals = [0.0] * len(places)
        for node in between:
            step: list[int] = []
            best = 0
            fresh: list[float] = []
            for index, place in enumerate(places):
                if totals[index] > totals[best]:
                    best = index
                step.append(best)
                fresh.append(totals[best] + self._likeness(node, self._at[place]))
            rows.append(step)
            totals = fresh
        at = max(range(len(places)), key=totals.__getitem__)
        found: dict[Node, Node] = {}
        for node, step in zip(reversed(between), reversed(rows), strict=True):
            found[node] = self._at[places[at]]
            at = step[at]
        return found


class _Chain:
    """A row of anchors, from its last one back."""

    __slots__ = ("before", "index", "place", "weight")

    def __init__(self, index: int, place: int, weight: float, before: _Chain | None) -> None:
        self.index = index
        self.place = place
        self.weight = weight
        self.before = before


def _heaviest(chains: list[tuple[int, float, _Chain]], place: int) -> _Chain | None:
    """The heaviest chain that ends at ``place`` or behind it. ``chains`` are by falling place, and grow in weight."""
    low, high = 0, len(chains)
    while low < high:
        middle = (low + high) // 2
        if -chains[middle][0] >= place:
            low = middle + 1
        else:
            high = middle
    return chains[low - 1][2] if low else None


def _insert(chains: list[tuple[int, float, _Chain]], chain: _Chain) -> None:
    """Keep a chain unless one that ends behind it is as heavy; those that end before it and are no heavier go."""
    above = _heaviest(chains, chain.place)
    if above is not None and above.weight >= chain.weight:
        return
    key = (-chain.place, chain.weight, chain)
    chains[:] = [one for one in chains if one[0] < key[0] or one[1] > chain.weight]
    insort(chains, key, key=lambda one: (one[0], one[1]))


def _moves(node: Node) -> bool:
    return node.op is not None and (node.op.view or base_name(node) in CASTS)
