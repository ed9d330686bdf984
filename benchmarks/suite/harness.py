"""Runs workloads: contestants in processes of their own take turns, and what they return is checked before any time
counts.

A *round* is one turn of each contestant, a few calls long. The order changes from round to round, so that nobody
always follows the same neighbour, and ratios are formed within rounds, so that a machine whose speed drifts does not
decide.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite.checks import Wrong, compare_arrays, compare_sequences
from benchmarks.suite.process import Contestant, Failure, cold_caches, environment
from benchmarks.suite.results import Row
from benchmarks.suite.workloads import Workload

__all__ = ["Plan", "run"]


@dataclass(frozen=True)
class Plan:
    """How to run: ``rounds`` in place of a workload's own, whom to leave out and why, and whom to tell what happens."""

    rounds: int = 0
    threads: int = 0
    timeout: float = 900.0
    left_out: Callable[[str], str | None] = lambda _peer: None
    say: Callable[[str], None] = lambda _text: None


@dataclass
class _Seen:
    """What one peer has shown so far."""

    row: Row
    outputs: list[Any] = field(default_factory=list)
    array: np.ndarray | None = None
    process: Contestant | None = None


def run(workload: Workload, plan: Plan) -> list[Row]:
    """The rows of one workload, the reference's first."""
    kinds = {"steady": _steady, "start": _start, "passes": _passes, "memory": _memory}
    rows = kinds[workload.kind](workload, plan)
    for row in rows:
        references = [r for r in rows if r.peer == workload.reference and r.metric == row.metric]
        row.summarise(references[0] if references else None)
    return rows


def _row(workload: Workload, peer: str, metric: str = "", unit: str = "") -> Row:
    return Row(workload.name, metric, unit or workload.unit, workload.scale, peer)


def _take_turn(seen: _Seen, workload: Workload, plan: Plan, round_: int) -> None:
    """One turn of one contestant."""
    assert seen.process is not None
    seconds, outputs = seen.process.run(workload.calls)
    seen.row.samples.append(seconds)
    seen.outputs += outputs
    plan.say(f"{workload.name}: {seen.row.peer}, round {round_ + 1}")


@contextlib.contextmanager
def _refusing(row: Row) -> Iterator[None]:
    """What fails inside is noted in the row, and its times are dropped."""
    try:
        yield
    except Failure as error:
        row.refuse("missing" if error.missing else "failed", str(error))
    except Wrong as error:
        row.refuse("wrong", str(error))


def _enter(workload: Workload, plan: Plan) -> list[_Seen]:
    """Those who take part, the reference first."""
    peers = sorted(workload.peers, key=lambda peer: peer != workload.reference)
    entered = [_Seen(_row(workload, peer)) for peer in peers]
    for seen in entered:
        reason = plan.left_out(seen.row.peer)
        if reason is not None and seen.row.peer != workload.reference:
            seen.row.refuse("left out", reason)
    return entered


# --- contestants that take turns -------------------------------------------------------------------------------------


def _steady(workload: Workload, plan: Plan) -> list[Row]:
    everybody = _enter(workload, plan)
    with contextlib.ExitStack() as stack:
        for seen in everybody:
            if seen.row.status == "ok":
                with _refusing(seen.row):
                    plan.say(f"{workload.name}: {seen.row.peer} starts")
                    seen.process = stack.enter_context(_contestant(workload, seen.row.peer, plan))
                    _warm_up(seen, workload)
        for round_ in range(plan.rounds or workload.rounds):
            running = [seen for seen in everybody if seen.row.status == "ok"]
            turn = round_ % max(1, len(running))
            for seen in running[turn:] + running[:turn]:
                with _refusing(seen.row):
                    _take_turn(seen, workload, plan, round_)
        for seen in everybody:
            if seen.row.status == "ok":
                with _refusing(seen.row):
                    _last_look(seen)
    _check(everybody, workload)
    return [seen.row for seen in everybody]


def _contestant(workload: Workload, peer: str, plan: Plan, cache: Path | None = None) -> Contestant:
    return Contestant(workload, peer, environment(plan.threads, cache), plan.threads, plan.timeout)


def _warm_up(seen: _Seen, workload: Workload) -> None:
    assert seen.process is not None
    built = seen.process.build()
    seconds, outputs = seen.process.run(1)
    seen.row.first = built + seconds[0]
    seen.outputs += outputs
    if workload.warmup > 1:
        seen.outputs += seen.process.run(workload.warmup - 1)[1]
    seen.process.settle()
    seen.outputs += seen.process.run(workload.warmup)[1]  # what was compiled meanwhile is tried before it is used


def _last_look(seen: _Seen) -> None:
    """The output of the last call, where outputs are arrays, and what the process has to say."""
    assert seen.process is not None
    if seen.outputs and seen.outputs[-1] is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.npy"
            seen.process.save_output(path)
            seen.array = np.load(path, allow_pickle=False)
    _note_end(seen)


def _note_end(seen: _Seen) -> dict[str, Any]:
    assert seen.process is not None
    end = seen.process.finish()
    seen.row.facts.update(end["facts"])
    seen.row.peak_bytes = end["resident_peak"]
    return end


def _check(everybody: list[_Seen], workload: Workload) -> None:
    """Refuse every row whose outputs are not the reference's; without a reference, every row."""
    reference = everybody[0]
    for seen in everybody:
        row = seen.row
        if row.status != "ok" or row.peer in workload.unchecked:
            continue
        with _refusing(row):
            if reference.row.status != "ok":
                raise Failure(f"nothing to compare with: {reference.row.peer} {reference.row.status}")
            if seen.array is not None and reference.array is not None:
                row.agreement = compare_arrays(seen.array, reference.array, workload.tolerance)
            else:
                row.agreement = compare_sequences(seen.outputs, reference.outputs, workload.tolerance)
            if row.facts.get("flat") and row.agreement != "bitwise":
                raise Wrong(f"the flat tier has to agree bit for bit with eager PyTorch, and agrees {row.agreement}")


# --- fresh processes -------------------------------------------------------------------------------------------------


def _start(workload: Workload, plan: Plan) -> list[Row]:
    """Time from the start of a process until it has done a number of steps, with empty caches and again with what the
    first process left there."""
    rows: list[Row] = []
    entered = _enter(workload, plan)
    expected: list[Any] = []
    found: dict[tuple[str, str], _Seen] = {}
    for round_ in range(plan.rounds or workload.rounds):
        for entry in entered:
            peer = entry.row.peer
            with tempfile.TemporaryDirectory() as folder:
                cache = cold_caches(Path(folder))
                for state in ("cold", "warm"):
                    if state == "warm" and peer == workload.reference:
                        continue  # it keeps nothing between processes
                    seen = found.setdefault((peer, state), _Seen(_row(workload, f"{peer}, {state} cache")))
                    if entry.row.status != "ok":
                        seen.row.refuse(entry.row.status, entry.row.message)
                    if seen.row.status != "ok":
                        continue
                    plan.say(f"{workload.name}: {peer}, {state} cache, round {round_ + 1}")
                    seen.outputs = []
                    with _refusing(seen.row), _contestant(workload, peer, plan, cache) as seen.process:
                        moments, steps = _moments(seen, workload)
                        seen.row.samples.append([*moments, statistics.median(steps), max(steps[1:])])
                        _note_end(seen)
                        if not expected:
                            expected = seen.outputs
                        seen.row.agreement = compare_sequences(seen.outputs, expected, workload.tolerance)
    for (peer, _), seen in found.items():
        metrics = [f"to step {step}" for step in workload.steps]
        for index, metric in enumerate([*metrics, "median step", "slowest step but the first"]):
            row = Row(**{**seen.row.__dict__, "metric": metric})
            row.peer = peer if peer == workload.reference else seen.row.peer
            row.samples = [[moments[index]] for moments in seen.row.samples]
            rows.append(row)
            if row.status != "ok":
                row.metric = ""
                break
    return rows


def _moments(seen: _Seen, workload: Workload) -> tuple[list[float], list[float]]:
    """Seconds since the process was started at each of the workload's steps, and those of each step."""
    assert seen.process is not None
    seen.process.build()
    moments: list[float] = []
    steps: list[float] = []
    for step in workload.steps:
        seconds, outputs = seen.process.run(step - len(steps))
        moments.append(time.perf_counter() - seen.process.born)
        steps += seconds
        seen.outputs += outputs
    return moments, steps


def _passes(workload: Workload, plan: Plan) -> list[Row]:
    """All calls of a fresh process together, compiling included, and the last of them."""

    def measured(_end: dict[str, Any], seconds: list[float]) -> dict[str, float]:
        return {"all passes": sum(seconds), "last pass": seconds[-1]}

    return _fresh(workload, plan, ("all passes", "last pass"), measured)


def _memory(workload: Workload, plan: Plan) -> list[Row]:
    """The largest resident memory of a fresh process: all of it, and what came after the framework was imported. And
    what tensors take at once: measured for PyTorch, for Marid what it holds between steps together with its plan, or
    the most that it held and ran with, where nothing came to be planned."""
    metrics = "peak of the process", "above the imports", "tensors alive at once"

    def measured(end: dict[str, Any], _seconds: list[float]) -> dict[str, float]:
        peak, facts = end["resident_peak"], end["facts"]
        live = facts.get("live_peak", 0)
        if "marid" in facts:
            held, planned = facts["marid"]["memory_allocated"], facts["marid"]["planned_peak"]
            live = held + planned if planned else facts["marid"]["peak_memory"]
        return dict(zip(metrics, (peak, peak - end["resident_before"], live), strict=True))

    return _fresh(workload, plan, metrics, measured)


def _fresh(
    workload: Workload,
    plan: Plan,
    metrics: tuple[str, ...],
    measured: Callable[[dict[str, Any], list[float]], dict[str, float]],
) -> list[Row]:
    entered = _enter(workload, plan)
    figures: dict[str, list[dict[str, float]]] = {seen.row.peer: [] for seen in entered}
    for round_ in range(plan.rounds or workload.rounds):
        for seen in entered:
            if seen.row.status != "ok":
                continue
            plan.say(f"{workload.name}: {seen.row.peer}, round {round_ + 1}")
            with tempfile.TemporaryDirectory() as folder, _refusing(seen.row):
                cache = cold_caches(Path(folder))
                with _contestant(workload, seen.row.peer, plan, cache) as seen.process:
                    built = seen.process.build()
                    seconds, seen.outputs = seen.process.run(workload.calls)
                    seen.row.first = built + seconds[0]
                    figures[seen.row.peer].append(measured(_note_end(seen), seconds))
            if seen.row.status == "ok":
                _check([entered[0], seen] if seen is not entered[0] else [seen], workload)
    rows = []
    for seen in entered:
        for metric in metrics:
            row = Row(**{**seen.row.__dict__, "metric": metric})
            if row.status == "ok":
                row.samples = [[figure[metric]] for figure in figures[row.peer]]
            rows.append(row)
            if row.status != "ok":
                row.metric = ""
                break
    return rows
