"""``marid.trace``: what happened when, as a file for Perfetto, ``chrome://tracing`` and TensorBoard's profiler."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from marid.frontend.materialize import wait_anyway
from marid.report import hooks
from marid.report.hooks import Compiled, Materialized, Ran
from marid.report.operator_times import operator_times
from marid.semantics.tracebacks import folded

_PROGRAMS = 50_000  # that are kept; older ones are dropped
_RECORDING, _QUEUE, _RUNNING, _COMPILING, _FIRST_WORKER = 1, 100, 200, 300, 400
_LANES = {_RECORDING: "recording", _QUEUE: "queue", _RUNNING: "running", _COMPILING: "compiling"}
"""Where the lanes of each begin: what overlaps lies in several, of ``_ROOM`` at most."""
_ROOM = 100

_Span = tuple[float, float, str, dict[str, Any]]


class Trace:
    """Collects between ``start()`` and ``stop()``, or within a ``with`` block, and then writes the file.

    A lane each: what the user's thread does (recording, and waiting for values), programs in the queue, programs and
    their operators as they run, parts that are being compiled, and each worker, for which a program reaches from when
    it was sent, or the one before it was done, to when its answer was seen. Operators carry module, phase and line. Of
    more than 50,000 programs the newest are kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._handles: ExitStack | None = None
        self._events: deque[tuple[float, Any]] = deque(maxlen=_PROGRAMS)
        self._began = self._ended = 0.0

    def start(self) -> Self:
        """Begin. Raises ``OSError`` where the file cannot be written, ``RuntimeError`` when it has begun."""
        if self._handles is not None:
            raise RuntimeError("this trace has begun already")
        wait_anyway()  # what came before is not of this trace
        self.path.write_text("")
        self._events.clear()
        self._handles = ExitStack()
        for hook in (hooks.ran, hooks.materialized, hooks.compiled):
            self._handles.enter_context(hook.add(self._take))
        operator_times.traced += 1
        operator_times.look()
        self._began = time.perf_counter()
        return self

    def stop(self) -> None:
        """End, and write the file. Raises ``OSError`` where that cannot be done, ``RuntimeError`` when it has not
        begun."""
        if self._handles is None:
            raise RuntimeError("this trace has not begun")
        try:
            wait_anyway()
        finally:
            self._ended = time.perf_counter()
            handles, self._handles = self._handles, None
            handles.close()
            operator_times.traced -= 1
            operator_times.look()
        events = list(self._converted())
        names = _LANES | {lane: name for name, lane in self._workers().items()}
        found = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "traceEvents": [*_named(names, {event["tid"] for event in events}), *events],
        }
        self.path.write_text(json.dumps(found, allow_nan=False))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take(self, event: Ran | Materialized | Compiled) -> None:
        self._events.append((time.perf_counter(), event))

    def _workers(self) -> dict[str, int]:
        """The lane of each worker."""
        seen = {event.lane for _, event in self._events if isinstance(event, Ran)} - {"user", "device"}
        return {name: _FIRST_WORKER + place for place, name in enumerate(sorted(seen))}

    def _converted(self) -> Iterator[dict[str, Any]]:
        workers = self._workers()
        busy: list[tuple[float, float]] = []  # what the user's thread did beside recording
        queued: list[_Span] = []
        compiling: list[_Span] = []
        for told, event in self._events:
            if isinstance(event, Compiled):
                arguments = {"operators": event.operators, "succeeded": event.succeeded}
                compiling.append((event.began, event.ended, f"compiling {event.operators} operators", arguments))
            elif isinstance(event, Materialized):
                arguments = {"source": event.source, "reason": event.reason}
                busy.append((told - event.seconds, told))
                yield self._slice(_RECORDING, f"wait: {event.reason}", "marid", *busy[-1], arguments)
            else:
                count = len(event.operators)
                name = f"program: {count:,} operator{'s' if count != 1 else ''}"
                arguments = {"operators": count, "compiled": event.compiled, "source": _text(event.places[-2])}
                if event.began > event.queued:
                    queued.append((event.queued, event.began, name, arguments))
                yield from self._ran(event, name, workers.get(event.lane, _RUNNING), arguments)
                if event.lane == "user":
                    busy.append((event.began, event.ended))
        yield from self._side_by_side(_QUEUE, queued)
        yield from self._side_by_side(_COMPILING, compiling)
        until = self._began
        for began, ended in sorted([*busy, (self._ended, self._ended)]):
            if began > until:
                yield self._slice(_RECORDING, "recording", "marid", until, began, {})
            until = max(until, ended)

    def _ran(self, event: Ran, name: str, lane: int, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self._slice(lane, name, "user_annotation", event.began, event.ended, arguments)
        if event.timing is None or event.timing.spans is None:
            return
        profile, spans = event.timing.profile, event.timing.spans.tolist()
        gap = 1e-9  # so that none ends behind the beginning of the next one, as numbers of microseconds are added
        for index, instruction in enumerate(profile.program.instructions):
            began, ended = spans[2 * index] / 1e9, spans[2 * index + 1] / 1e9
            if ended:
                site, scope = profile.where(index)
                where = {
                    "module": None if scope is None else scope.module_path,
                    "phase": None if scope is None else scope.phase,
                    "source": _text(site),
                }
                yield self._slice(
                    lane, instruction.op.name, "cpu_op", max(began, event.began), min(ended, event.ended) - gap, where
                )

    def _slice(
        self, lane: int, name: str, category: str, began: float, ended: float, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": os.getpid(),
            "tid": lane,
            "ts": self._microseconds(began),
            "dur": round(max(self._microseconds(ended) - self._microseconds(began), 0.0), 3),
            "args": arguments,
        }

    def _side_by_side(self, first: int, spans: list[_Span]) -> Iterator[dict[str, Any]]:
        """Spans that may overlap, each in the first lane that is free."""
        free_from: list[float] = []
        for began, ended, name, arguments in sorted(spans, key=lambda span: span[:2]):
            lane = next((lane for lane, until in enumerate(free_from) if until <= began), len(free_from))
            free_from[lane:] = [ended, *free_from[lane + 1 :]]
            yield self._slice(first + min(lane, _ROOM - 1), name, _LANES[first], began, ended, arguments)

    def _microseconds(self, at: float) -> float:
        """Since the beginning of the trace: what was asked for before that began then."""
        return round(max(at - self._began, 0.0) * 1e6, 3)


def _named(names: dict[int, str], used: set[int]) -> Iterator[dict[str, Any]]:
    """The names of the process and of its lanes, of which the first of each is there in any case."""
    process = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "marid"}}
    for lane in sorted({*names, *used}):
        first = max(one for one in names if one <= lane)
        name = names[lane] if lane == first else f"{names[first]} {lane - first + 1}"
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": lane, "args": {"sort_index": lane}}


def _text(site: Any) -> str | None:
    return None if site is None else str(site)


@folded
def trace(path: str | os.PathLike[str]) -> Trace:
    """What happens from ``start()`` to ``stop()``, or within a ``with`` block, as a file in Chrome's trace format, for
    Perfetto, ``chrome://tracing``, and (with a name that ends in ``.pt.trace.json``) TensorBoard's PyTorch profiler.
    Programs and operators are shown with module, phase and line; times in microseconds. See ``Trace``."""
    return Trace(path)
