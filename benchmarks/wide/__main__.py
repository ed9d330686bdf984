"""The command line: ``python -m benchmarks.wide``, in the repository."""

from __future__ import annotations

import json as json_format
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.suite.machine import device_name, machine, versions
from benchmarks.suite.options import which_workloads
from benchmarks.wide import harness, table
from benchmarks.wide.worker import COLD_SECONDS
from benchmarks.wide.workloads import WORKLOADS

_WIDTH_OF_FILES = 140


@click.command()
@which_workloads([workload.name for workload in WORKLOADS])
@click.option("--turns", type=click.IntRange(min=1), default=40, show_default=True, help="Timed turns of each device.")
@click.option("--quick", is_flag=True, help="Three turns and hardly a warm-up, to see that everything works.")
@click.option("--compile/--no-compile", "compiled", default=True, help="Whether Marid may compile (MARID_COMPILE).")
@click.option("--cold", is_flag=True, help=f"Measure the first {COLD_SECONDS:.0f} seconds of processes, caches empty.")
@click.option("--replayed", is_flag=True, help="Have each turn on the device under marid.compile.")
@click.option("--on", default="cpu", show_default=True, help="What eager PyTorch and Marid run on: cpu, or cuda:N.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of PyTorch; its own choice without.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds that a workload may take.")
@click.option("--json", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples to this file.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the table to this file.")
def wide(
    list_only: bool,
    only: tuple[str, ...],
    turns: int,
    quick: bool,
    compiled: bool,
    cold: bool,
    replayed: bool,
    on: str,
    threads: int | None,
    timeout: float,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Measure many small, ordinary programs with Marid beside eager PyTorch, turn by turn in one process for each.

    Outputs are compared before a time is shown: the exit status is 1 when one was wrong. Nothing else should run on the
    machine. docs/benchmarks.md says what the columns mean.
    """
    if cold and on != "cpu":
        raise click.UsageError("--cold compares every bit with the CPU's, and is for the CPU only")
    if cold and replayed:
        raise click.UsageError("--cold and --replayed are two things to measure: functions are recorded first")
    if list_only:
        for workload in WORKLOADS:
            click.echo(f"{workload.name:20} {workload.title}")
        return
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=_WIDTH_OF_FILES)
    warmup = (3, 0.0) if quick else (30, 3.0)
    plan = harness.Plan(
        turns=3 if quick else turns,
        warmup=warmup[0],
        warmup_seconds=warmup[1],
        compiled=compiled,
        cold=cold,
        threads=threads or 0,
        timeout=timeout,
        on=on,
        replayed=replayed,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    about, began = machine(), time.perf_counter()
    known, started = versions(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    measured = f"first {COLD_SECONDS:.0f} s of processes" if cold else f"medians of {plan.turns} turns"

    def conditions() -> str:
        load = [(one["load"] or ["unknown"])[0] for one in (about, machine())]
        return (
            f"{started}, {about['cores']} cores of {about['processor']}, load before the start {load[0]} "
            f"and after {load[1]}; on {device_name(on)}; torch {known['torch']}, marid {known['marid']}; {measured}, "
            f"{'compiler on' if compiled else 'MARID_COMPILE=0'}"
            f"{', turns under marid.compile' if replayed else ''}; took {time.perf_counter() - began:.0f} s"
            f"{'; quick: no figures to quote' if quick else ''}."
        )

    rows: list[dict[str, Any]] = []
    for row in harness.run([workload for workload in WORKLOADS if not only or workload.name in only], plan):
        rows.append(row)  # and the files each time, so that what is long to measure is not lost
        if json is not None:
            report = {"conditions": conditions(), "machine": about, "versions": known, "summary": table.summary(rows)}
            json.write_text(json_format.dumps({**report, "rows": rows}, indent=1), encoding="utf-8")
        if markdown is not None:
            markdown.write_text(table.markdown(rows, conditions()), encoding="utf-8")
    out.print(table.render(rows, conditions()))
    sys.exit(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    wide(prog_name="python -m benchmarks.wide")
