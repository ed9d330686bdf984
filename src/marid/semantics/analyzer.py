"""The analyzer: what a recorded graph means, worked out when somebody asks, part by part, and never while recording.

Parts and what each builds on: the scope of each node (``ownership``), the canonical graph (``canonical``), the patterns
in it (``patterns``), roles (``roles``), phases (``phases``), costs (``costs``), and with all of them the metadata of
nodes and the tree of regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from marid.graph.computation import GraphNode, Recorded, spec_of
from marid.graph.node import Node, Value
from marid.semantics.metadata import SemanticMetadata, metadata_of
from marid.semantics.scopes import FORWARD, Scope

if TYPE_CHECKING:
    from marid.semantics.costs import Cost
    from marid.semantics.patterns import Match
    from marid.semantics.regions import Region

Enricher = Callable[[GraphNode, SemanticMetadata], Mapping[str, Any] | None]
_FIELDS = ("role", "pattern", "execution_phase")
_enrichers: dict[str, Enricher] = {}


def register_enricher(function: Enricher) -> Enricher:
    """Add knowledge of yours: ``function(node, metadata)`` is called once for each node of a graph whose metadata is
    asked for, and returns None or a mapping. Its keys ``role``, ``pattern`` and ``execution_phase`` replace these
    fields; all others go into ``workload_hints``. Hints: no value depends on them. Also a decorator.

    Raises ``ValueError`` when another function of that name is registered.
    """
    name = function.__name__
    if _enrichers.get(name, function) is not function:
        raise ValueError(f"an enricher named {name!r} is registered already; unregister_enricher({name!r}) first")
    _enrichers[name] = function
    return function


def unregister_enricher(name: str) -> None:
    """Take an enricher out again. Raises ``KeyError`` when there is none of that name."""
    del _enrichers[name]


class Analysis:
    """What one graph means. ``known`` gives roles of values that are held by modules and optimizers."""

    def __init__(self, recorded: Recorded, known: Callable[[], Mapping[Value, str]] = dict) -> None:
        self._recorded = recorded
        self._known = known
        self._metadata: dict[Node, SemanticMetadata] = {}

    @cached_property
    def scopes(self) -> dict[Node, Scope]:
        """The scope of each operation: for a backward, that of what it is the backward of."""
        from marid.semantics.ownership import scopes_of

        return scopes_of(self._recorded)

    @cached_property
    def matches(self) -> list[Match]:
        """The patterns that were found, in program order."""
        from marid.semantics.finding import matches_of

        return matches_of(self._recorded, self._roles_known)

    @cached_property
    def _roles_known(self) -> Mapping[Value, str]:
        return self._known()

    @cached_property
    def _pattern_of(self) -> dict[Node, Match]:
        """The narrowest pattern that each node is a part of."""
        found: dict[Node, Match] = {}
        for match in sorted(self.matches, key=lambda match: -len(match.nodes)):
            found.update(dict.fromkeys(match.nodes, match))
        return found

    @cached_property
    def phases(self) -> dict[Node, str]:
        """The phase of each operation: "prefill" or "decode" where attention reads a cache, else as recorded."""
        from marid.semantics.phases import phases_of

        return phases_of(self._recorded, self.scopes, self.matches, self.mode)

    @cached_property
    def mode(self) -> str:
        """Whether this trains: "training" or "evaluation"."""
        from marid.semantics.phases import mode_of

        return mode_of(self._recorded)

    @cached_property
    def roles(self) -> dict[Node, str]:
        """What the result of each node, and each source, is for."""
        from marid.semantics.roles import roles_of

        return roles_of(self._recorded, self._roles_known, self.matches)

    def metadata(self, node: GraphNode) -> SemanticMetadata:
        """The one metadata object of a node."""
        found = self._metadata.get(node.node)
        if found is None:
            found = self._metadata[node.node] = self._made(node)
        return found

    def _made(self, shown: GraphNode) -> SemanticMetadata:
        from marid.semantics.costs import bytes_of, flops_of

        node = shown.node
        base = metadata_of(node, spec_of(node), self.scopes.get(node))
        match = self._pattern_of.get(node)
        fields: dict[str, Any] = {
            "role": base.role or self.roles.get(node),
            "pattern": match.name if match is not None else None,
            "execution_phase": self.phases.get(node, base.execution_phase),
            "flops": flops_of(self._recorded, node),
            "bytes": bytes_of(self._recorded, node),
        }
        hints = base.workload_hints
        if node in self._recorded.arguments:
            hints["mode"] = self.mode
        if match is not None and match.details:
            hints[match.name] = match.details
        made = SemanticMetadata(**{**vars(base), **fields})
        for enrich in list(_enrichers.values()):
            for key, value in (enrich(shown, made) or {}).items():
                if key in _FIELDS:
                    fields[key] = value
                else:
                    hints[key] = value
        return SemanticMetadata(**{**vars(base), **fields})

    @cached_property
    def regions(self) -> Region:
        """The tree of phases, module calls and patterns."""
        from marid.semantics.regions import regions_of

        places = []
        for node in self._recorded.operations:
            scope = self.scopes.get(node)
            calls = scope.calls() if scope is not None else []
            modules = [(call.module_path or "", call.module_type or "") for call in calls]
            places.append((node.seq, self.phases.get(node, FORWARD), modules))
        found = [(match.name, match.variant, [node.seq for node in match.nodes]) for match in self.matches]
        return regions_of(places, found)

    def costs(self, nodes: list[GraphNode], by: str, measured: Mapping[int, float]) -> dict[str, Cost]:
        """Costs of groups of nodes. Raises ``ValueError`` for a ``by`` that there is not."""
        from marid.semantics.costs import costs_by
        from marid.semantics.roofline import machine

        if by not in _GROUPS:
            raise ValueError(f"costs are by {', '.join(map(repr, _GROUPS))}, not by {by!r}")
        names = _GROUPS[by]
        operations = [node for node in nodes if node.node in self._recorded.arguments]
        rows = [(names(node), node.node, node.metadata.flops, node.metadata.bytes) for node in operations]
        return costs_by(rows, machine(), measured)


def _modules(node: GraphNode) -> list[str]:
    return list(dict.fromkeys(path for path, _ in node.metadata.modules)) or ["<none>"]


_GROUPS: dict[str, Callable[[GraphNode], list[str]]] = {
    "module": _modules,
    "phase": lambda node: [node.metadata.execution_phase or "<none>"],
    "pattern": lambda node: [node.metadata.pattern or "<none>"],
    "operation": lambda node: [node.operation],
    "node": lambda node: [str(node.id)],
}
