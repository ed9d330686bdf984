"""The memory of planned programs: one slab that all programs of an engine put their blocks in, one run at a time.

A program with given shapes is *watched* the first time it is worth it, planned from what was seen, and *follows* that
plan from then on. A run that leaves its plan stays right (``native/memory.cpp``); its program is watched again, and
left alone when that keeps happening.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

from marid import policy
from marid.execute.memory_plan import MemoryPlan, Trace, plan
from marid.native import module
from marid.report.stats import counters
from marid.settings import settings


class Placement:
    """Where one program, with one set of shapes, puts its blocks.

    ``donors`` says which results take over the memory of an argument (``execute/table.py``); ``forecast`` is how many
    bytes results are expected to take. ``plan`` is None until the program has been watched.
    """

    __slots__ = ("__weakref__", "attempts", "donors", "forecast", "native", "plan")

    def __init__(self, donors: bytes | None, forecast: int) -> None:
        self.donors = donors
        self.forecast = forecast
        self.plan: MemoryPlan | None = None
        self.native: int | None = None
        self.attempts = 0

    @property
    def hopeless(self) -> bool:
        """It was watched again and again, and never did the same in the next run."""
        return self.plan is None and self.attempts >= policy.PLAN_ATTEMPTS

    def begin(self) -> bool:
        """Begin a run on this thread, watched or by the plan; False where there is no memory for it."""
        if not _installed and not _withdrawn:  # in a worker's process, where nobody uses the device
            install()
        if self.plan is None:
            module.memory_watch(self.forecast)
            return True
        return module.memory_follow(self.native, self.plan.peak)

    def ended(self, completed: bool, watched: int | None, left: bool) -> None:
        """A run has ended: one that was ``watched`` (where to read what was seen), or one that may have ``left`` its
        plan."""
        if watched is not None:
            seen = Trace(*module.memory_seen(watched))
            if completed and self.plan is None:
                self._adopt(seen)
        elif completed and left:
            self.plan = None
        elif completed:
            self.attempts = 0

    def _adopt(self, trace: Trace) -> None:
        """Plan from what was seen."""
        self.attempts += 1
        self.plan = plan(trace)
        offsets = self.plan.offsets
        events = [event for event in trace.events if event >= 0 or offsets[~event] >= 0]  # others cannot be told apart
        self.native = module.memory_plan(trace.sizes, offsets, events)
        weakref.finalize(self, module.memory_forget, self.native).atexit = False
        if self.plan.peak >= policy.MUCH_BYTES:
            module.memory_trim()  # what runs took before there was a plan
        counters.note_plan(self.plan.peak, self.plan.lower_bound, self.plan.unplanned)


class Arena:
    """Context manager around a run on this thread: ``with arena.run(placement): ...``.

    A run inside of a run is left to PyTorch's allocator.
    """

    def __init__(self) -> None:
        self._next: Placement | None = None
        self._active: list[Placement | None] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return module.memory_arena_bytes()

    def run(self, placement: Placement | None) -> Arena:
        """What the next ``with`` block runs; None to leave it to PyTorch's allocator."""
        self._next = placement
        return self

    def __enter__(self) -> None:
        placement, self._next = self._next, None
        if placement is not None and (any(self._active) or not placement.begin()):
            placement = None
        self._active.append(placement)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        placement = self._active.pop()
        if placement is None:
            return
        if placement.plan is None:
            placement.ended(kind is None, module.memory_end_watched(), False)
        else:
            placement.ended(kind is None, None, module.memory_end())

    def trim(self) -> None:
        """Give back the slab, and the blocks that are kept to be used again; between runs."""
        module.memory_release()
        module.memory_trim()


_installed = False
_withdrawn = False


def install() -> Callable[[], None]:
    """Let CPU tensors come from an allocator that can watch and plan runs, and outside of them is the one that was
    there. Returns what undoes it."""
    global _installed, _withdrawn
    _installed, _withdrawn = True, False
    _settings_changed()
    return _uninstall


def _uninstall() -> None:
    global _installed, _withdrawn
    _installed, _withdrawn = False, True
    module.memory_uninstall()


def _settings_changed() -> None:
    if _installed:
        module.memory_install(settings.pool_bytes)


settings.when_changed(_settings_changed)
