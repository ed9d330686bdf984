"""Counters of what the device did, and why: kept by the recorder and the engine, read by ``marid.stats()``."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, fields, replace

from marid.graph.html import folded_html, table_html
from marid.report.operator_times import OperatorStats
from marid.report.traffic import RemoteStats
from marid.semantics.scopes import Site, text_of_site


@dataclass(frozen=True)
class Sync:
    """Materialisations that one line caused: how often, why, and the seconds its thread waited in all."""

    source: str
    reason: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Misprediction:
    """Results of one line that were recorded otherwise than they were computed, and how often; ``what`` says both."""

    source: str
    operator: str
    what: str
    count: int


@dataclass(eq=False)
class FunctionStats:
    """What became of the calls of one function under ``marid.compile``.

    ``recordings`` ran the Python to learn from it, ``replays`` did not run it, ``plain`` ran it as without
    ``marid.compile``. ``fallbacks`` says why recordings could not be used, and how often. ``guard_failures`` replays
    were undone because a test of a number came out otherwise than when it was recorded.
    """

    name: str
    calls: int = 0
    recordings: int = 0
    replays: int = 0
    plain: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    guard_failures: int = 0

    def count_fallback(self, reason: str) -> None:
        """The Python has to run (again), for ``reason``."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def copy(self) -> FunctionStats:
        """The numbers of this moment."""
        return replace(self, fallbacks=dict(self.fallbacks))

    def reset(self) -> None:
        """Start again from zero."""
        self.__init__(self.name)


functions: weakref.WeakSet[FunctionStats] = weakref.WeakSet()


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters since import or ``marid.reset_stats()``.

    ``ops_captured`` operations recorded; ``ops_executed`` of them run; ``ops_immediate`` of these at once, as they were
    written; ``programs_built`` and ``programs_reused``; ``programs_fitted`` programs that were made of others to take
    less memory, by computing results again; ``spill_moved`` bytes that went to a file or came back for that;
    ``materializations`` times a read had to run something; ``automatic_cuts`` times the tape was run because it grew
    too large; ``fallbacks`` operator name to count of operations that could not be recorded and ran eagerly;
    ``dynamic`` the same for operations whose output shape depends on data; ``mispredictions`` results that were not
    recorded as they were computed, and were laid out as recorded; ``passes`` how much each pass changed;
    ``syncs`` by source line, slowest first;
    ``pending_nodes`` and ``pending_bytes`` now waiting; ``memory_allocated`` and ``peak_memory`` in bytes;
    ``planned_peak`` the bytes that the largest memory plan takes, ``planned_lower_bound`` the largest sum of bytes that
    live at once in it, ``unplanned_bytes`` what its blocks would take without reuse; ``functions`` under
    ``marid.compile`` that were called; ``epoch`` counts completed runs;
    ``programs_compiling`` parts of programs that are being compiled, ``programs_compiled`` programs of which there is a
    compiled variant (one for each rule of shapes), ``compiled_runs`` runs with one; ``parts_compiled`` parts that were
    compiled for them, ``compile_cache_hits`` parts found on disk (of a program that is like an earlier one, those that
    are the same); ``compile_failures`` parts that could not be compiled,
    ``compile_mismatches`` parts whose first results differed from the flat tier's, ``compiled_dropped`` variants that
    were no faster; ``compile_workers`` worker processes started, ``compile_workers_lost`` that died;
    ``compile_damaged`` entries of the disk cache that were damaged, ``compile_unstored`` parts that did not get there;
    ``remote`` what went to workers and came from them, where there are any; ``operators`` the time of each operator by
    module and line, slowest first, of what ran in this process under ``settings.profile_operators``.
    """

    ops_captured: int
    ops_executed: int
    ops_immediate: int
    programs_built: int
    programs_reused: int
    programs_fitted: int
    spill_moved: int
    materializations: int
    automatic_cuts: int
    fallbacks: dict[str, int]
    dynamic: dict[str, int]
    mispredictions: list[Misprediction]
    passes: dict[str, int]
    syncs: list[Sync]
    pending_nodes: int
    pending_bytes: int
    memory_allocated: int
    peak_memory: int
    planned_peak: int
    planned_lower_bound: int
    unplanned_bytes: int
    functions: list[FunctionStats]
    epoch: int
    programs_compiling: int
    programs_compiled: int
    compiled_runs: int
    parts_compiled: int
    compile_cache_hits: int
    compile_failures: int
    compile_mismatches: int
    compiled_dropped: int
    compile_workers: int
    compile_workers_lost: int
    compile_damaged: int
    compile_unstored: int
    remote: RemoteStats | None = None
    operators: list[OperatorStats] = field(default_factory=list)

    def _repr_html_(self) -> str:
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        counts = [(name, f"{value:,}") for name, value in plain.items() if isinstance(value, int) and value]
        tables = {name: value for name, value in plain.items() if isinstance(value, dict) and value}
        lists = {name: value for name, value in plain.items() if isinstance(value, list) and value}
        found = [folded_html("stats", table_html(("counter", "value"), counts))]
        found += [folded_html(name, table_html(("name", "count"), value.items())) for name, value in tables.items()]
        for name, value in lists.items():
            columns = [one.name for one in fields(value[0])]
            rows = [[_plain_text(getattr(row, column)) for column in columns] for row in value[:_SHOWN]]
            found.append(folded_html(f"{name}: {len(value):,}", table_html(columns, rows)))
        return "".join(found)


_SHOWN = 50  # rows of a table in a notebook


def _plain_text(value: object) -> object:
    return f"{value:.6f}" if isinstance(value, float) else value


@dataclass
class Counters:
    """The live numbers behind ``Stats``."""

    ops_captured_before: int = 0
    ops_immediate_before: int = 0
    ops_executed: int = 0
    programs_built: int = 0
    programs_fitted: int = 0
    spill_moved: int = 0
    programs_reused: int = 0
    materializations: int = 0
    automatic_cuts: int = 0
    epoch: int = 0
    peak_memory: int = 0
    planned_peak: int = 0
    planned_lower_bound: int = 0
    unplanned_bytes: int = 0
    programs_compiled: int = 0
    compiled_runs: int = 0
    parts_compiled: int = 0
    compile_cache_hits: int = 0
    compile_failures: int = 0
    compile_mismatches: int = 0
    compiled_dropped: int = 0
    compile_workers: int = 0
    compile_workers_lost: int = 0
    compile_damaged: int = 0
    compile_unstored: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    dynamic: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    waits: dict[tuple[Site | None, str], list[float]] = field(default_factory=dict)
    cuts: dict[Site | None, int] = field(default_factory=dict)
    eager: dict[tuple[str, str, Site | None], int] = field(default_factory=dict)
    mispredicted: dict[tuple[str, str, str], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_sync(self, site: Site | None, reason: str, seconds: float) -> None:
        """One materialisation made a thread wait at ``site``."""
        with self.lock:
            self.materializations += 1
            entry = self.waits.setdefault((site, reason), [0, 0.0])
            entry[0] += 1
            entry[1] += seconds

    def count_automatic_cut(self, site: Site | None) -> None:
        """The tape was run because it grew too large, when the operation at ``site`` was recorded."""
        with self.lock:
            self.automatic_cuts += 1
            self.cuts[site] = self.cuts.get(site, 0) + 1

    def count_eager(self, name: str, reason: str, site: Site | None) -> None:
        """The operator ``name`` ran at once at ``site``."""
        with self.lock:
            key = (name, reason, site)
            self.eager[key] = self.eager.get(key, 0) + 1

    def count_misprediction(self, name: str, source: str, what: str) -> None:
        """A result of the operator ``name``, written at ``source``, was not what was recorded."""
        with self.lock:
            key = (source, name, what)
            self.mispredicted[key] = self.mispredicted.get(key, 0) + 1

    def mispredictions(self) -> list[Misprediction]:
        """Results that were not what was recorded, by line."""
        return [Misprediction(*key, count) for key, count in list(self.mispredicted.items())]

    def note_plan(self, peak: int, lower_bound: int, unplanned: int) -> None:
        """A program's memory was planned."""
        with self.lock:
            if peak >= self.planned_peak:
                self.planned_peak, self.planned_lower_bound, self.unplanned_bytes = peak, lower_bound, unplanned

    def count_passes(self, changes: dict[str, int]) -> None:
        """Passes changed a part before it was compiled."""
        with self.lock:
            for name, count in changes.items():
                self.passes[name] = self.passes.get(name, 0) + count

    def count_operator(self, table: dict[str, int], name: str) -> int:
        """Count ``name`` in ``fallbacks`` or ``dynamic`` and return how often it has occurred."""
        with self.lock:
            table[name] = table.get(name, 0) + 1
            return table[name]

    def syncs(self) -> list[Sync]:
        """Materialisations by line and reason, slowest first."""
        merged: dict[tuple[str, str], list[float]] = {}
        for (site, reason), (count, seconds) in list(self.waits.items()):
            entry = merged.setdefault((text_of_site(site), reason), [0, 0.0])
            entry[0] += count
            entry[1] += seconds
        found = [Sync(source, reason, int(count), seconds) for (source, reason), (count, seconds) in merged.items()]
        return sorted(found, key=lambda sync: -sync.seconds)

    def reset(self, ops_captured: int, ops_immediate: int) -> None:
        """Start again from zero; the epoch goes on."""
        for function in list(functions):
            function.reset()
        with self.lock:
            self.__init__(
                ops_captured_before=ops_captured, ops_immediate_before=ops_immediate, epoch=self.epoch, lock=self.lock
            )


counters = Counters()
