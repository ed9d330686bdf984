"""The graph users look at: a snapshot of recorded operations, how values flow between them, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from marid.graph.arguments import values_in
from marid.graph.fx import to_fx
from marid.graph.html import folded_html, table_html
from marid.graph.node import Node, Spec, Value

if TYPE_CHECKING:
    import networkx
    import torch

Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
Read = Callable[[Value], Any]
"""Brings the value of what has run."""


class Recorded:
    """What a graph shows, as data: ``operations`` in program order, the ``sources`` that they read, the ``arguments``
    of each operation (kept here, since an operation that has run forgets them), and the values ``asked`` for."""

    def __init__(self, operations: list[Node], asked: list[Value]) -> None:
        self.operations = operations
        self.asked = asked
        self.arguments: dict[Node, Arguments] = {node: (node.args or (), node.kwargs or ()) for node in operations}
        self.after = {node: node.after for node in operations if node.after}
        sources: dict[Node, None] = {}
        for node in operations:
            for value in self.inputs_of(node):
                if value.node not in self.arguments:
                    sources[value.node] = None
        self.sources = sorted(sources, key=lambda node: node.seq)

    def inputs_of(self, node: Node) -> list[Value]:
        """The values that an operation is called with, in the order of its arguments."""
        if node not in self.arguments:
            return []
        args, kwargs = self.arguments[node]
        return list(values_in((*args, *(arg for _, arg in kwargs))))

    def argument(self, node: Node, position: int, name: str) -> Any:
        """An argument by position or name; None where the default was left."""
        args, kwargs = self.arguments[node]
        return args[position] if position < len(args) else dict(kwargs).get(name)


class Meaning(Protocol):
    """What ``semantics`` makes of what was recorded; each answer is worked out once, when somebody asks."""

    @property
    def regions(self) -> Any:
        """The tree of phases, module calls and patterns."""

    def metadata(self, node: GraphNode) -> Any:
        """The one metadata object of a node."""

    def costs(self, nodes: list[GraphNode], by: str, measured: Mapping[int, float]) -> Any:
        """What groups of nodes cost."""


class GraphNode:
    """One node of a graph: ``id`` orders nodes as they were recorded, ``operation`` is the operator ("aten::mm";
    "marid::source" for what has run already), ``inputs`` are the nodes whose values it reads, each once.

    ``op``, ``spec``, ``site`` and ``scope`` are those of the recorded ``node``.
    """

    __slots__ = ("_meaning", "inputs", "node")

    def __init__(self, node: Node, inputs: tuple[GraphNode, ...], meaning: Meaning) -> None:
        self.node = node
        self.inputs = inputs
        self._meaning = meaning

    @property
    def id(self) -> int:
        """Its number in the order of recording."""
        return self.node.seq

    @property
    def seq(self) -> int:
        """The same as ``id``."""
        return self.node.seq

    @property
    def operation(self) -> str:
        """The name of the operator, with its namespace."""
        return self.node.op.name if self.node.op is not None else SOURCE

    @property
    def op(self) -> Any:
        """The recorded operator; None for what was uploaded."""
        return self.node.op

    @property
    def spec(self) -> Spec | None:
        """The geometry of its result, the first of several that are still there."""
        return spec_of(self.node)

    @property
    def site(self) -> Any:
        """The line that it was written in."""
        return self.node.site

    @property
    def scope(self) -> Any:
        """The module and the phase that recorded it, as they were on the stack."""
        return self.node.scope

    @property
    def metadata(self) -> Any:
        """Its ``SemanticMetadata``: one object, made when it is first asked for."""
        return self._meaning.metadata(self)

    def __repr__(self) -> str:
        inputs = ", ".join(str(node.id) for node in self.inputs)
        return f"GraphNode({self.id}, {self.operation}({inputs}))"


SOURCE = "marid::source"
_SHOWN = 200  # nodes in a notebook


def spec_of(node: Node) -> Spec | None:
    """The geometry of a node's result, the first of several that are still there."""
    if node.spec is not None or not node.outs:
        return node.spec
    return next((out.spec for ref in node.outs if (out := ref()) is not None), None)


class ComputationGraph:
    """Recorded nodes, in program order.

    ``nodes`` are ``GraphNode`` objects (``id``, ``operation``, ``inputs``, ``metadata``); ``edges`` are pairs of nodes,
    from the one that makes a value or writes its memory to the one that needs it. Values that have run already appear
    as source nodes. ``operations`` and ``sources`` are the recorded nodes themselves.
    """

    def __init__(
        self, nodes: list[Node], asked: list[Value], read: Read, understand: Callable[[Recorded], Meaning]
    ) -> None:
        self._read = read
        self._understand = understand
        self._asked = asked
        self.replace(nodes)

    def replace(self, nodes: list[Node]) -> None:
        """Show ``nodes`` (pending, in program order) and the sources they read. Takes a snapshot of the arguments."""
        self._recorded = Recorded(list(nodes), self._asked)
        self._meaning = self._understand(self._recorded)
        for name in ("_shown", "edges"):
            self.__dict__.pop(name, None)

    @property
    def asked(self) -> list[Value]:
        """The values that the graph was asked for; empty where it shows everything."""
        return self._asked

    @property
    def operations(self) -> list[Node]:
        """What has to run, in program order."""
        return self._recorded.operations

    @property
    def sources(self) -> list[Node]:
        """What has run, and is read."""
        return self._recorded.sources

    @cached_property
    def _shown(self) -> dict[Node, GraphNode]:
        shown = {node: GraphNode(node, (), self._meaning) for node in self.sources}
        for node in self.operations:
            inputs = dict.fromkeys(shown[value.node] for value in self._recorded.inputs_of(node))
            shown[node] = GraphNode(node, tuple(inputs), self._meaning)
        return shown

    @property
    def nodes(self) -> list[GraphNode]:
        """Sources first, then operations in program order; the same objects each time."""
        return list(self._shown.values())

    @cached_property
    def edges(self) -> list[tuple[GraphNode, GraphNode]]:
        """From what is needed to what needs it."""
        shown = self._shown
        found: dict[tuple[GraphNode, GraphNode], None] = {}
        for node in self.operations:
            for made in shown[node].inputs:
                found[made, shown[node]] = None
            for write in self._recorded.after.get(node, ()):
                if write in self._recorded.arguments:
                    found[shown[write], shown[node]] = None
        return list(found)

    @property
    def regions(self) -> Any:
        """The nodes as a tree: the graph has phases, these have module calls, these have more of them and patterns.
        See ``marid.semantics.regions.Region``."""
        return self._meaning.regions

    def costs(self, by: str = "module", measured: Mapping[int, float] | None = None) -> Any:
        """What the graph costs by "module", "phase", "pattern", "operation" or "node": a dict of
        ``marid.semantics.costs.Cost`` by name. A module's cost includes that of the modules in it. ``measured`` are
        seconds by node id, which then stand beside the predicted ones.

        The first call on a machine measures its speed, for some tenths of a second. Raises ``ValueError`` for another
        ``by``."""
        return self._meaning.costs(self.nodes, by, measured or {})

    def __len__(self) -> int:
        return len(self.sources) + len(self.operations)

    def __repr__(self) -> str:
        return f"ComputationGraph({len(self.operations)} operations, {len(self.sources)} sources)"

    def _repr_html_(self) -> str:
        shown = self.nodes[-_SHOWN:]
        rows = []
        for node in shown:
            scope, shape = node.scope, None if node.spec is None else list(node.spec.shape)
            inputs = ", ".join(str(one.id) for one in node.inputs)
            module, phase = (None, None) if scope is None else (scope.module_path, scope.phase)
            rows.append((node.id, node.operation, inputs, shape, module, phase, node.site))
        table = table_html(("id", "operation", "inputs", "shape", "module", "phase", "line"), rows)
        left_out = len(self) - len(shown)
        title = f"{len(self.operations):,} operations, {len(self.sources):,} sources"
        return folded_html(title + (f"; the last {len(shown)} of them" if left_out else ""), table)

    def get_execution_order(self) -> list[GraphNode]:
        """All nodes so that each comes after everything it needs."""
        return self.nodes

    def arguments_of(self, node: Node | GraphNode) -> Arguments:
        """The arguments of an operation, values in place of tensors, also after it ran."""
        return self._recorded.arguments[node.node]

    def to_fx(self) -> torch.fx.GraphModule:
        """An FX ``GraphModule`` that takes the values of ``sources`` and returns the asked values (or all unread ones).

        ``graph_module.inputs()`` gives the concrete sources, so that ``gm(*gm.inputs())`` runs it. ``node.meta`` has
        ``val``, ``stack_trace``, ``nn_module_stack`` and, as ``marid``, the metadata of the node.
        """
        recorded, shown = self._recorded, self._shown
        operations = [(node, *recorded.arguments[node]) for node in self.operations]
        read = dict.fromkeys(value for node in self.operations for value in recorded.inputs_of(node))
        sources = [value for value in read if value.node not in recorded.arguments]
        names = {value: f"source_{index}" for index, value in enumerate(sources)}
        values = self._asked or [node for node in self.operations if node.outs is None and node not in read]
        returned = values[0] if len(values) == 1 else tuple(values)
        module: Any = to_fx(operations, names, returned, lambda node: shown[node].metadata, "MaridGraph")
        module.inputs = lambda: [self._read(value) for value in sources]
        return module

    def to_networkx(self) -> networkx.DiGraph:
        """A ``networkx.DiGraph``: node keys are sequence numbers; attributes name operation, shape, dtype, module,
        phase, role, pattern and source line."""
        import networkx

        graph = networkx.DiGraph()
        for node in self.nodes:
            graph.add_node(node.id, **_attributes(node))
        graph.add_edges_from((a.id, b.id) for a, b in self.edges)
        return graph

    def to_dot(self) -> str:
        """Graphviz source."""
        lines = ["digraph marid {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
        for node in self.nodes:
            a = _attributes(node)
            text = "\\n".join(str(part) for part in (a["operation"], a["shape"], a["module_path"] or "") if part != "")
            style = "" if node.node in self._recorded.arguments else ", style=dashed"
            lines.append(f'  n{node.id} [label="{_escape(text)}"{style}];')
        lines += [f"  n{a.id} -> n{b.id};" for a, b in self.edges]
        return "\n".join([*lines, "}"])


def _attributes(node: GraphNode) -> dict[str, Any]:
    spec, known = node.spec, node.metadata
    return {
        "operation": node.operation,
        "shape": list(spec.shape) if spec is not None else None,
        "dtype": str(spec.dtype) if spec is not None else None,
        "module_path": known.module_path,
        "phase": known.execution_phase,
        "role": known.role,
        "pattern": known.pattern,
        "source": known.source,
    }


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\\\\n", "\\n")
