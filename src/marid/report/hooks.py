"""Listeners of tools: told when an operation is recorded, a program is built or has run, and a value was waited for.

Where nobody listens, a place that tells costs one look at an empty tuple, and the C++ half records as ever. Listeners
are called on the thread of the user, with what has happened being complete: what a listener raises reaches the user's
line, and nothing is left half done. While a listener runs, its thread tells nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch

from marid.graph.node import Node
from marid.graph.program import Program
from marid.native import module
from marid.semantics.scopes import Site

_Event = TypeVar("_Event")


@dataclass(frozen=True, slots=True)
class Recorded:
    """An operation that is about to be recorded, or to run at once where it cannot be: ``operator`` as
    ``"aten::mul"``, ``module_path`` and ``phase`` as in ``SemanticMetadata``, ``source`` as ``"file:line"``."""

    operator: str
    module_path: str | None
    phase: str
    source: str | None


@dataclass(frozen=True, slots=True)
class Built:
    """A program that was built: its ``operators`` in program order, and the line that made it run."""

    operators: tuple[str, ...]
    source: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """A program that has run.

    ``began`` and ``ended`` are of ``time.perf_counter``, as is ``queued``, when it was handed over (on a worker, what
    began is that it was sent). ``lane`` is ``"user"`` for the thread that reads, ``"device"`` for the device's own
    thread, or ``"worker N"`` for the worker that is device N. ``operators`` in program order; ``compiled`` says that
    compiled parts stood for some. ``places`` has, for each operation, its line (a ``Site``) and its module and phase (a
    ``Scope``), one after the other. ``timing`` has the time of each operation, where that was asked for.
    """

    operators: tuple[str, ...]
    places: tuple[Any, ...] = field(repr=False)
    began: float
    ended: float
    queued: float
    lane: str
    compiled: bool = False
    timing: Any = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Materialized:
    """A value that was waited for: why, at which line, and the seconds that the thread waited."""

    reason: str
    source: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Compiled:
    """A part of a program that the compiler has answered for: its ``operators``, when it was asked for (as ``Ran``) and
    when the answer was seen, and whether there is code."""

    operators: int
    began: float
    ended: float
    succeeded: bool


class Handle:
    """What ends listening: ``remove()``, or the end of a ``with`` block. Removing twice does nothing."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Tell the listener nothing more."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Telling(threading.local):
    now = False


_telling = _Telling()


class Hook(Generic[_Event]):
    """Who is told of one kind of event: ``listeners``, in the order in which they came."""

    def __init__(self) -> None:
        self.listeners: tuple[Callable[[_Event], object], ...] = ()
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    def when_changed(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` after each change of the listeners."""
        self._watchers.append(watcher)

    def add(self, listener: Callable[[_Event], object]) -> Handle:
        """Tell ``listener`` from now on. Raises ``TypeError`` for what cannot be called."""
        if not callable(listener):
            raise TypeError(f"a listener must be callable, but is {type(listener).__name__}")

        # As it is here, where the user is: operations are recorded in the midst of a dispatch.
        state = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

        def call(event: _Event) -> None:  # the same function may listen twice, and each has its own end
            with torch._C._ForceDispatchKeyGuard(*state):
                listener(event)

        with self._lock:
            self.listeners = (*self.listeners, call)
        self._has_changed()
        return Handle(lambda: self._remove(call))

    def _remove(self, call: Callable[[_Event], object]) -> None:
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not call)
        self._has_changed()

    def _has_changed(self) -> None:
        for watcher in self._watchers:
            watcher()

    def tell(self, event: _Event) -> None:
        """Call each listener. Raises what the first one raises that does."""
        if _telling.now:
            return
        _telling.now = True
        try:
            for listener in self.listeners:
                listener(event)
        finally:
            _telling.now = False


def run_of(nodes: list[Node]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The ``operators`` and ``places`` of a run."""
    return tuple([node.op.name if node.op is not None else "marid::source" for node in nodes]), module.places_of(nodes)


def tell_built(program: Program, site: Site | None) -> None:
    """Tell listeners of a new program that ``site`` makes run."""
    names = tuple([instruction.op.name for instruction in program.instructions])
    built.tell(Built(names, None if site is None else str(site)))


recorded: Hook[Recorded] = Hook()
built: Hook[Built] = Hook()
ran: Hook[Ran] = Hook()
materialized: Hook[Materialized] = Hook()
compiled: Hook[Compiled] = Hook()
