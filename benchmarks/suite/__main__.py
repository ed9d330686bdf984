"""The command line: ``python -m benchmarks.suite``, in the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.suite.command import Bench
from benchmarks.suite.options import which_workloads
from benchmarks.suite.workloads import WORKLOADS


@click.command()
@which_workloads([workload.name for workload in WORKLOADS])
@click.option(
    "--peers", metavar="NAME", multiple=True, help="Let only these take part, beside eager: beginnings of names."
)
@click.option("--quick", is_flag=True, help="Small sizes and few rounds, to see that everything works.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds in place of each workload's own.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of PyTorch; its own choice without.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds that an answer may take.")
@click.option("--json", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples to this file.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the tables to this file.")
def suite(
    list_only: bool,
    only: tuple[str, ...],
    peers: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    threads: int | None,
    timeout: float,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Measure Marid beside eager PyTorch and the other peers that are installed.

    Outputs are checked, and no time is shown for a wrong one: the exit status is then 1. Nothing else should run on the
    machine. docs/benchmarks.md says what the rows mean.
    """
    if list_only:
        for workload in WORKLOADS:
            click.echo(f"{workload.name:12} {workload.title}")
        return
    sys.exit(Bench(only, peers, quick, rounds or 0, threads or 0, timeout, json, markdown).run())


if __name__ == "__main__":
    suite(prog_name="python -m benchmarks.suite")
