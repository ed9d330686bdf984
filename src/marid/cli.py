"""The command line: ``marid run script.py``, ``marid cache info``."""

from __future__ import annotations

import sys

import click

import marid
from marid import runner
from marid.execute.compiled.disk import DiskCache
from marid.execute.compiled.tier import folder
from marid.report.units import bytes_text

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
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def run(as_cuda: bool, no_summary: bool, script: str, arguments: tuple[str, ...]) -> runner.Job:
    """Run a Python script as `python` would, with the device as PyTorch's default device.

    Everything after SCRIPT belongs to the script.
    """
    return runner.Job(script, arguments, as_cuda=as_cuda, summary=not no_summary)


@commands.group()
def cache() -> None:
    """What was compiled and is kept on disk."""


def _compiled() -> DiskCache:
    return DiskCache(folder(), marid.settings.cache_bytes)


@cache.command()
def info() -> None:
    """Say where compiled parts are, how many, and how large."""
    found = _compiled().entries()
    total = bytes_text(sum(nbytes for _, nbytes, _ in found))
    click.echo(f"{folder()}: {len(found)} compiled parts, {total} of {bytes_text(marid.settings.cache_bytes)}")


@cache.command()
def clear() -> None:
    """Remove all compiled parts."""
    click.echo(f"{_compiled().clear()} compiled parts removed")


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
