"""Figures for people: on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.suite.results import Report, Row

__all__ = ["conditions", "markdown", "render"]

_COLUMNS = ("peer", "median", "to eager", "samples", "spread", "first call", "process", "output")
_STYLES = {"wrong": "bold red", "failed": "red", "missing": "dim", "left out": "dim"}


def render(report: Report) -> RenderableType:
    """Tables, one for each workload and metric."""
    parts: list[RenderableType] = []
    for title, rows in _tables(report):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("peer", "output") else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, _cells(row)), style=_STYLES.get(row.status, ""))
        parts += [Text(f"\n{title}", style="bold"), table]
    parts.append(Text(f"\n{conditions(report)}", style="dim"))
    return Group(*parts)


def markdown(report: Report) -> str:
    """The same as Markdown."""
    lines: list[str] = []
    for title, rows in _tables(report):
        lines += ["", f"### {title}", "", f"| {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * 6 + "---|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(row))} |" for row in rows]
    return "\n".join([conditions(report), *lines]) + "\n"


def conditions(report: Report) -> str:
    """Under which conditions the figures were taken, in a sentence or two."""
    machine, memory = report.machine, report.machine.get("memory_bytes") or 0
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    load = machine.get("load") or ["unknown"]
    quick = "; quick sizes: no figures to quote" if report.options.get("quick") else ""
    return (
        f"{report.started}, {machine.get('cores')} cores of {machine.get('processor')}, {memory / 1e9:.0f} GB, "
        f"load before the start {load[0]}; {versions}; took {report.seconds:.0f} s{quick}."
    )


def _tables(report: Report) -> Iterator[tuple[str, list[Row]]]:
    for name, title in report.workloads.items():
        mine = [row for row in report.rows if row.workload == name]
        metrics = list(dict.fromkeys(row.metric for row in mine if row.metric)) or [""]
        for index, metric in enumerate(metrics):
            rows = [row for row in mine if row.metric == metric or (not row.metric and index == 0)]
            unit = rows[0].unit if rows else ""
            yield f"{name}: {title}; {f'{metric}, ' if metric else ''}{unit}", rows


def _cells(row: Row) -> tuple[str, ...]:
    if row.status != "ok" or row.median is None:
        return (row.peer, row.status, "", "", "", "", "", _short(row.message))
    return (
        row.peer,
        _figure(row.median * row.scale),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.count:,}",
        "" if row.spread is None else f"{row.spread:.0%}",
        "" if row.first is None else f"{row.first:.2f} s",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f} MB",
        row.agreement or "not compared",
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 160 else line[:157] + "..."
