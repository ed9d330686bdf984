"""The functions of ``marid`` that look at or act on recorded work."""

from __future__ import annotations

from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.device import memory_allocated, peak_memory
from marid.frontend.materialize import materialize as _materialize
from marid.frontend.materialize import pending_nodes
from marid.graph.computation import ComputationGraph
from marid.graph.node import Value
from marid.report.stats import Stats, counters, functions

__all__ = ["epoch", "graph", "materialize", "reset_stats", "stats"]


def materialize(*tensors: torch.Tensor) -> None:
    """Run what these tensors need, in one program for each device. Tensors of other devices are ignored."""
    _materialize([t for t in tensors if handles.is_lazy(t)], "materialize()")


def graph(*tensors: Any) -> ComputationGraph:
    """What must run for these tensors, or everything pending on all devices when none is given. Runs nothing.

    Raises ``TypeError`` for anything that is not a lazy tensor.
    """
    for tensor in tensors:
        if not handles.is_lazy(tensor):
            raise TypeError(f"marid.graph() takes lazy tensors, but got {type(tensor).__name__}")
    if not tensors:
        everything = [node for index in range(handles.device_count) for node in handles.tape(index).pending()]
        return ComputationGraph(everything)
    nodes = []
    for index in sorted({t._value.spec.device for t in tensors}):
        asked = [node for t in tensors if t._value.spec.device == index for node in pending_nodes(t)]
        nodes += handles.tape(index).cut(asked)
    values: list[Value] = [t._value for t in tensors]
    return ComputationGraph(nodes, values)


def epoch() -> int:
    """How many programs have run; grows by one with each."""
    return counters.epoch


def stats() -> Stats:
    """A snapshot of what was recorded, built, run and waited for; see ``Stats``."""
    tapes = [handles.tape(index) for index in range(handles.device_count)]
    measured = [tape.measure() for tape in tapes]
    return Stats(
        ops_captured=sum(tape.recorded for tape in tapes) - counters.ops_captured_before,
        ops_executed=counters.ops_executed,
        programs_built=counters.programs_built,
        programs_reused=counters.programs_reused,
        materializations=counters.materializations,
        automatic_cuts=counters.automatic_cuts,
        fallbacks=dict(counters.fallbacks),
        dynamic=dict(counters.dynamic),
        syncs=counters.syncs(),
        pending_nodes=sum(nodes for nodes, _ in measured),
        pending_bytes=sum(nbytes for _, nbytes in measured),
        memory_allocated=sum(memory_allocated(index) for index in range(handles.device_count)),
        peak_memory=peak_memory(),
        planned_peak=counters.planned_peak,
        planned_lower_bound=counters.planned_lower_bound,
        unplanned_bytes=counters.unplanned_bytes,
        functions=sorted((one.copy() for one in list(functions) if one.calls), key=lambda one: one.name),
        epoch=counters.epoch,
    )


def reset_stats() -> None:
    """Start counting again from zero; the epoch goes on."""
    counters.reset(sum(handles.tape(index).recorded for index in range(handles.device_count)))
