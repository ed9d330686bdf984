"""The command line: ``marid run script.py``."""

from __future__ import annotations

import sys

import click

import marid
from marid import runner

__all__ = ["main"]


@click.group()
@click.version_option(marid.__version__, prog_name="marid")
def commands() -> None:
    """Run plain PyTorch lazily, as whole programs, on the device remote_accelerator."""


@commands.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--as-cuda", is_flag=True, help='Map every use of "cuda" to the device; the default device stays the CPU.'
)
@click.option("--no-summary", is_flag=True, help="Print no summary at the end.")
@click.option(
    "--explain", is_flag=True, help="Print marid.explain() at the end instead: waits, recompiles and bytes by line."
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def run(as_cuda: bool, no_summary: bool, explain: bool, script: str, arguments: tuple[str, ...]) -> runner.Job:
    """Run a Python script as `python` would, with the device as PyTorch's default device.

    Everything after SCRIPT belongs to the script.
    """
    return runner.Job(script, arguments, as_cuda=as_cuda, summary=not no_summary, explain=explain)


def main() -> None:
    """The command ``marid``."""
    try:
        result = commands(prog_name="marid", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit("Aborted!")
    # A script runs outside of click, which would handle Ctrl-C and SystemExit in its own way.
    if isinstance(result, runner.Job):
        result.run()
    else:
        sys.exit(result)
