"""The functions of ``marid`` that look at or act on recorded work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.device import memory_allocated, peak_memory
from marid.frontend.engines import all_engines, engine_of
from marid.frontend.materialize import forget_loops, holders, pending_nodes, read_value, wait_anyway
from marid.frontend.materialize import materialize as _materialize
from marid.frontend.meaning import understand
from marid.frontend.record import forget_calls
from marid.graph.computation import ComputationGraph
from marid.graph.node import Value, root_of
from marid.replay.function import forget_recordings
from marid.report import hooks
from marid.report.builds import builds
from marid.report.differences import recompiles
from marid.report.explain import Explanation, Resident, cuts_of, fallbacks_of
from marid.report.hooks import Built, Handle, Materialized, Ran, Recorded
from marid.report.operator_times import operator_times
from marid.report.stats import Stats, counters, functions
from marid.report.traffic import RemoteStats, traffic
from marid.semantics.analyzer import Analysis
from marid.semantics.marks import marks
from marid.semantics.scopes import text_of_site
from marid.semantics.tracebacks import folded


@folded
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
        return ComputationGraph(everything, [], read_value, understand)
    nodes = []
    for index in sorted({t._value.spec.device for t in tensors}):
        asked = [node for t in tensors if t._value.spec.device == index for node in pending_nodes(t)]
        nodes += handles.tape(index).cut(asked)
    values: list[Value] = [t._value for t in tensors]
    return ComputationGraph(nodes, values, read_value, understand)


def programs() -> list[ComputationGraph]:
    """The programs that were built since ``marid.reset_stats()``, as graphs, the oldest first: the newest ones, some
    20,000 operations in all. Nothing of them is held or runs; values have no names, so roles are told by use."""
    new = [build for build in builds.kept() if builds.is_new(build)]
    return [ComputationGraph(build.nodes(), [], read_value, Analysis) for build in new]


def epoch() -> int:
    """How many programs have run; grows by one with each."""
    return counters.epoch


def stats() -> Stats:
    """A snapshot of what was recorded, built, run and waited for; see ``Stats``."""
    wait_anyway()
    tapes = [handles.tape(index) for index in range(handles.device_count)]
    measured = [tape.measure() for tape in tapes]
    immediate = handles.ops_immediate() - counters.ops_immediate_before
    return Stats(
        ops_captured=sum(tape.recorded for tape in tapes) - counters.ops_captured_before + immediate,
        ops_executed=counters.ops_executed + immediate,
        ops_immediate=immediate,
        programs_built=counters.programs_built,
        programs_reused=counters.programs_reused,
        programs_fitted=counters.programs_fitted,
        spill_moved=counters.spill_moved,
        materializations=counters.materializations,
        automatic_cuts=counters.automatic_cuts,
        fallbacks=dict(counters.fallbacks),
        dynamic=dict(counters.dynamic),
        mispredictions=counters.mispredictions(),
        passes=dict(counters.passes),
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
        programs_compiling=sum(engine.compiling() for engine in all_engines()),
        programs_compiled=counters.programs_compiled,
        compiled_runs=counters.compiled_runs,
        parts_compiled=counters.parts_compiled,
        compile_cache_hits=counters.compile_cache_hits,
        compile_failures=counters.compile_failures,
        compile_mismatches=counters.compile_mismatches,
        compiled_dropped=counters.compiled_dropped,
        compile_workers=counters.compile_workers,
        compile_workers_lost=counters.compile_workers_lost,
        compile_damaged=counters.compile_damaged,
        compile_unstored=counters.compile_unstored,
        remote=_remote(),
        operators=operator_times.snapshot(),
    )


def _remote() -> RemoteStats | None:
    workers = {
        index: said for index in range(handles.device_count) if (said := engine_of(index).worker_stats()) is not None
    }
    return traffic.snapshot(workers) if workers or traffic.messages_up else None


@folded
def mark(tensor: torch.Tensor, *, role: str) -> torch.Tensor:
    """Say what a tensor is for ("weight", "gradient", "optimizer state", "activation", "kv cache", or a word of yours):
    a hint for where memory and traffic are accounted, and the ``role`` that graphs show; values never depend on it.
    Returns the tensor.

    Raises ``TypeError`` for anything that is not a lazy tensor.
    """
    if not handles.is_lazy(tensor):
        raise TypeError(f"marid.mark() takes a lazy tensor, but got {type(tensor).__name__}")
    value: Value = tensor._value
    marks[root_of(value)] = role
    if value.concrete is not None:
        engine_of(tensor._value.spec.device).mark(value.concrete, role)
    return tensor


def explain() -> Explanation:
    """Every wait, recompile, fallback and byte by the line that caused it; see ``Explanation``. Runs nothing."""
    wait_anyway()
    return Explanation(
        syncs=counters.syncs(),
        recompiles=recompiles(builds),
        fallbacks=fallbacks_of(counters),
        mispredictions=counters.mispredictions(),
        automatic_cuts=cuts_of(counters),
        resident=_resident(),
        programs_built=counters.programs_built,
        programs_reused=counters.programs_reused,
    )


def _resident() -> list[Resident]:
    """What holds memory, by the line that made it, largest first."""
    lines: dict[str, list[int]] = {}
    for nbytes, value in holders(range(handles.device_count)):
        site = root_of(value).node.site
        lines.setdefault(text_of_site(site), []).append(nbytes)
    found = [Resident(source, sum(blocks), len(blocks)) for source, blocks in lines.items()]
    return sorted(found, key=lambda one: -one.nbytes)


def reset_stats() -> None:
    """Start counting again from zero; the epoch goes on."""
    wait_anyway()
    builds.reset()
    traffic.reset()
    operator_times.reset()
    recorded = sum(handles.tape(index).recorded for index in range(handles.device_count))
    counters.reset(recorded, handles.ops_immediate())


def clear_caches() -> None:
    """Forget, in this process, the programs of all devices with what was planned and compiled of them, what is known of
    calls and loops, what ``marid.compile`` has recorded, and memory that is kept to be used again. Waits for what runs.

    Values, what is pending, and counters stay; what comes again is built again, once. Compiled code stays on disk
    (``marid cache clear``), and programs and weights on workers.
    """
    wait_anyway()
    forget_recordings()
    forget_calls()
    forget_loops()
    for engine in all_engines():
        engine.forget()


def on_record(listener: Callable[[Recorded], object]) -> Handle:
    """Call ``listener`` before each operation that is recorded (or runs at once, where it cannot be), with a
    ``Recorded``: operator, module, phase and line. Recording is several times slower meanwhile.

    What the listener raises reaches the line, and the operation is not recorded. The handle ends it: ``remove()``, or a
    ``with`` block. Raises ``TypeError`` for what cannot be called.
    """
    return hooks.recorded.add(listener)


def on_build(listener: Callable[[Built], object]) -> Handle:
    """Call ``listener`` after each program that is built, before it first runs, with a ``Built``: its operators, and
    the line that made it run. What it raises reaches that line; handle and errors as ``on_record``."""
    return hooks.built.add(listener)


def on_run(listener: Callable[[Ran], object]) -> Handle:
    """Call ``listener`` after each program that has run with a ``Ran``: its operators, when it was queued, began and
    ended, and where. For what ran on another thread or a worker that is when the user's thread next comes by; what it
    raises reaches the line there. Handle and errors as ``on_record``."""
    return hooks.ran.add(listener)


def on_materialize(listener: Callable[[Materialized], object]) -> Handle:
    """Call ``listener`` after each wait for a value with a ``Materialized``: why, where, and the seconds. What it
    raises reaches the line that reads; the value is there by then. Handle and errors as ``on_record``."""
    return hooks.materialized.add(listener)
