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
_RECORDING, _QUEUE, _RUNNING, _COMPILING, _FIRST_WORKER = 1, 2, 3, 4, 10
_LANES = {_RECORDING: "recording", _QUEUE: "queue", _RUNNING: "running", _COMPILING: "compiling"}


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
        found = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "traceEvents": [*_names(self._workers()), *self._converted()],
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
        for number, (told, event) in enumerate(self._events):
            if isinstance(event, Compiled):
                yield from self._compiled(event, number)
            elif isinstance(event, Materialized):
                arguments = {"source": event.source, "reason": event.reason}
                busy.append((told - event.seconds, told))
                yield self._slice(_RECORDING, f"wait: {event.reason}", "marid", *busy[-1], arguments)
            else:
                yield from self._ran(event, number, workers.get(event.lane, _RUNNING))
                if event.lane == "user":
                    busy.append((event.began, event.ended))
        until = self._began
        for began, ended in sorted([*busy, (self._ended, self._ended)]):
            if began > until:
                yield self._slice(_RECORDING, "recording", "marid", until, began, {})
            until = max(until, ended)

    def _ran(self, event: Ran, number: int, lane: int) -> Iterator[dict[str, Any]]:
        count = len(event.operators)
        arguments = {"operators": count, "compiled": event.compiled, "source": _text(event.places[-2])}
        name = f"program: {count:,} operator{'s' if count != 1 else ''}"
        if event.began > event.queued:
            yield from self._overlapping(_QUEUE, name, event.queued, event.began, number, arguments)
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

    def _compiled(self, event: Compiled, number: int) -> Iterator[dict[str, Any]]:
        arguments = {"operators": event.operators, "succeeded": event.succeeded}
        name = f"compiling {event.operators} operators"
        yield from self._overlapping(_COMPILING, name, event.began, event.ended, number, arguments)

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

    def _overlapping(
        self, lane: int, name: str, began: float, ended: float, number: int, arguments: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """What may lie across others in its lane."""
        common = {"name": name, "cat": _LANES[lane], "id": number, "pid": os.getpid(), "tid": lane}
        yield {"ph": "b", **common, "ts": self._microseconds(began), "args": arguments}
        yield {"ph": "e", **common, "ts": self._microseconds(ended)}

    def _microseconds(self, at: float) -> float:
        """Since the beginning of the trace: what was asked for before that began then."""
        return round(max(at - self._began, 0.0) * 1e6, 3)


def _names(workers: dict[str, int]) -> Iterator[dict[str, Any]]:
    process = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "marid"}}
    for lane, name in [*_LANES.items(), *((lane, name) for name, lane in workers.items())]:
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
