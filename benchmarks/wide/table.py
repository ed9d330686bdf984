"""Figures for people: a table, and what it comes to in one line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["SLOWER", "markdown", "render", "summary"]

SLOWER = 1.05
"""From this ratio on a workload counts as slower than eager PyTorch: less is within what turns scatter."""

_COLUMNS = (
    "workload",
    "eager, ms",
    "Marid, ms",
    "ratio",
    "processor",
    "operations",
    "reads",
    "at once",
    "replays",
    "fallbacks",
    "outputs",
)
_STYLES = {"wrong": "bold red", "failed": "red"}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Geometric mean of the ratios to eager PyTorch, how many are slower, and the worst; of rows that have a figure."""
    good = [row for row in rows if row["status"] == "ok"]
    bad = [f"{row['workload']} {row['status']}" for row in rows if row["status"] != "ok"]
    without = f"; without a figure: {', '.join(bad)}" if bad else ""
    if not good:
        return f"no figures{without}"
    slower = sum(row["ratio"] > SLOWER for row in good)
    worst = max(good, key=lambda row: row["ratio"])
    mean = statistics.geometric_mean([row["ratio"] for row in good])
    processor = statistics.geometric_mean([row["processor_ratio"] for row in good])
    return (
        f"{len(good)} workloads: geometric mean {mean:.2f} of eager PyTorch (processor time {processor:.2f}); "
        f"{slower} slower than {SLOWER}; worst {worst['workload']} {worst['ratio']:.2f}{without}"
    )


def render(rows: Sequence[dict[str, Any]], conditions: str) -> RenderableType:
    """The table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("workload", "outputs") else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, _cells(row)), style=_STYLES.get(row["status"], ""))
    return Group(table, Text(f"\n{summary(rows)}", style="bold"), Text(conditions, style="dim"))


def markdown(rows: Sequence[dict[str, Any]], conditions: str) -> str:
    """The same as Markdown."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * (len(_COLUMNS) - 2) + "---|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(row))} |" for row in rows]
    return "\n".join([*lines, "", summary(rows), "", conditions]) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return (row["workload"], row["status"], *[""] * (len(_COLUMNS) - 3), " ".join(row["message"].split())[:160])
    counts = row["a_turn"]
    figures = (
        f"{row['eager_ms']:.3g}",
        f"{row['marid_ms']:.3g}",
        f"{row['ratio']:.2f}",
        f"{row['processor_ratio']:.2f}",
    )
    names = ("operations", "reads", "at_once", "replays")
    fallbacks = counts["fallbacks"] + counts["dynamic"]
    counted = [f"{counts[name]:,.0f}" for name in names]
    return (row["workload"], *figures, *counted, f"{fallbacks:,.0f}", row["output"])
