"""Programs run with less memory than they take as recorded, however small they are, and all that is idle waits in
files meanwhile."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import marid
from marid.engine import memory_limit
from marid.execute.fitted import fitted
from marid.frontend.engines import local_engine

__all__ = ["tight"]

_SHARES = (0.3, 0.5, 0.7, 0.9)


@contextlib.contextmanager
def tight() -> Iterator[list[float]]:
    """Inside, a run has a share of what its program takes at once, beginning with another one each time, and if that is
    too little the next. The list has the share of each run that computes something again."""
    shares: list[float] = []
    turn = itertools.count()

    def as_little(flat: Any, task: Any, room: int, expected: int) -> Any:
        local_engine._make_room(1 << 60, task)  # pyright: ignore[reportAttributeAccessIssue]
        first = next(turn)
        for number in range(first, first + len(_SHARES)):
            share = _SHARES[number % len(_SHARES)]
            found = fitted(flat, task, int(share * expected), expected) if expected else None
            if found is not None:
                shares.append(share)
                return found
        return fitted(flat, task, room, expected)

    before = marid.settings.memory_limit, marid.settings.spill_limit
    marid.settings.memory_limit = marid.settings.spill_limit = 1 << 60
    memory_limit.fitted = as_little
    try:
        yield shares
    finally:
        memory_limit.fitted = fitted
        marid.settings.memory_limit, marid.settings.spill_limit = before
