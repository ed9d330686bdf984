"""Train the same network with eager PyTorch and with Marid, in turns, and show both: what ``make demo`` runs.

    python -m benchmarks.demo [--rounds 3] [-- --steps 60]

Each run is a process of its own, timed from its start to its end, so that importing, recording, building programs and
planning memory are in its time. The compiler is off unless ``MARID_COMPILE=1`` says otherwise: then all losses must be
eager PyTorch's, bit for bit. With it they must agree to a thousandth. The exit status is 1 where they do not.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/fit_image.py"
REPORT = ROOT / "build" / "demo" / "report.html"
COMPILES = os.environ.get("MARID_COMPILE", "0").lower() not in ("0", "false", "no", "off")
LARGEST = 1e-3 if COMPILES else 0.0
"""The largest difference of losses, as a share of eager PyTorch's, that the mode promises."""
COMMANDS = {"eager": [sys.executable], "Marid": [sys.executable, "-m", "marid", "run", "--no-summary"]}
REPORTING = [sys.executable, "-m", "marid", "report"]
_STEP = re.compile(r"step +(\d+)/(\d+) +loss (\S+)")


@dataclass
class Run:
    """What one process did: seconds from its start."""

    losses: list[float]
    first: float
    last: float
    total: float
    processor: float
    memory: float

    @property
    def steps_per_second(self) -> float:
        return (len(self.losses) - 1) / (self.last - self.first)


def run(command: list[str], bar: Progress, task: TaskID) -> Run:
    """Run the script, and move its bar. Ends this process where it fails."""
    environment = {**os.environ, "MARID_COMPILE": str(int(COMPILES)), "MARID_AUTOLOAD": "0"}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    losses: list[float] = []
    first = last = 0.0
    for line in process.stdout:
        if step := _STEP.match(line):
            last = time.perf_counter() - started
            first = first or last
            losses.append(float(step[3]))
            bar.update(task, completed=int(step[1]), total=int(step[2]))
    _, status, usage = os.wait4(process.pid, 0)
    total = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or len(losses) < 2:
        sys.exit(f"{' '.join(command)} failed, or took fewer than two steps")
    return Run(losses, first, last, total, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def largest_difference(runs: list[Run], reference: list[float]) -> float:
    """Of all steps of the runs, as a share of the reference; infinite where one is no number, or steps are missing."""
    largest = 0.0
    for one in runs:
        if len(one.losses) != len(reference):
            return float("inf")
        for ours, eager in zip(one.losses, reference, strict=True):
            if ours != eager:
                share = abs(ours - eager) / abs(eager) if eager else float("inf")
                largest = max(largest, share) if share == share else float("inf")
    return largest


def table(eager: list[Run], marid: list[Run]) -> Table:
    """Both beside each other: medians of the runs."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(f"{len(eager[0].losses)} steps, {len(eager)} time{'s'[: len(eager) - 1]}", overflow="fold")
    shown.add_column("eager", justify="right", overflow="fold")
    shown.add_column("Marid", justify="right", overflow="fold")

    def row(name: str, figure: str, attribute: str) -> None:
        shown.add_row(
            name,
            *(figure.format(statistics.median(getattr(one, attribute) for one in runs)) for runs in (eager, marid)),
        )

    row("seconds", "{:.1f}", "total")
    row("first loss, s", "{:.1f}", "first")
    row("steps/s", "{:.2f}", "steps_per_second")
    row("processor, s", "{:.1f}", "processor")
    row("memory, MiB", "{:,.0f}", "memory")
    shown.add_row("last loss", f"{eager[-1].losses[-1]:.9g}", f"{marid[-1].losses[-1]:.9g}")
    shown.add_row("largest diff.", "", f"{largest_difference(eager[1:] + marid, eager[0].losses):.1e}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the same network with eager PyTorch and with Marid.")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turns; medians are shown")
    parser.add_argument("arguments", nargs="*", help=f"for {SCRIPT}, after --")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(f"{SCRIPT}, the same script for both; the compiler is {'on' if COMPILES else 'off'}.")
    runs: dict[str, list[Run]] = {name: [] for name in COMMANDS}
    columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, expand=True) as bar:
        for _ in range(options.rounds):
            for name, command in COMMANDS.items():
                task = bar.add_task(name, total=None)
                runs[name].append(run([*command, SCRIPT, *options.arguments], bar, task))
                bar.stop_task(task)
    eager, marid = runs.values()
    console.print(table(eager, marid))
    ratio = statistics.median(one.total for one in marid) / statistics.median(one.total for one in eager)
    console.print(
        f"Marid took {ratio:.2f} of eager PyTorch's time, from the start of the process to its end: "
        "recording, building programs and planning memory are in it"
        + (", and compiling beside it." if COMPILES else "; nothing was compiled.")
    )
    difference = largest_difference(eager[1:] + marid, eager[0].losses)
    if difference > LARGEST:
        sys.exit(f"the losses differ by {difference:.1e}, and may by {LARGEST:.0e}")
    promise = f"to {LARGEST:.0e}" if COMPILES else "bit for bit"
    console.print(f"The losses of all steps are eager PyTorch's, {promise}. The report of a short run:")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    # In a run of its own: measuring each operator takes time.
    command = [*REPORTING, "-o", str(REPORT), SCRIPT, *options.arguments, "--steps", "6"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    console.print(os.path.relpath(REPORT), soft_wrap=True)


if __name__ == "__main__":
    main()
