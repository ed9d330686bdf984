"""Making values concrete: every path from a recorded value to a real one goes through here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from marid import policy
from marid.engine.protocol import Need
from marid.errors import LazyTensorError, MaterializationError, MemoryLimitError, SyncForbiddenError
from marid.frontend import handles
from marid.frontend.ahead import ReadLoop, has_stepped, may_go_ahead, touches_little
from marid.frontend.engines import all_engines, engine_of
from marid.frontend.observe import observer
from marid.graph.arguments import input_values
from marid.graph.node import Node, Value, is_in_flight, last_write, root_of
from marid.graph.program import runs
from marid.graph.tape import Tape
from marid.native import module
from marid.report.hooks import Materialized, materialized, recorded
from marid.report.stats import counters
from marid.semantics.scopes import Site, current_site
from marid.settings import settings

_read_loops = [ReadLoop() for _ in range(handles.device_count)]


def _settings_changed() -> None:
    handles.record_again()
    for index in range(handles.device_count):
        handles.tape(index).set_budget(0)  # measured again, by the new limits, at the next operation


settings.when_changed(_settings_changed)
recorded.when_changed(_settings_changed)


def forget_loops() -> None:
    """Forget which lines read again and again: what is recorded from here on runs when it is asked for."""
    for index, tape in enumerate(map(handles.tape, range(handles.device_count))):
        _read_loops[index] = ReadLoop()
        tape.chunk = tape.steps = 0
        tape.rarely_reads = False


class _Restraint(threading.local):
    no_sync = 0  # how many blocks this thread is in
    holding = 0


_restraint = _Restraint()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Inside, a read that would have to run something raises ``SyncForbiddenError`` naming its line instead."""
    _restraint.no_sync += 1
    try:
        with hold_back():
            yield
    finally:
        _restraint.no_sync -= 1


@contextlib.contextmanager
def hold_back() -> Iterator[None]:
    """Inside, nothing that this thread records runs before it is asked for."""
    _restraint.holding += 1
    try:
        with handles.recording():
            yield
    finally:
        _restraint.holding -= 1


def is_held_back() -> bool:
    """Whether this thread is in ``hold_back``, or in a run, from which something came back to Python: what is pending
    may need what that has yet to make."""
    return bool(_restraint.holding or runs.depth)


def is_sync_forbidden() -> bool:
    """Whether this thread is in ``no_sync``."""
    return bool(_restraint.no_sync)


def pending_nodes(tensor: Any) -> list[Node]:
    """The nodes that must run before ``tensor`` has its value: what makes it, and the newest write to its memory. They
    may have failed."""
    found: list[Node] = []
    value = tensor._value
    if value.concrete is None:
        found.append(value.node)
    write = last_write(tensor._storage)
    if write is not None and not is_in_flight(write):
        found.append(write)
    return found


def materialize(tensors: Iterable[Any], reason: str, need: Need = "run") -> None:
    """Have what ``tensors`` need run, in one program for each device, and wait for it as far as is needed. Raises
    ``SyncForbiddenError`` under ``no_sync``."""
    watching = observer()
    if watching is not None:
        watching.read(reason)
    asked: dict[int, list[Any]] = {}
    for tensor in tensors:
        asked.setdefault(tensor._value.spec.device, []).append(tensor)
    site = current_site()
    started = time.perf_counter()
    waited = False
    for device in list(asked):
        waited |= _run_for(handles.tape(device), asked.pop(device), reason, site, need)
    if waited:
        _count_wait(site, reason, time.perf_counter() - started)


def _count_wait(site: Site | None, reason: str, seconds: float) -> None:
    counters.count_sync(site, reason, seconds)
    if materialized.listeners:
        materialized.tell(Materialized(reason, None if site is None else str(site), seconds))


def _run_for(tape: Tape, tensors: list[Any], reason: str, site: Site | None, need: Need) -> bool:
    """Have what these tensors need run, and wait for it; whether that was more than arithmetic on the host."""
    waited = alone = False
    chunk = _plan(tape, site)
    while True:
        tape.fail_dependents()  # what was recorded since the failure
        asked = [node for tensor in tensors for node in pending_nodes(tensor)]
        can_run = bool(asked) and all(node.args is not None for node in asked)  # none of them has failed
        stepped = has_stepped(tape)
        everything = can_run and not (is_held_back() or alone) and bool(chunk or stepped or tape.immediate)
        if everything:
            nodes = tape.pending()  # all of it will be asked for, and what one program makes and uses dies in it
        else:
            nodes = tape.cut(asked) if asked else []
        quiet = _is_host_arithmetic(nodes)
        if _restraint.no_sync and not quiet:
            raise SyncForbiddenError(
                f"{reason} at {site} needs {len(nodes)} recorded operation(s) to run, inside marid.no_sync(); "
                "read the value after the block, or keep it on the device"
            )
        waited |= not quiet
        immediate = _read_loops[tape.device].wants_immediate and may_be_immediate(tape)
        is_little = immediate and touches_little(nodes)
        ahead = bool(tape.chunk) and not is_held_back()
        try:
            if nodes:
                run_pending(tape, nodes, ahead)
            if ahead:  # the engine is given what will be asked for next before it is waited for
                run_everything(tape, wait=False)
                tape.set_budget(tape.chunk)
            waited |= wait_for(tensors, need)
            if is_little:
                _read_loops[tape.device].begins_immediate()
                begin_immediate(tape, settings.immediate_bytes)
            elif immediate:
                _read_loops[tape.device].is_not_immediate()
            return waited
        except MaterializationError:
            continue  # the next cut raises it if the asked values need what failed
        except MemoryLimitError as error:
            nodes.clear()  # whoever keeps the error must not keep the nodes: they would count as results that are used
            if everything:
                alone = True  # what is asked for may fit
                continue
            raise error.with_traceback(None) from None


def _plan(tape: Tape, site: Site | None) -> int:
    """A value is read at ``site``: how much may be recorded until it runs unasked, in units of ``Tape.budget``."""
    if tape.immediate:
        module.allow_immediate(tape.allowance)
        return 0
    if site is None:
        return 0
    chunk = _read_loops[tape.device].chunk(site, tape)
    engine = engine_of(tape.device)
    goes_ahead = engine.runs_ahead and (engine.elsewhere or may_go_ahead()) and not settings.memory_limit
    goes_ahead = goes_ahead and not tape.rarely_reads  # whole steps are handed over then
    tape.chunk = chunk if goes_ahead else 0  # what one chunk leaves to the next cannot be computed again
    return chunk


def may_be_immediate(tape: Tape) -> bool:
    """Whether operations may run at once on the thread that calls them."""
    allowed = settings.immediate_bytes > 0 and not settings.memory_limit and not settings.log_intercepts
    allowed = allowed and not recorded.listeners and not engine_of(tape.device).spilled
    return allowed and not is_held_back() and observer() is None and not engine_of(tape.device).elsewhere


def begin_immediate(tape: Tape, allowance: int) -> None:
    """Let operations run at once from here on, that touch no more than so many bytes each, on average."""
    wait_anyway()
    tape.allowance = allowance
    module.allow_immediate(allowance)
    tape.chunk = 0
    tape.immediate = True


def wait_for(tensors: list[Any] | None = None, need: Need = "run") -> bool:
    """Wait until what counts as run has run, for these tensors of one device or for all; whether that took waiting.
    Raises ``MaterializationError`` for an operation that failed."""
    try:
        if tensors is None:
            waited = [engine.wait() for engine in all_engines()]  # for each, whatever the others say
            return any(waited)
        return engine_of(tensors[0]._value.spec.device).wait([tensor._value for tensor in tensors], need)
    except MaterializationError:
        fail_dependents()
        raise


def run_anyway(tape: Tape, nodes: Iterable[Node]) -> None:
    """Have these nodes run, and wait for all that runs; failures are raised where their values are read."""
    tape.fail_dependents()
    for node in nodes:
        while node.args is not None:
            with contextlib.suppress(MaterializationError):
                run_pending(tape, tape.cut([node]))
    wait_anyway()


def wait_anyway() -> bool:
    """Wait for all that runs, whatever fails; whether that took waiting."""
    waited = False
    while True:
        try:
            return wait_for() or waited
        except MaterializationError:
            waited = True


def fail_dependents() -> None:
    for index in range(handles.device_count):
        handles.tape(index).fail_dependents()


def read(tensor: Any, reason: str, whole: bool = False) -> torch.Tensor:
    """A CPU tensor with the value of ``tensor``, after running what it needs; see ``Engine.read``."""
    materialize((tensor,), reason, "value")
    return engine_of(tensor._value.spec.device).read(tensor._value.concrete, whole)


def read_value(value: Value) -> torch.Tensor:
    """The same of a value that counts as run."""
    assert value.spec is not None
    engine = engine_of(value.spec.device)
    engine.wait([value], "value")
    return engine.read(value.concrete)


def download(tensor: Any, reason: str) -> torch.Tensor:
    """The same as a snapshot, of which the caller is the owner."""
    materialize((tensor,), reason, "value")
    return engine_of(tensor._value.spec.device).download(tensor._value.concrete)


def taken(tensor: Any, index: int, reason: str) -> Any | None:
    """A buffer of device ``index`` with the value of a tensor of another device, after running what that needs; None
    where engines do not exchange values but by way of the host."""
    source, target = engine_of(tensor._value.spec.device), engine_of(index)
    while True:
        materialize((tensor,), reason, "buffer")
        started = time.perf_counter()
        try:
            buffer = target.take(source, tensor._value.concrete)
        except MaterializationError:
            fail_dependents()
            continue  # it is raised if the tensor needs what failed
        if buffer is not None:
            _count_wait(current_site(), reason, time.perf_counter() - started)
        return buffer


def run_pending(tape: Tape, nodes: list[Node], ahead: bool = False) -> None:
    """Have a cut run, now or (``ahead``) soon, and keep the books. Raises ``MaterializationError`` for the first
    operation that has failed and, before any has run, ``MemoryLimitError``."""
    watching = observer()
    if watching is not None:
        watching.read("running what is pending")
    try:
        limit = settings.memory_limit
        resident = bytes_of(range(handles.device_count)) if limit else _resident_bytes()
        tape.run += len(nodes)
        engine = engine_of(tape.device)
        ahead = ahead and not tape.immediate and (engine.elsewhere or may_go_ahead())
        resident += engine.spilled
        taken = engine.run(nodes, tape.take_back, ahead, limit - resident + engine.spilled if limit else None)
        counters.peak_memory = max(counters.peak_memory, resident - engine.spilled + taken)
    except MaterializationError:
        fail_dependents()
        raise
    finally:
        tape.note_results(nodes)


def run_everything(tape: Tape, wait: bool = True) -> LazyTensorError | None:
    """Have all that is pending run, and wait for it if asked to; the first failure, after running what does not depend
    on it. Runs nothing more when memory does not suffice, and nothing in a run."""
    first = None
    if runs.depth:
        return None
    while True:
        tape.fail_dependents()
        try:
            if nodes := tape.pending():
                run_pending(tape, nodes, not wait)
            elif wait:
                wait_for()
                return first
            else:
                return first
        except MaterializationError as error:
            first = first or error.with_traceback(None)
        except MemoryLimitError as error:
            return first or error.with_traceback(None)


class _Sample:
    """Bytes resident on all devices, walked over 20 times a second and a twentieth of the time at most: the walk takes
    longer than small runs."""

    nbytes = 0
    due = 0.0


def _resident_bytes() -> int:
    now = time.monotonic()
    if now >= _Sample.due:
        _Sample.nbytes = bytes_of(range(handles.device_count))
        ended = time.monotonic()
        _Sample.due = ended + max(0.05, 19 * (ended - now))
    return _Sample.nbytes


def bytes_of(devices: Iterable[int]) -> int:
    """Bytes of the memory that living values of these devices hold."""
    return sum(dict(_block(value) for index in devices for value in handles.tape(index).resident_values()).values())


def holders(devices: Iterable[int]) -> list[tuple[int, Value]]:
    """The memory that living values of these devices hold: the bytes of each block, and the first value in it."""
    first: dict[int, tuple[int, Value]] = {}
    for index in devices:
        for value in sorted(handles.tape(index).resident_values(), key=lambda value: value.node.seq):
            block, nbytes = _block(value)
            first.setdefault(block, (nbytes, value))
    return [held for held in first.values() if held[0]]


def _block(value: Value) -> tuple[int, int]:
    """An identity for the block of memory that a value lies in, and its bytes."""
    assert value.spec is not None
    block = engine_of(value.spec.device).memory(value.concrete)
    return (-id(root_of(value)), value.spec.nbytes) if block is None else block


def _is_host_arithmetic(nodes: list[Node]) -> bool:
    """Whether a cut is a few operations on single numbers that came from the host (a step counter, say).

    Such a value is known without waiting for the device, so reading it is no sync.
    """
    return len(nodes) <= policy.HOST_OPERATIONS and all(_is_scalar_work(node) for node in nodes)


def _is_scalar_work(node: Node) -> bool:
    if node.outs is not None or (node.spec is not None and node.spec.numel > 1):
        return False
    return all(
        value.spec is not None and value.spec.numel <= 1 and _is_from_host(value) for value in input_values(node)
    )


def _is_from_host(value: Value) -> bool:
    return value.concrete is None or value.node.op is None or value.node.op.factory
