"""What ``marid run`` prints at the end: what the device did, and which lines of the script waited for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marid.report.explain import short
from marid.report.stats import Stats, Sync
from marid.report.traffic import RemoteStats
from marid.report.units import bytes_text, seconds_text

_LINES = 10
_WIDTH_OF_FILES = 160
"""Columns when the summary goes to a file or a pipe, so that paths stay whole."""


def show(report: RenderableType) -> None:
    """Print a report to stderr, after what the process has printed."""
    with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream is the script's affair
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        console = Console(stderr=True, force_jupyter=False, highlight=False)
        if not console.is_terminal:
            console = Console(stderr=True, force_jupyter=False, highlight=False, width=_WIDTH_OF_FILES)
        console.print(report)


def render(stats: Stats) -> RenderableType:
    """The summary of a snapshot."""
    lines = by_line(stats.syncs)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    rows = {
        "operations": _operations(stats),
        "programs": f"{stats.programs_built:,} built, {stats.programs_reused:,} reused",
        "fallbacks": _counts(stats.fallbacks),
        "data-dependent": _counts(stats.dynamic),
        "automatic cuts": f"{stats.automatic_cuts:,}",
        "peak memory": f"{bytes_text(stats.peak_memory)} on the device{_process_peak()}",
        "materialisations": f"{stats.materializations:,}, waited {seconds_text(sum(line.seconds for line in lines))}",
    }
    if stats.remote is not None:
        rows |= _remote(stats.remote)
    for name, text in rows.items():
        facts.add_row(name, Text(text))
    title = Rule("marid", align="left", style="dim")
    return Group(title, facts, _waits(lines)) if lines else Group(title, facts)


def _operations(stats: Stats) -> str:
    if not stats.ops_captured:
        return "none: nothing ran on the device"
    at_once = f", {stats.ops_immediate:,} of them at once" if stats.ops_immediate else ""
    return f"{stats.ops_captured:,} captured, {stats.ops_executed:,} executed{at_once}"


def _remote(remote: RemoteStats) -> dict[str, str]:
    """What went to workers and came from them."""
    moved = [f"{one.source} ({one.role}) {bytes_text(one.up + one.down)}" for one in remote.moved[:3]]
    rows = {
        "remote": f"{remote.round_trips:,} round trips, {bytes_text(remote.bytes_up)} up, "
        f"{bytes_text(remote.bytes_down)} down, {bytes_text(remote.deduplicated)} not sent twice",
        "moved most": ", ".join(moved) or "nothing",
        "workers": ", ".join(f":{i} {bytes_text(said.get('bytes', 0))}" for i, said in remote.workers.items()),
    }
    if remote.recoveries:
        rows["recovered"] = (
            f"{remote.recoveries:,} lost worker(s), {remote.replays:,} step(s) done again in "
            f"{seconds_text(remote.recovery_seconds)}"
        )
    return rows


@dataclass
class Line:
    """The materialisations of one source line."""

    source: str
    reasons: list[str] = field(default_factory=list)
    count: int = 0
    seconds: float = 0.0


def by_line(syncs: Iterable[Sync]) -> list[Line]:
    """Materialisations by source line, slowest first."""
    lines: dict[str, Line] = {}
    for sync in syncs:
        line = lines.setdefault(sync.source, Line(sync.source))
        if sync.reason not in line.reasons:
            line.reasons.append(sync.reason)
        line.count += sync.count
        line.seconds += sync.seconds
    return sorted(lines.values(), key=lambda line: -line.seconds)


def _waits(lines: list[Line]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("waited", justify="right")
    table.add_column("times", justify="right")
    table.add_column("at", overflow="fold")
    table.add_column("for", overflow="fold")
    for line in lines[:_LINES]:
        row = (seconds_text(line.seconds), f"{line.count:,}", short(line.source), ", ".join(line.reasons))
        table.add_row(*map(Text, row))
    rest = lines[_LINES:]
    if rest:
        others = f"{len(rest)} other line{'s' if len(rest) > 1 else ''}"
        row = (seconds_text(sum(line.seconds for line in rest)), f"{sum(line.count for line in rest):,}", others)
        table.add_row(*map(Text, row), style="dim")
    return Padding(table, (0, 0, 0, 2))


def _counts(table: dict[str, int]) -> str:
    most_first = sorted(table.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in most_first) or "none"


def _process_peak() -> str:
    """The process's largest resident memory, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f", {bytes_text(peak if sys.platform == 'darwin' else peak * 1024)} resident in the process"
