"""The default engine: programs run in this process, on CPU tensors."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from marid import policy
from marid.engine import single_call
from marid.engine.failed import explain, salvage
from marid.engine.in_flight import TaskInFlight
from marid.engine.memory_limit import within
from marid.engine.protocol import Called, Engine, GiveBack, Need
from marid.engine.snapshot import snapshot
from marid.errors import MaterializationError
from marid.execute.arena import Arena
from marid.execute.compiled.execution import Checked
from marid.execute.compiled.tier import best
from marid.execute.compiled.workers import compiler
from marid.execute.executable import Executable
from marid.execute.interrupted import Interrupted
from marid.execute.kernel_warnings import KernelWarnings
from marid.execute.specialisation import Launchable, Runnable
from marid.execute.store import ProgramStore
from marid.graph.arguments import placed, values_in
from marid.graph.dispatch_state import concretely
from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Node, Operation, Spec, Value, fail, root_of
from marid.graph.prepared import Prepared, Replay
from marid.graph.program import Program, Task, bind, deliver, runs
from marid.graph.python_operator import by_themselves, calling, refuse_own
from marid.native import module, omp_pause
from marid.report.hooks import Ran, ran, run_of
from marid.report.stats import counters
from marid.uninterrupted import Uninterrupted

logger = logging.getLogger("marid")


class InProcessEngine:
    """Runs programs in the order in which they come: what need not be done at once, and is known, on the device's own
    thread; everything else on the calling thread, once that one is idle."""

    name = "in-process engine"
    runs_ahead = True
    elsewhere = False
    local = True
    spilled = 0

    def __init__(self, make: Callable[[Program, tuple[Spec | None, ...]], Any] = Executable.of) -> None:
        self.lock = threading.RLock()
        self.programs = ProgramStore(make)
        self.arena = Arena()
        self._twisters = MersenneTwisters()
        self._flights: deque[TaskInFlight] = deque()
        self._by_job: dict[int, TaskInFlight] = {}
        self._writing: dict[Value, int] = {}  # the newest flight that may write the memory of a value
        atexit.register(module.queue_stop)
        module.queue_release_threads(omp_pause)
        os.register_at_fork(before=self._before_fork, after_in_child=module.queue_forked)

    def run(self, nodes: list[Node], give_back: GiveBack, ahead: bool = False, room: int | None = None) -> int:
        with self.lock:
            self._settle()
            # Another thread may have run some of them while this one waited for the lock.
            nodes[:] = [node for node in nodes if node.args is not None]
            if not nodes:
                return 0
            refuse_own(nodes)
            if room is not None:
                self._drain()
            task = bind(nodes)
            program = self.programs.find(task)
            if program.by_themselves and len(nodes) > 1:
                del task  # so that what a stretch makes is dropped behind it
                return self._run_in_turn(nodes, program.by_themselves, give_back, ahead, room)
            with concretely():
                runnable: Any = self._best(program, task) if room is None else self._within(room, program, task)
            if ahead and room is None and self._launch(task, runnable, give_back):
                return runnable.transient_bytes
            self._drain()
            with calling(nodes[0]) if program.by_themselves else nullcontext():
                self._perform(task, runnable)
            return runnable.transient_bytes

    def _run_in_turn(
        self, nodes: list[Node], positions: list[int], give_back: GiveBack, ahead: bool, room: int | None
    ) -> int:
        """Run kernels in Python, at ``positions``, by themselves, and what lies between them."""
        named = [weakref.ref(node) for node in nodes]
        stretches = deque(by_themselves(nodes, positions))
        nodes.clear()
        taken = 0
        try:
            while stretches:
                taken = max(taken, self.run(stretches.popleft(), give_back, ahead, room))
        finally:
            nodes += [node for one in named if (node := one()) is not None]
        return taken

    def wait(self, values: Sequence[Value] | None = None, need: Need = "run") -> bool:  # noqa: ARG002
        waited = False
        while True:
            with self.lock:
                self._settle()
                number = self._needed(values)
                if number == 0:
                    return waited
            waited = True
            if module.queue_is_here():
                raise RuntimeError("a value was read on the device's own thread, which has to make it first")
            module.queue_wait(number, policy.UNHEARD_SECONDS)  # in which Ctrl-C goes unheard

    def replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> list[torch.Tensor]:
        with self.lock:
            self._drain()
            if prepared.ready is None:
                prepared.ready = self.programs.find(prepared)
            replay = Replay(prepared, inputs, params)
            with concretely():
                runnable = self._best(prepared.ready, replay)
            began = time.perf_counter() if ran.listeners else 0.0
            runs.depth += 1
            try:
                with KernelWarnings(), concretely(), self.arena.run(runnable.placement):
                    results = runnable.run(replay, self._twisters.at)
            except Interrupted as stop:
                self._twisters.forget()
                if stop.index == len(prepared.nodes) or not isinstance(stop.error, Exception):
                    raise stop.error from None
                failure = explain(prepared.nodes[stop.index], stop.error)
                failure.__cause__ = stop.error.with_traceback(None)
            else:
                _count(replay)
                if began:
                    _tell(replay, runnable, began)
                return results
            finally:
                runs.depth -= 1
        inputs.clear()
        del replay, runnable
        try:
            raise failure
        finally:
            del failure  # which has this frame in its traceback

    def call(
        self, op: Operation, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], state: torch.Tensor | None
    ) -> Called:
        named = {name: placed(arg, _concrete_of) for name, arg in kwargs}
        tensors = [value.concrete for value in values_in((*args, *[arg for _, arg in kwargs]))]
        with concretely():
            return single_call.perform(op, [placed(arg, _concrete_of) for arg in args], named, tensors, state)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with concretely():
            return snapshot(tensor)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def take(self, source: Engine, buffer: Any) -> None:  # noqa: ARG002
        return None  # the host is where its buffers are

    def load(self, tensor: torch.Tensor, path: str, offset: int) -> torch.Tensor:  # noqa: ARG002
        return self.upload(tensor)

    def read(self, buffer: torch.Tensor, whole: bool = False) -> torch.Tensor:  # noqa: ARG002
        return buffer

    def memory(self, buffer: Any) -> tuple[int, int] | None:
        if not isinstance(buffer, torch.Tensor):
            return None
        storage = buffer.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def resize(self, buffer: torch.Tensor, nbytes: int) -> None:
        buffer.untyped_storage().resize_(nbytes)

    def download(self, buffer: torch.Tensor) -> torch.Tensor:
        with concretely():
            return snapshot(buffer)

    def has(self, value: Value) -> bool:
        if not self.lock.acquire(blocking=False):  # another thread runs something, for which a read would wait
            return False
        try:
            return self._needed([value]) == 0
        finally:
            self.lock.release()

    def settle(self) -> None:
        with self.lock:
            self._settle()

    def compiling(self) -> int:
        with self.lock:
            compiler.poll()
            return len(compiler.jobs)

    def mark(self, buffer: Any, role: str) -> None:
        pass

    def worker_stats(self) -> None:
        return None

    def trim(self) -> None:
        with self.lock:
            self._drain()
            self.arena.trim()

    def forget(self) -> None:
        with self.lock:
            self._drain()
            self.programs.clear()
            self._twisters.forget()
            self.arena.trim()

    def _best(self, program: Any, task: Task | Replay) -> Any:
        """How to run ``task``, of a program as ``make`` has made it: what ``_launch`` and ``_perform`` take."""
        return best(program, task, None)

    def _within(self, room: int, program: Any, task: Task) -> Runnable:
        """The same with so many bytes of memory. Raises ``MemoryLimitError``."""
        return within(room, task, program)

    def _perform(self, task: Task, runnable: Runnable) -> None:
        """Run a task on this thread, now that nothing is in flight."""
        task.resolve()
        began = time.perf_counter() if ran.listeners else 0.0
        runs.depth += 1
        try:
            with KernelWarnings(), concretely(), self.arena.run(runnable.placement):
                self._conclude(task, lambda: runnable.run(task, self._twisters.at))
        finally:
            runs.depth -= 1
        if began:
            _tell(task, runnable, began)

    def _launch(self, task: Task, runnable: Launchable | Checked, give_back: GiveBack) -> bool:
        """Hand a task to the device's thread; False when it has to run here."""
        if isinstance(runnable, Checked) or not runnable.in_cpp:
            return False
        if runs.depth or torch._C._autograd._profiler_enabled():  # profilers see this thread
            return False
        while len(self._flights) >= policy.IN_FLIGHT:
            self._wait_for(self._flights[0].number)
        run = runnable.start(task)
        if run is None:
            return False
        flight = TaskInFlight(task, runnable, run, give_back, self._position)
        with Uninterrupted():
            self._by_job[flight.job] = flight
            if not flight.start():
                del self._by_job[flight.job]
                return False
            self._flights.append(flight)
            for root in flight.roots:
                self._writing[root] = flight.number
        return True

    def _position(self, job: int) -> int | None:
        """For the device's thread: the generator of the next operation of a flight."""
        try:
            flight = self._by_job[job]
            draw = flight.runnable.draw(flight.run.next, flight.task.params)
            return self._twisters.at(draw)._cdata
        except Exception:
            logger.exception("a generator could not be positioned")
            return None  # the flight is done again on a thread that can raise

    def _needed(self, values: Sequence[Value] | None) -> int:
        """The number of the last flight that must be done for these values, or for everything; 0 for none."""
        if not self._flights:
            return 0
        if values is None:
            return self._flights[-1].number
        numbers = [self._writing.get(root_of(value), 0) for value in values]
        numbers += [value.concrete.number for value in values if isinstance(value.concrete, TaskInFlight)]
        return max(numbers, default=0)

    def _wait_for(self, number: int) -> None:
        """With the lock: wait for one flight."""
        while self._flights and self._flights[0].number <= number:
            module.queue_wait(number, policy.UNHEARD_SECONDS)
            self._settle()

    def _drain(self) -> None:
        if self._flights:
            self._wait_for(self._flights[-1].number)

    def _settle(self) -> None:
        """Hand out the results of flights that are done; raise the error of one that failed."""
        if not self._flights:
            return
        done = module.queue_done()
        while self._flights and self._flights[0].number <= done:
            with Uninterrupted():
                flight = self._flights.popleft()
                flight.land()
                self._forget(flight)
            _count(flight.task)
            flight.warn()
            flight.tell()
        if self._flights and module.queue_halted():
            self._recover()

    def _recover(self) -> None:
        """An operation raised on the device's thread: do it again here, and take back all that follows. Where it does
        not raise here, what follows is done here too: it counted as run."""
        with Uninterrupted():
            failed, *following = self._flights
            self._flights.clear()
            self._by_job.clear()
            self._writing.clear()
            module.queue_resume()
            for flight in reversed(following):
                flight.take_back()
            failed.take_back()
        failed.warn()
        run, task, runnable = failed.run, failed.task, failed.runnable
        behind = deque((flight.task, flight.runnable) for flight in following)
        del failed, following
        try:
            with KernelWarnings(), concretely():
                self._conclude(task, lambda: runnable.resume(run, task, self._twisters.at))
            while behind:
                self._perform(*behind.popleft())
        finally:
            behind.clear()  # whoever keeps an error must not keep what waited behind it

    def _forget(self, flight: TaskInFlight) -> None:
        del self._by_job[flight.job]
        for root in flight.roots:
            if self._writing.get(root) == flight.number:
                del self._writing[root]

    def _conclude(self, task: Task, run: Callable[[], list[torch.Tensor]]) -> None:
        """Run a task on this thread and give its values their tensors, or its nodes their failure."""
        try:
            results = run()
        except Interrupted as stop:
            self._twisters.forget()
            salvage(task, stop)
            if stop.index == len(task.nodes) or not isinstance(stop.error, Exception):
                raise stop.error from None
            failed = task.nodes[stop.index]
            failure = explain(failed, stop.error)
            # Tracebacks would keep the tensors of this run alive as long as the error.
            failure.__cause__ = stop.error.with_traceback(None)
            fail(failed, failure)
        else:
            if task.nodes[0].args is not None:  # else the run has delivered them
                deliver(task, results)
            _count(task)
            return
        del task, failed, run
        try:
            raise failure
        finally:
            del failure  # which has this frame, and those of whoever reads, in its traceback

    def _before_fork(self) -> None:
        """A child has no thread of ours: nothing may be in flight."""
        with self.lock:
            while self._flights:
                try:
                    self._drain()
                except MaterializationError:
                    continue  # kept by the operation that failed, for whoever reads it


def _count(task: Task | Replay) -> None:
    counters.ops_executed += len(task.nodes)
    counters.epoch += 1


def _tell(task: Task | Replay, runnable: Runnable, began: float) -> None:
    """Tell listeners of a run on this thread, which has just ended."""
    ran.tell(Ran(*run_of(task.nodes), began, time.perf_counter(), began, "user", runnable.compiled, task.timing))


def _concrete_of(value: Value) -> Any:
    return value.concrete
