"""What a workload of the wide suite is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.suite.workloads import Tolerance

__all__ = ["TRAINING", "Output", "Program", "Workload"]

Output = Tensor | float

# As in benchmarks/suite: training amplifies rounding, so later turns may be farther off.
TRAINING = Tolerance(tight=1e-3, loose=0.1, strict=10)


def _nothing() -> Sequence[Tensor]:
    return ()


@dataclass(frozen=True)
class Program:
    """A workload made for one device.

    ``turn`` does the work once and returns what a user would read of it; the harness brings tensors among that to the
    host while the clock runs. ``state`` is what the turns have changed, such as weights: compared once at the end,
    outside of the time.
    """

    turn: Callable[[], Sequence[Output]]
    state: Callable[[], Sequence[Tensor]] = _nothing


@dataclass(frozen=True)
class Workload:
    """``build`` makes the program for a device, from weights and data that depend on PyTorch's seed alone.

    ``tolerance`` says how far outputs may be from eager PyTorch's where a compiler took part; without one they must be
    the same bits.
    """

    name: str
    title: str
    build: Callable[[str], Program]
    tolerance: Tolerance = field(default_factory=Tolerance)
