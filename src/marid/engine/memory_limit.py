"""Fitting work into the memory that there is, or refusing it before any of it has run."""

from __future__ import annotations

from collections.abc import Callable

from marid.errors import MemoryLimitError
from marid.execute.executable import Executable
from marid.execute.fitted import fitted
from marid.execute.specialisation import Runnable
from marid.graph.analysis import Forecast, forecast
from marid.graph.node import Node
from marid.graph.program import Program, Task
from marid.report.units import bytes_text
from marid.semantics.scopes import current_site
from marid.settings import settings

_LARGEST = 5  # results named when memory does not suffice


def within(
    room: int,
    task: Task,
    executable: Executable,
    make_room: Callable[[int], int] = lambda nbytes: 0,  # noqa: ARG005
) -> Runnable:
    """How to run ``task`` so that its results take no more than ``room`` bytes at once. Where no way is found,
    ``make_room`` is asked for so many bytes more, and says how many there are. Raises ``MemoryLimitError`` where that
    does not help. To be called below all dispatch."""
    expected = forecast(executable.program, task.specs)
    found = fitted(executable, task, room, expected.nbytes)
    if found is None and (gained := make_room(expected.nbytes - room)):
        room += gained
        found = fitted(executable, task, room, expected.nbytes)
    if found is None:
        advice = "" if settings.spill_limit else " (marid.settings.spill_limit lets idle memory wait in a file)"
        raise _refusal(room, task, executable.program, expected, advice)
    return found


def refuse_beyond(room: int, task: Task, program: Program) -> None:
    """Raise ``MemoryLimitError`` if the results of ``task``, a run of ``program`` as it is, would take more than
    ``room`` bytes at once."""
    expected = forecast(program, task.specs)
    if expected.nbytes > room:
        raise _refusal(room, task, program, expected)


def _refusal(room: int, task: Task, program: Program, expected: Forecast, advice: str = "") -> MemoryLimitError:
    largest = [
        f"    {bytes_text(nbytes)}  {program.instructions[index].op.name} {_written(task.nodes[index])}"
        for nbytes, index, _ in expected.held[:_LARGEST]
    ]
    return MemoryLimitError(
        f"running {len(task.nodes)} recorded operation(s) would take {bytes_text(expected.nbytes)} at once, and "
        f"marid.settings.memory_limit leaves {bytes_text(max(room, 0))}; nothing was run{advice}\n"
        f"  read at {current_site()}\n"
        "  the largest results at the fullest moment:\n" + "\n".join(largest)
    )


def _written(node: Node) -> str:
    path = None if node.scope is None else node.scope.module_path
    return f"written at {node.site}" + (f" in module {path!r}" if path else "")
