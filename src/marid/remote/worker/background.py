"""Long work of a worker, on a thread of low priority, beside brief work on the main thread.

Everything that sessions share is used under one lock, the *state*. The background thread releases it while the kernels
of a program run, and takes it again for what follows them. While the main thread has the state, the background pauses
before its next operator. The main thread can wait for that, to run its kernels alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from marid.native import release_openmp_threads


class Background:
    """The background thread, which has one piece of work at a time, and the state."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._kernels = threading.Lock()
        """Held by the background while its kernels run, and by the main thread while it runs its own alone."""
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._pool = ThreadPoolExecutor(1, "marid-background", _lower_priority)
        self._thread: int | None = None
        self._work: Future[Any] | None = None
        self._check: Callable[[], None]
        self._program: object = None
        self._alone = False
        self.settings: Any = None
        """Of the kernels that run in the background."""

    # --- the main thread ---

    @property
    def is_busy(self) -> bool:
        """Whether it has work of which the result was not taken."""
        return self._work is not None

    @property
    def has_ended(self) -> bool:
        """Whether there is a result to be taken."""
        return self._work is not None and self._work.done()

    def start(self, work: Callable[[], Any], check: Callable[[], None], ended: Callable[[], None]) -> None:
        """Begin ``work`` with the state, while there is none. Before an operator ``check`` is called now and then; what
        it raises ends the run. ``ended`` is called on the background thread."""
        assert self._work is None
        self._check = check
        self._work = self._pool.submit(self._run, work)
        self._work.add_done_callback(lambda _: ended())

    def result(self) -> Any:
        """What the work returned, once; None while it goes on, or where there is none. Raises what it raised."""
        if not self.has_ended:
            return None
        assert self._work is not None
        work, self._work = self._work, None
        return work.result()

    @contextlib.contextmanager
    def foreground(self) -> Iterator[None]:
        """Have the state, on the main thread."""
        self._may_go_on.clear()
        try:
            with self._state:
                yield
        finally:
            if self._alone:
                self._alone = False
                self._kernels.release()
            self._may_go_on.set()

    def be_alone(self) -> None:
        """Wait until the background pauses, where it has begun something; it does so until ``foreground`` ends."""
        if self._work is not None and not self._alone and not self.is_this_thread:
            self._kernels.acquire()
            self._alone = True

    def close(self) -> None:
        """Wait for its work, and end the thread."""
        self._pool.shutdown()

    # --- the background thread ---

    @property
    def is_this_thread(self) -> bool:
        """Whether this is the background thread."""
        return threading.get_ident() == self._thread

    @contextlib.contextmanager
    def kernels(self, program: object) -> Iterator[None]:
        """Around kernels, with the state. In the background others may have it meanwhile, and run any other program
        than this one."""
        if not self.is_this_thread:
            if program is self._program:
                self.be_alone()
            yield
            return
        self._kernels.acquire()
        self._program = program
        self._state.release()
        try:
            yield
        finally:
            self._kernels.release()
            self._state.acquire()
            self._program = None

    def between(self) -> None:
        """Before an operator in the background: raises what ``check`` raises, and pauses while the main thread has the
        state, which has all processors then (``launch/openmp.py``)."""
        self._check()
        if not self._may_go_on.is_set():
            release_openmp_threads()
            self._kernels.release()
            self._may_go_on.wait()
            self._kernels.acquire()

    def _run(self, work: Callable[[], Any]) -> Any:
        self._thread = threading.get_ident()
        try:
            with self._state:
                return work()
        finally:
            release_openmp_threads()


def _lower_priority() -> None:
    """Let this thread, and those that it starts, have what processors have left. A thread with ``nice`` of 19 gets as
    little, but is not put aside at once (sched(7))."""
    if sys.platform == "linux":  # where each thread has a priority of its own
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
