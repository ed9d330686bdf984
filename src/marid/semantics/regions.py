"""A graph as a tree: phases, in them module calls, in these more module calls and what patterns have found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Region:
    """Nodes that belong together.

    ``kind`` is "graph", "phase", "module" or "pattern"; ``name`` the phase, the module's path or the pattern, ``type``
    the module's class or a variant of the pattern ("grouped"). ``nodes`` are the ids of all nodes in it, also of those
    in ``children``, in program order; a pattern's may lie in modules beside it. Calls of one module with nothing
    between them are one region.
    """

    kind: str
    name: str
    type: str | None = None
    nodes: list[int] = field(default_factory=list)
    children: list[Region] = field(default_factory=list)

    def walk(self) -> Iterator[Region]:
        """This region and all that are in it, the outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, kind: str, name: str | None = None) -> list[Region]:
        """The regions of a kind in this one, of one name where it is given."""
        return [one for one in self.walk() if one.kind == kind and name in (None, one.name)]

    def __repr__(self) -> str:
        what = f"{self.kind} {self.name!r}" + (f" ({self.type})" if self.type else "")
        return f"<{what}: {len(self.nodes)} nodes, {len(self.children)} regions>"


Place = tuple[int, str, Sequence[tuple[str, str]]]
"""A node's id, its phase, and the modules that it is in: paths and types."""
Found = tuple[str, str | None, Sequence[int]]
"""A pattern that was found: its name, its variant and the ids of its nodes."""


def regions_of(places: Sequence[Place], patterns: Sequence[Found]) -> Region:
    """The tree of nodes in program order, and of patterns that were found among them."""
    root = Region("graph", "")
    open_ = [root]
    chains: dict[int, list[Region]] = {}
    for node, phase, modules in places:
        wanted = [("phase", phase, None), *(("module", path, kind) for path, kind in modules)]
        depth = 0
        while depth < len(wanted) and depth + 1 < len(open_):
            at = open_[depth + 1]
            if (at.kind, at.name, at.type) != wanted[depth]:
                break
            depth += 1
        del open_[depth + 1 :]
        for kind, name, of in wanted[depth:]:
            open_[-1].children.append(Region(kind, name, of))
            open_.append(open_[-1].children[-1])
        for region in open_:
            region.nodes.append(node)
        chains[node] = list(open_)
    for name, variant, nodes in patterns:
        shared = chains[nodes[0]]
        for node in nodes[1:]:
            theirs = chains[node]
            shared = [a for a, b in zip(shared, theirs, strict=False) if a is b]
        shared[-1].children.append(Region("pattern", name, variant, list(nodes)))
    for region in root.walk():
        region.children.sort(key=lambda child: child.nodes[0])
    return root
