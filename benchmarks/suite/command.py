"""What ``python -m benchmarks.suite`` does with its options."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.suite import harness, tables
from benchmarks.suite.machine import machine, versions
from benchmarks.suite.results import Report
from benchmarks.suite.workloads import SLOW, WORKLOADS, Workload

__all__ = ["Bench"]

_WIDTH_OF_FILES = 140


@dataclass(frozen=True)
class Bench:
    """A run of some workloads. ``peers`` limits who takes part: beginnings of names."""

    only: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 0
    threads: int = 0
    timeout: float = 900.0
    json: Path | None = None
    markdown: Path | None = None

    def run(self, workloads: Sequence[Workload] = WORKLOADS) -> int:
        """Run, print, write the files; the exit status: 1 when a check failed, or Marid or eager PyTorch did."""
        chosen = [workload.sized(self.quick) for workload in workloads if not self.only or workload.name in self.only]
        out = Console(highlight=False)
        if not out.is_terminal:
            out = Console(highlight=False, width=_WIDTH_OF_FILES)
        report = Report(
            machine=machine(),
            versions=versions(),
            options={"quick": self.quick, "rounds": self.rounds, "threads": self.threads, "peers": list(self.peers)},
            workloads={workload.name: workload.title for workload in chosen},
            started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
        progress = Console(stderr=True, highlight=False)
        began = time.perf_counter()
        with progress.status("") as status:

            def say(text: str) -> None:
                if progress.is_terminal:
                    status.update(text)
                else:
                    print(text, file=sys.stderr, flush=True)

            plan = harness.Plan(self.rounds, self.threads, self.timeout, self._left_out, say)
            for workload in chosen:
                report.rows += harness.run(workload, plan)
                report.seconds = time.perf_counter() - began
                self._write(report)  # each time, so that what is long to measure is not lost
        out.print(tables.render(report))
        return int(report.failed)

    def _left_out(self, peer: str) -> str | None:
        if self.peers and not peer.startswith(self.peers):
            return "not among --peers"
        if self.quick and not self.peers and peer in SLOW:
            return "compiles for long: --quick leaves it out"
        return None

    def _write(self, report: Report) -> None:
        if self.json is not None:
            report.write(self.json)
        if self.markdown is not None:
            self.markdown.write_text(tables.markdown(report), encoding="utf-8")
