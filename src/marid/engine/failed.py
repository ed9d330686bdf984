"""What becomes of a task whose run did not come to its end, and the error that says so."""

from __future__ import annotations

import functools

from marid.errors import MaterializationError
from marid.execute.interrupted import Interrupted
from marid.graph.node import Node, finish
from marid.graph.prepared import GUARD, GuardFailed
from marid.graph.program import Task
from marid.report.stats import counters
from marid.semantics.scopes import current_site


def salvage(task: Task, stop: Interrupted) -> None:
    """Keep what ran before a failure, so that nothing runs twice and nothing is lost."""
    for value, slot in task.slots.items():
        if value.concrete is None and slot in stop.tensors:
            value.concrete = stop.tensors[slot]
    ran = range(stop.index) if stop.ran is None else stop.ran
    for index, node in enumerate(task.nodes):
        mutates = node.op is not None and node.op.mutates
        if index in ran or (index == stop.index and stop.finished and mutates):
            finish(node)
    counters.ops_executed += len(ran)


@functools.cache
def _error_class(kind: type[Exception]) -> type[MaterializationError]:
    """A ``MaterializationError`` that is also the error the operation raised, for whoever catches that."""
    if issubclass(MaterializationError, kind):
        return MaterializationError
    # Made from a text and shown as one, whatever the other class wants to be made from.
    names = {
        "__module__": MaterializationError.__module__,
        "__init__": MaterializationError.__init__,
        "__str__": MaterializationError.__str__,
    }
    try:
        made: type[MaterializationError] = type("MaterializationError", (MaterializationError, kind), names)
        made("")
    except TypeError:  # the two do not combine, or it insists
        return MaterializationError
    return made


def explain(node: Node, error: Exception) -> MaterializationError | GuardFailed:
    """The error of an operation that raised ``error`` when it ran: also of that type, naming both lines. A guard's is
    ``GuardFailed``."""
    if node.op is not None and node.op.name == GUARD:
        return GuardFailed(node)
    written = f"written at {node.site}" if node.site is not None else "written at an unknown line"
    where = f" in module {node.scope.module_path!r}" if node.scope is not None and node.scope.module_path else ""
    return _error_class(type(error))(
        f"{node.op.name if node.op else 'an operation'} failed when it ran: {error}\n"
        f"  {written}{where}\n"
        f"  read at {current_site()}"
    )
