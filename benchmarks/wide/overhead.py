"""``python -m benchmarks.wide.overhead``: what an operation costs beyond its kernel, over whole turns of the workloads.

Everything is recorded (nothing runs at once or compiled) and one thread does all of it, so that the parts of a turn add
up: recording (the program's own Python included, as it is in eager PyTorch's time), cutting and binding, the kernels,
and what running a program takes beyond them. Of all turns the fastest counts: what disturbs a turn only adds to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

__all__ = ["overhead"]

_DEFAULT = ("gru-cell", "maml", "hessian-vector", "lbfgs", "policy-gradient", "llama-static", "bert", "tabular")
_SETTINGS = {
    "MARID_COMPILE": "0",
    "MARID_IMMEDIATE_BYTES": "0",
    "MARID_ASYNCHRONOUS": "0",
    "MARID_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
}
_WARMUP = 10


@dataclass
class _Turn:
    """Seconds of one turn: in all, waiting for values, and in programs."""

    whole: float = 0.0
    waited: float = 0.0
    ran: float = 0.0


def _measure(name: str, turns: int) -> str:
    """One row of the table, in a process whose settings are ``_SETTINGS``."""
    import marid
    from benchmarks.wide.checks import on_host
    from benchmarks.wide.worker import build
    from benchmarks.wide.workloads import WORKLOADS
    from marid.report.hooks import Materialized, Ran

    workload = next(workload for workload in WORKLOADS if workload.name == name)
    eager, lazy = build(workload, "cpu"), build(workload, "remote_accelerator")
    now = _Turn()

    def ran(event: Ran) -> None:
        now.ran += event.seconds

    def waited(event: Materialized) -> None:
        now.waited += event.seconds

    eager_turns: list[float] = []
    lazy_turns: list[_Turn] = []
    with marid.on_run(ran), marid.on_materialize(waited):
        for _ in range(_WARMUP + turns):
            now = _Turn()
            started = time.perf_counter()
            on_host(eager.turn())
            eager_turns.append(time.perf_counter() - started)
            started = time.perf_counter()
            on_host(lazy.turn())
            now.whole = time.perf_counter() - started
            lazy_turns.append(now)
    marid.reset_stats()
    marid.settings.profile_operators = True
    kernels = []
    for _ in range(turns):
        marid.reset_stats()
        on_host(lazy.turn())
        kernels.append(sum(one.seconds for one in marid.stats().operators))
    operations = marid.stats().ops_captured
    best = min(lazy_turns[_WARMUP:], key=lambda turn: turn.whole)
    # What an optimizer's step has run nobody waits for; cutting and binding it then count as recording.
    outside = max(best.waited, best.ran)
    parts = (
        min(eager_turns[_WARMUP:]),
        best.whole,
        best.whole - outside,
        outside - best.ran,
        best.ran - min(kernels),
        min(kernels),
    )
    return f"{name:18}{operations:11,}" + "".join(f"{1e6 * part / operations:10.2f}" for part in parts)


@click.command()
@click.option("--only", metavar="NAME", multiple=True, help="This workload in place of some unlike ones; repeat it.")
@click.option(
    "--turns", type=click.IntRange(min=1), default=20, show_default=True, help="Turns, the best of which counts."
)
@click.option("--here", hidden=True, help="Measure this workload in this process.")
def overhead(only: tuple[str, ...], turns: int, here: str | None) -> None:
    """Microseconds that an operation takes in whole turns, beside eager PyTorch's time for it."""
    if here is not None:
        click.echo(_measure(here, turns))
        return
    root = Path(__file__).parents[2]
    heads = ("eager", "Marid", "recorded", "cut", "run", "kernel")
    click.echo(f"{'workload':18}{'operations':>11}" + "".join(f"{head:>10}" for head in heads))
    for name in only or _DEFAULT:
        command = [sys.executable, "-m", "benchmarks.wide.overhead", "--here", name, "--turns", str(turns)]
        subprocess.run(command, cwd=root, env={**os.environ, **_SETTINGS}, check=True)


if __name__ == "__main__":
    overhead(prog_name="python -m benchmarks.wide.overhead")
