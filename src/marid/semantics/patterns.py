"""Patterns: parts of graphs that mean something together.

A pattern is a function in plain PyTorch. It runs once, on small tensors of the CPU, and what it did is made canonical
as graphs are; PyTorch's ``SubgraphMatcher`` finds that in the canonical graph. Sums and products of
which the matcher cannot know the order are tried in both. ``library.py`` has Marid's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher
from torch.utils._python_dispatch import TorchDispatchMode

from marid.graph.arguments import map_leaves
from marid.graph.computation import Recorded
from marid.graph.node import Node, Operation, Output, Spec, Value
from marid.graph.program_nodes import Held
from marid.semantics.canonical import CASTS, Canonical
from marid.semantics.expressions import base_name, rank


@dataclass(eq=False)
class Match:
    """A pattern that was found: its ``name``, a ``variant``, its recorded ``nodes`` in program order, and ``details``.

    ``inputs`` and ``results`` are the canonical nodes that it reads, in the order of their first use, and those that it
    gives; they are there while the graph is gone through. ``memory`` are the recorded nodes whose memory a cache or a
    state is.
    """

    name: str
    nodes: Sequence[Node]
    variant: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    inputs: Sequence[fx.Node] = ()
    results: Sequence[fx.Node] = ()
    memory: Sequence[Node] = ()


@dataclass(eq=False)
class Pattern:
    """A function whose work is looked for. ``inputs`` are example tensors; what of them is an ``nn.Parameter`` stands
    for what layers multiply by. Earlier patterns of one name go before later ones where they share nodes."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    variant: str | None = None

    @cached_property
    def matchers(self) -> list[SubgraphMatcher]:
        """One for each order of sums and products that the graph may have."""
        return [SubgraphMatcher(graph, ignore_literals=True) for graph in _orders(canonical_of(self))]

    @cached_property
    def targets(self) -> frozenset[Any]:
        """The names of what it calls."""
        return frozenset(node.target for node in self.matchers[0].pattern.nodes if node.op == "call_method")


# --- a function as a canonical graph --------------------------------------------------------------------------------


class _Tracer(TorchDispatchMode):
    """What is done to tensors, as recorded nodes."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._kept: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._roots: dict[int, Value] = {}
        self.weights: set[Value] = set()
        for tensor in inputs:
            self.value_of(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler with the first operation

    def value_of(self, tensor: torch.Tensor) -> Value:
        """What stands for a tensor."""
        found = self._values.get(id(tensor))
        if found is None:  # the function has it from elsewhere
            found = self._new(None, (), (), tensor, None)
            if isinstance(tensor, torch.nn.Parameter):
                self.weights.add(found)
        return found

    def _new(self, op: Any, args: Any, kwargs: Any, tensor: torch.Tensor, root: Value | None) -> Node:
        node = Node(len(self._kept), op, args, kwargs, _spec(tensor), root, None, None)
        self._keep(tensor, node)
        return node

    def _keep(self, tensor: torch.Tensor, value: Value) -> None:
        self._kept.append(tensor)
        self._values[id(tensor)] = value
        self._roots.setdefault(tensor.untyped_storage()._cdata, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        convert = lambda leaf: self.value_of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        given, named = map_leaves(convert, (tuple(args), tuple((kwargs or {}).items())), tuple)
        schema = func._schema
        view = any(arg.alias_info is not None and not arg.alias_info.is_write for arg in schema.arguments)
        op = Operation(func, schema.is_mutable, view)
        if isinstance(made, torch.Tensor):
            root = self._roots.get(made.untyped_storage()._cdata)
            if id(made) in self._values:  # written in place
                self.nodes.append(Node(len(self.nodes), op, given, named, _spec(made), root, None, None))
            else:
                self.nodes.append(self._new(op, given, named, made, root))
            return made
        node = Node(len(self.nodes), op, given, named, None, None, None, None)
        results = [item for item in (made or ()) if isinstance(item, torch.Tensor)]
        outs = [
            Output(node, (index,), _spec(item), self._roots.get(item.untyped_storage()._cdata))
            for index, item in enumerate(results)
        ]
        for out, item in zip(outs, results, strict=True):
            self._keep(item, out)
        node.outs = [Held(out) for out in outs]  # pyright: ignore[reportAttributeAccessIssue]
        self.nodes.append(node)
        return made


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype, 0)


def canonical_of(pattern: Pattern) -> fx.Graph:
    """The canonical graph of a pattern's function."""
    tracer = _Tracer(pattern.inputs)
    with torch.no_grad(), torch.device("cpu"), tracer:
        results = pattern.function(*pattern.inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    recorded = Recorded(tracer.nodes, [])
    made = Canonical(recorded, tracer.nodes, lambda value: value in tracer.weights)
    made.graph.output(tuple([made.value(tracer.value_of(result)) for result in results]))
    for node in reversed(made.graph.nodes):
        if not node.users and node.op != "output":
            made.graph.erase_node(node)
    return made.graph


_MOST_ORDERS = 16


def _orders(graph: fx.Graph) -> list[fx.Graph]:
    """The graph with the arguments of sums and products in every order that may come: what an input of the pattern
    stands for may have any name."""
    nodes = list(graph.nodes)
    open_ = [index for index, node in enumerate(nodes) if node.target in ("add", "mul") and _is_open(node)]
    found = []
    for flips in itertools.islice(itertools.product((False, True), repeat=len(open_)), _MOST_ORDERS):
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}, return_output_node=False))
        copied = [node for node in copy.nodes if node.op != "output"]
        originals = [node for node in nodes if node.op != "output"]
        for index, flip in zip(open_, flips, strict=True):
            node = copied[originals.index(nodes[index])]
            if flip:
                node.args = tuple(reversed(node.args))
        found.append(copy)
    return found


def _is_open(node: fx.Node) -> bool:
    a, b = node.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    return a is not b and ("placeholder" in (a.op, b.op) or rank(a) == rank(b))


# --- finding --------------------------------------------------------------------------------------------------------


def matches_in(canonical: Canonical, patterns: Iterable[Pattern]) -> list[Match]:
    """What patterns find in a canonical graph."""
    there = {node.target for node in canonical.graph.nodes}
    order = {node: index for index, node in enumerate(canonical.recorded.operations)}
    taken: dict[str, set[fx.Node]] = {}
    found: list[Match] = []
    for pattern in patterns:
        if not pattern.targets <= there:
            continue
        for matcher in pattern.matchers:
            for one in matcher.match(canonical.graph):
                own = _own(one)
                if taken.setdefault(pattern.name, set()) & own:
                    continue
                nodes = sorted(nodes_of(canonical, own), key=lambda node: order[node])
                match = Match(pattern.name, nodes, pattern.variant, {}, one.placeholder_nodes, one.returning_nodes)
                taken[pattern.name] |= own
                found.append(match)
    return found


def _own(match: InternalMatch) -> set[fx.Node]:
    return {found for node, found in match.nodes_map.items() if node.op not in ("placeholder", "output")}


def nodes_of(canonical: Canonical, own: Iterable[fx.Node]) -> set[Node]:
    """The recorded nodes of canonical ones, with what lies between them, and the views and casts that their own modules
    make of what they read."""
    found = {node for one in own for node in one.meta["nodes"]}
    mains, recorded = canonical.mains, canonical.recorded
    inside: dict[Node, bool] = dict.fromkeys(found, True)

    waiting = list(found)
    while waiting:
        node = waiting.pop()
        for value in recorded.inputs_of(node):
            maker = value.node
            if maker in found or maker not in recorded.arguments or maker in mains or maker.op is None:
                continue
            if _leads_back(maker, inside, canonical) or (
                (maker.op.view or base_name(maker) in CASTS) and maker.scope is node.scope
            ):
                found.add(maker)
                waiting.append(maker)
    return found


def _leads_back(node: Node, inside: dict[Node, bool], canonical: Canonical) -> bool:
    """Whether a node is made of those that are ``inside``, with nothing that stands for something else between."""
    if node not in inside:
        inside[node] = False
        if node in canonical.recorded.arguments and node not in canonical.mains:
            inputs = canonical.recorded.inputs_of(node)
            inside[node] = any(_leads_back(value.node, inside, canonical) for value in inputs)
    return inside[node]
