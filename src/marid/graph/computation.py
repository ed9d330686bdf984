"""The graph users look at: a snapshot of recorded operations and how values flow between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marid.graph.fx import Read, to_fx
from marid.graph.node import Node, Value, input_values

if TYPE_CHECKING:
    import networkx
    import torch

__all__ = ["ComputationGraph"]


class ComputationGraph:
    """Recorded nodes, in program order.

    ``nodes`` are ``Node`` objects (``op.name``, ``spec``, ``scope``, ``site``); ``edges`` are pairs of nodes, from the
    one that makes a value or writes its memory to the one that needs it. Values that have run already appear as source
    nodes (``node.op`` may be None for them).
    """

    def __init__(self, nodes: list[Node], asked: list[Value], read: Read) -> None:
        self.asked = asked
        self._read = read
        self.replace(nodes)

    def replace(self, nodes: list[Node]) -> None:
        """Show ``nodes`` (pending, in program order) and the sources they read. Takes a snapshot of the arguments."""
        self._arguments = {node: (node.args, node.kwargs) for node in nodes}
        sources: dict[Node, None] = {}
        edges: dict[tuple[Node, Node], None] = {}
        for node in nodes:
            for value in input_values(node):
                if value.node not in self._arguments:
                    sources[value.node] = None
                edges[value.node, node] = None
            for write in node.after or ():
                if write in self._arguments:
                    edges[write, node] = None
        self.sources = sorted(sources, key=lambda n: n.seq)
        self.operations = list(nodes)
        self.edges: list[tuple[Node, Node]] = list(edges)

    @property
    def nodes(self) -> list[Node]:
        return [*self.sources, *self.operations]

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"ComputationGraph({len(self.operations)} operations, {len(self.sources)} sources)"

    def get_execution_order(self) -> list[Node]:
        """All nodes so that each comes after everything it needs."""
        return self.nodes

    def arguments_of(self, node: Node) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """The arguments of an operation, values in place of tensors, also after it ran."""
        args, kwargs = self._arguments[node]
        return args or (), kwargs or ()

    def to_fx(self) -> torch.fx.GraphModule:
        """An FX ``GraphModule`` that takes the values of ``sources`` and returns the asked values (or all unread ones).

        ``graph_module.inputs()`` gives the concrete sources, so that ``gm(*gm.inputs())`` runs it.
        """
        return to_fx([(node, *self.arguments_of(node)) for node in self.operations], self.asked, self._read)

    def to_networkx(self) -> networkx.DiGraph:
        """A ``networkx.DiGraph``: node keys are sequence numbers; attributes name operation, shape, dtype, module,
        phase and source line."""
        import networkx

        graph = networkx.DiGraph()
        for node in self.nodes:
            graph.add_node(node.seq, **_attributes(node))
        graph.add_edges_from((a.seq, b.seq) for a, b in self.edges)
        return graph

    def to_dot(self) -> str:
        """Graphviz source."""
        lines = ["digraph marid {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
        for node in self.nodes:
            a = _attributes(node)
            text = "\\n".join(str(part) for part in (a["operation"], a["shape"], a["module_path"] or "") if part != "")
            style = "" if node in self._arguments else ", style=dashed"
            lines.append(f'  n{node.seq} [label="{_escape(text)}"{style}];')
        lines += [f"  n{a.seq} -> n{b.seq};" for a, b in self.edges]
        return "\n".join([*lines, "}"])


def _attributes(node: Node) -> dict[str, Any]:
    spec = node.spec
    return {
        "operation": node.op.name if node.op is not None else "marid::source",
        "shape": list(spec.shape) if spec is not None else None,
        "dtype": str(spec.dtype) if spec is not None else None,
        "module_path": node.scope.module_path if node.scope is not None else None,
        "phase": node.scope.phase if node.scope is not None else None,
        "source": str(node.site) if node.site is not None else None,
    }


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\\\\n", "\\n")
