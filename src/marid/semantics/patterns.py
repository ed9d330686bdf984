"""Patterns: parts of graphs that mean something together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marid.graph.computation import Recorded
from marid.graph.node import Node
from marid.semantics.scopes import Scope

__all__ = ["Match", "matches_of"]


@dataclass(eq=False)
class Match:
    """A pattern that was found: its ``name``, a ``variant``, its ``nodes`` in program order, and ``details``."""

    name: str
    nodes: Sequence[Node]
    variant: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def matches_of(recorded: Recorded, scopes: Mapping[Node, Scope]) -> list[Match]:
    """All patterns of a graph."""
    return []
