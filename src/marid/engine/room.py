"""Refusing work that would take more memory than there is, before any of it has run."""

from __future__ import annotations

from marid.errors import MemoryLimitError
from marid.graph.analysis import forecast
from marid.graph.program import Program, Task
from marid.report.units import bytes_text
from marid.semantics.scopes import current_site

__all__ = ["refuse_beyond"]

_LARGEST = 5  # results named when memory does not suffice


def refuse_beyond(room: int, task: Task, program: Program) -> None:
    """Raise ``MemoryLimitError`` if the results of ``task``, a run of ``program``, would take more than ``room`` bytes
    at once."""
    expected = forecast(program, task.specs)
    if expected.nbytes <= room:
        return
    largest = [
        f"    {bytes_text(nbytes)}  {program.instructions[index].op.name} written at {task.nodes[index].site}"
        for nbytes, index, _ in expected.held[:_LARGEST]
    ]
    raise MemoryLimitError(
        f"running {len(task.nodes)} recorded operation(s) would take {bytes_text(expected.nbytes)} at once, and "
        f"marid.settings.memory_limit leaves {bytes_text(max(room, 0))}; nothing was run\n"
        f"  read at {current_site()}\n"
        "  the largest results at the fullest moment:\n" + "\n".join(largest)
    )
