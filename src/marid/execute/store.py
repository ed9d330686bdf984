"""Programs that were built before, found again by their whole structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from marid.graph.node import Spec
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task
from marid.report import hooks
from marid.report.builds import builds
from marid.report.stats import counters
from marid.semantics.scopes import current_site
from marid.settings import settings

T = TypeVar("T")


class ProgramStore(Generic[T]):
    """Least-recently-used map from a program's key to what ``make`` makes of the program and of the specs that it first
    came with; equality of keys is full, never by digest.

    Bounded by ``settings.cache_programs`` and ``settings.cache_instructions``. Engines and workers make executables of
    programs, clients what they send. Not thread-safe: an engine calls it under its lock.
    """

    def __init__(self, make: Callable[[Program, tuple[Spec | None, ...]], T]) -> None:
        self._make = make
        self._stored: OrderedDict[tuple[object, ...], tuple[T, int]] = OrderedDict()
        self._instructions = 0

    def find(self, task: Task | Prepared) -> T:
        """What is kept for the program of ``task``, made now if it is new."""
        found = self._stored.get(task.key)
        if found is not None:
            self._stored.move_to_end(task.key)
            counters.programs_reused += 1
            return found[0]
        program = task.program if isinstance(task, Prepared) else task.build()
        made, count = self._make(program, task.specs), len(program.instructions)
        counters.programs_built += 1
        builds.note(task, program, current_site())
        self._stored[task.key] = made, count
        self._instructions += count
        while len(self._stored) > 1 and (
            len(self._stored) > settings.cache_programs or self._instructions > settings.cache_instructions
        ):
            _, (_, count) = self._stored.popitem(last=False)
            self._instructions -= count
        if hooks.built.listeners:
            hooks.tell_built(program, current_site())
        return made

    def values(self) -> list[T]:
        """All that is kept, the least recently used first."""
        return [made for made, _ in self._stored.values()]

    def __len__(self) -> int:
        return len(self._stored)

    def clear(self) -> None:
        """Forget all programs."""
        self._stored.clear()
        self._instructions = 0
