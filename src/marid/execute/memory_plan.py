"""The memory plan: where in one slab each block of a program lies, so that the slab is hardly larger than it must be.

What is planned is what the kernels were seen to allocate (``Trace``), workspaces included, not what metadata says they
return. Blocks that outlive the run are never placed. Placing is interval colouring with sizes (dynamic storage
allocation, NP-hard): the largest block first into the tightest gap among those alive at the same time, and two other
orders when that does not reach the lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from marid import policy
from marid.native import module

_ALIGNMENT = 64  # what PyTorch's allocator aligns to


@dataclass(frozen=True)
class Trace:
    """What a run allocated: bytes of each block in order of allocation, and events, ``k`` where block ``k`` is
    allocated and ``~k`` where it is freed. A block that is not freed outlives the run."""

    sizes: list[int]
    events: list[int]


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets in bytes by block, -1 for blocks that are not placed.

    ``peak`` is the size of the slab; ``lower_bound`` the largest sum of placed blocks that live at the same time, which
    no plan goes below; ``unplanned`` what they would take without any reuse; ``held`` the same as ``lower_bound`` with
    the blocks that outlive the run. All in bytes, blocks rounded up to 64.
    """

    offsets: list[int]
    peak: int
    lower_bound: int
    unplanned: int
    held: int


def plan(trace: Trace) -> MemoryPlan:
    """Place every block of ``trace`` that is freed."""
    births, deaths = [0] * len(trace.sizes), [-1] * len(trace.sizes)
    for time, event in enumerate(trace.events):
        if event >= 0:
            births[event] = time
        else:
            deaths[~event] = time
    placed = [block for block, death in enumerate(deaths) if death >= 0]
    if len(placed) > policy.PLAN_BLOCKS:
        placed = sorted(sorted(placed, key=lambda block: -trace.sizes[block])[: policy.PLAN_BLOCKS])
    sizes = [_padded(trace.sizes[block]) for block in placed]
    lower_bound = _most_alive(trace, set(placed))
    lives = [births[block] for block in placed], [deaths[block] for block in placed]
    peak, found = module.memory_place(sizes, *lives, lower_bound)
    offsets = [-1] * len(trace.sizes)
    for block, offset in zip(placed, found, strict=True):
        offsets[block] = offset
    return MemoryPlan(offsets, peak, lower_bound, sum(sizes), _most_alive(trace, set(range(len(trace.sizes)))))


def _most_alive(trace: Trace, placed: set[int]) -> int:
    alive = most = 0
    for event in trace.events:
        if event >= 0 and event in placed:
            alive += _padded(trace.sizes[event])
            most = max(most, alive)
        elif event < 0 and ~event in placed:
            alive -= _padded(trace.sizes[~event])
    return most


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
