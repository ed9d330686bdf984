"""The memory of planned programs: one slab that all programs of an engine put their blocks in, one run at a time.

A program with given shapes is *watched* the first time it is worth it, planned from what was seen, and *follows* that
plan from then on. A run that leaves its plan stays right (``native/memory.cpp``); its program is watched again, and
left alone when that keeps happening.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from marid.native import int64s, library
from marid.optimize.memory import MemoryPlan, Trace, plan
from marid.report.stats import counters
from marid.settings import settings

__all__ = ["Arena", "Placement"]

_LEFT, _HELD = 1, 2  # what marid_memory_end reports
_ATTEMPTS = 3
_HUGE_PAGE = 2 << 20
_WINDOW = 64  # runs after which a slab that none of them needed is made smaller


class Placement:
    """Where one program, with one set of shapes, puts its blocks.

    ``donors`` says which results take over the memory of an argument (``execute/table.py``). ``plan`` is None until
    the program has been watched.
    """

    __slots__ = ("__weakref__", "attempts", "donors", "native", "plan")

    def __init__(self, donors: Any) -> None:
        self.donors = donors
        self.plan: MemoryPlan | None = None
        self.native: int | None = None
        self.attempts = 0

    @property
    def hopeless(self) -> bool:
        """It was watched again and again, and never did the same in the next run."""
        return self.plan is None and self.attempts >= _ATTEMPTS

    def adopt(self, trace: Trace) -> None:
        """Plan from what was seen."""
        assert library is not None
        self.attempts += 1
        self.plan = plan(trace)
        offsets = self.plan.offsets
        events = [event for event in trace.events if event >= 0 or offsets[~event] >= 0]  # others cannot be told apart
        self.native = library.marid_memory_plan(
            len(trace.sizes), int64s(trace.sizes), int64s(offsets), len(events), int64s(events)
        )
        weakref.finalize(self, library.marid_memory_forget, self.native).atexit = False
        counters.note_plan(self.plan.peak, self.plan.lower_bound, self.plan.unplanned)


class Arena:
    """Context manager around a run: ``with arena.run(placement): ...``. Not thread-safe.

    A run inside of a run, and any run without the C++ library, is left to PyTorch's allocator.
    """

    def __init__(self) -> None:
        _install()
        self.nbytes = 0
        self._slab: int | None = None
        self._next: Placement | None = None
        self._active: list[Placement | None] = []
        self._runs = self._needed = 0

    def run(self, placement: Placement | None) -> Arena:
        """What the next ``with`` block runs; None to leave it to PyTorch's allocator."""
        self._next = placement
        return self

    def __enter__(self) -> None:
        placement, self._next = self._next, None
        if placement is not None:
            placement = self._begin(placement)
        self._active.append(placement)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        placement = self._active.pop()
        if placement is not None:
            self._end(placement, kind is None)

    def _begin(self, placement: Placement) -> Placement | None:
        if library is None or any(self._active):
            return None
        if placement.plan is None:
            library.marid_memory_begin(None, None)
        elif self._reserve(placement.plan.peak):
            library.marid_memory_begin(placement.native, self._slab)
        else:
            return None  # there is no such block of memory, but without a slab the program may still fit
        return placement

    def _end(self, placement: Placement, completed: bool) -> None:
        assert library is not None
        if placement.plan is None:
            seen = _read(library.marid_memory_end_watched())
            if completed:
                placement.adopt(seen)
            return
        outcome = library.marid_memory_end()
        if outcome & _HELD:  # a failed run keeps what it has made so far; the slab goes when that does
            self.release()
        if not completed:
            return
        if outcome & _LEFT:
            placement.plan = None
        else:
            placement.attempts = 0

    def trim(self) -> None:
        """Give back the slab, and the blocks that are kept to be used again."""
        self.release()
        if library is not None:
            library.marid_memory_trim()

    def release(self) -> None:
        """Give the slab back; the next run that follows a plan takes a new one."""
        if library is not None and self._slab is not None:
            library.marid_memory_retire(self._slab)
        self._slab, self.nbytes = None, 0

    def _reserve(self, nbytes: int) -> bool:
        """Have a slab of at least ``nbytes``; a much larger one is replaced when no recent run needed it."""
        assert library is not None
        self._runs += 1
        self._needed = max(self._needed, nbytes)
        if self._runs >= _WINDOW:
            if self._needed < self.nbytes // 2:
                self.release()
            self._runs = self._needed = 0
        if self._slab is None or self.nbytes < nbytes:
            self.release()
            wanted = max(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE if nbytes >= _HUGE_PAGE else nbytes, 1)
            self._slab = library.marid_memory_slab(wanted)
            self.nbytes = wanted if self._slab is not None else 0
        return self._slab is not None


def _install() -> None:
    if library is not None:
        library.marid_memory_install(settings.pool_bytes)


settings.when_changed(_install)


def _read(run: int) -> Trace:
    assert library is not None
    sizes = int64s([0] * library.marid_memory_seen_blocks(run))
    events = int64s([0] * library.marid_memory_seen_events(run))
    library.marid_memory_seen(run, sizes, events)
    return Trace(list(sizes), list(events))
