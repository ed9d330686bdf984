"""Programs that were built before, found again by their whole structure."""

from __future__ import annotations

from collections import OrderedDict

from marid.execute.flat import FlatProgram
from marid.graph.prepared import Prepared
from marid.graph.program import Task
from marid.optimize.forecast import forecast
from marid.report import hooks
from marid.report.builds import builds
from marid.report.stats import counters
from marid.semantics.scopes import current_site
from marid.settings import settings

__all__ = ["ProgramCache"]


class ProgramCache:
    """Least-recently-used map from a program's key to the program; equality of keys is full, never by digest.

    Not thread-safe: the engine calls it under its lock.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[object, ...], FlatProgram] = OrderedDict()
        self._instructions = 0

    def find(self, task: Task | Prepared) -> FlatProgram:
        """The program of ``task``, made ready now if it is new."""
        found = self._programs.get(task.key)
        if found is not None:
            self._programs.move_to_end(task.key)
            counters.programs_reused += 1
            return found
        if isinstance(task, Prepared):
            built = FlatProgram(task.program, task.transient_bytes)
        else:
            built = FlatProgram(task.build(), forecast(task).nbytes)
        counters.programs_built += 1
        builds.note(task, built.program, current_site())
        self._programs[task.key] = built
        self._instructions += len(built.program.instructions)
        while len(self._programs) > 1 and (
            len(self._programs) > settings.cache_programs or self._instructions > settings.cache_instructions
        ):
            _, oldest = self._programs.popitem(last=False)
            self._instructions -= len(oldest.program.instructions)
        if hooks.built.listeners:
            hooks.tell_built(built.program, current_site())
        return built

    def __len__(self) -> int:
        return len(self._programs)

    def clear(self) -> None:
        self._programs.clear()
        self._instructions = 0
