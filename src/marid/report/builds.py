"""What is remembered of the programs that were built, to say later why one was built again.

Kept small: a program's instructions are those that the cache holds too; the lines come on top, a reference each. What
differs between two programs is worked out when somebody asks (``differences.py``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from marid.graph.node import Node, Spec
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task
from marid.graph.program_nodes import nodes_of_program
from marid.semantics.scopes import Scope, Site

_PROGRAMS = 256
_INSTRUCTIONS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """One program that was built: ``number`` counts them, ``site`` is the line that made it run, ``sites`` and
    ``scopes`` are the lines of its instructions and the modules that they were in, ``specs`` its tensors by slot and
    ``params`` the numbers of its first run."""

    number: int
    program: Program
    site: Site | None
    sites: tuple[Site | None, ...]
    scopes: tuple[Scope | None, ...] = ()
    specs: tuple[Spec | None, ...] = ()
    params: tuple[Any, ...] = ()

    def nodes(self) -> list[Node]:
        """Its instructions as nodes, to be looked at."""
        return nodes_of_program(self.program, self.specs, self.params, self.sites, self.scopes)[0]


class Builds:
    """The newest programs that were built, bounded by their number and by their instructions."""

    def __init__(self) -> None:
        self._kept: deque[Build] = deque()
        self._instructions = 0
        self._count = 0
        self._since = 0

    def note(self, task: Task | Prepared, program: Program, site: Site | None) -> None:
        """``program`` was built for ``task``, which ran because of ``site``."""
        # Lines and scopes only: who held a node would make its value count as a result that is used.
        sites, scopes = tuple([node.site for node in task.nodes]), tuple([node.scope for node in task.nodes])
        params = tuple(task.params) if isinstance(task, Task) else ()
        self._kept.append(Build(self._count, program, site, sites, scopes, task.specs, params))
        self._count += 1
        self._instructions += len(program.instructions)
        while len(self._kept) > 1 and (len(self._kept) > _PROGRAMS or self._instructions > _INSTRUCTIONS):
            self._instructions -= len(self._kept.popleft().program.instructions)

    def kept(self) -> list[Build]:
        """Oldest first."""
        return list(self._kept)

    def is_new(self, build: Build) -> bool:
        """Whether it was built after the last ``reset``."""
        return build.number >= self._since

    def reset(self) -> None:
        """What was built so far is only there to be compared with."""
        self._since = self._count


builds = Builds()
