"""What graphs of this process mean: the analyzer, told what modules and optimizers hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from marid.frontend import handles
from marid.graph.computation import Meaning, Recorded
from marid.graph.node import Value, root_of
from marid.semantics.analyzer import Analysis
from marid.semantics.scopes import met_optimizers, outermost


def understand(recorded: Recorded) -> Meaning:
    """The analysis of what was recorded."""
    return Analysis(recorded, known_roles)


def known_roles() -> dict[Value, str]:
    """The roles of tensors that modules which were called, and optimizers that made a step, hold now, by the value
    whose operation made their memory."""
    found: dict[Value, str] = {}
    for role, tensor in _held():
        if handles.is_lazy(tensor):
            found.setdefault(root_of(tensor._value), role)  # pyright: ignore[reportAttributeAccessIssue]
    return found


def _held() -> Iterator[tuple[str, Any]]:
    for optimizer in met_optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield "parameter", parameter
                yield "gradient", parameter.grad
        for state in optimizer.state.values():
            yield from (("optimizer state", value) for value in state.values()) if isinstance(state, dict) else ()
    for module in list(outermost):
        for parameter in module.parameters():
            yield "parameter", parameter
            yield "gradient", parameter.grad
        for buffer in module.buffers():
            yield "buffer", buffer
