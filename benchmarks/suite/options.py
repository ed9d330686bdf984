"""Options that the command lines of benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["which_workloads"]

Command = TypeVar("Command", bound=Callable[..., Any])


def which_workloads(names: list[str]) -> Callable[[Command], Command]:
    """``--list`` and ``--only``, given to a command as ``list_only`` and ``only``."""

    def add(command: Command) -> Command:
        only = click.option(
            "--only", metavar="NAME", multiple=True, type=click.Choice(names), help="Run this workload; repeat it."
        )
        return click.option("--list", "list_only", is_flag=True, help="Only list the workloads.")(only(command))

    return add
