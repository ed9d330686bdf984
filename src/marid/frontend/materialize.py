"""Making values concrete: every path from a recorded value to a real one goes through here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from sys import _getframe as getframe
from typing import Any

import torch

from marid.engine.inprocess import InProcessEngine
from marid.engine.protocol import Engine
from marid.errors import LazyTensorError, MaterializationError, MemoryLimitError, SyncForbiddenError
from marid.frontend import handles
from marid.frontend.observe import observer
from marid.graph.node import Node, Value, input_values, last_write
from marid.graph.tape import Tape
from marid.report.stats import counters
from marid.semantics.scopes import Site, capture_site
from marid.settings import settings

__all__ = [
    "bytes_of",
    "concrete",
    "cost_of",
    "engine",
    "materialize",
    "no_sync",
    "overflow",
    "pending_nodes",
    "run_everything",
    "run_pending",
]

engine: Engine = InProcessEngine()


def _settings_changed() -> None:
    for index in range(handles.device_count):
        handles.tape(index).room = 0  # measured again, by the new limits, at the next operation


settings.when_changed(_settings_changed)


class _Forbidden(threading.local):
    depth = 0


_forbidden = _Forbidden()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Inside, a read that would have to run something raises ``SyncForbiddenError`` naming its line instead."""
    _forbidden.depth += 1
    try:
        yield
    finally:
        _forbidden.depth -= 1


def pending_nodes(tensor: Any) -> list[Node]:
    """The nodes that must run before ``tensor`` has its value: what makes it, and the newest write to its memory."""
    found: list[Node] = []
    value = tensor._value
    if value.concrete is None:
        found.append(value.node)
    write = last_write(tensor._storage)
    if write is not None:
        found.append(write)
    return found


def materialize(tensors: Iterable[Any], reason: str) -> None:
    """Run what ``tensors`` need, in one program for each device. Raises ``SyncForbiddenError`` under ``no_sync``."""
    watching = observer()
    if watching is not None:
        watching.read(reason)
    asked: dict[int, list[Node]] = {}
    for tensor in tensors:
        nodes = pending_nodes(tensor)
        if nodes:
            asked.setdefault(tensor._value.spec.device, []).extend(nodes)
    if not asked:
        return
    site = capture_site(getframe())
    started = time.perf_counter()
    waited = False
    for device in list(asked):
        tape, nodes = handles.tape(device), asked.pop(device)
        waited |= _run_for(tape, nodes, reason, site)
    if waited:
        counters.count_sync(site, reason, time.perf_counter() - started)


def _run_for(tape: Tape, asked: list[Node], reason: str, site: Site | None) -> bool:
    """Run what the asked nodes need; whether that was more than arithmetic on the host."""
    while True:
        nodes = tape.cut(asked)
        quiet = _is_host_arithmetic(nodes)
        if _forbidden.depth and not quiet:
            raise SyncForbiddenError(
                f"{reason} at {site} needs {len(nodes)} recorded operation(s) to run, inside marid.no_sync(); "
                "read the value after the block, or keep it on the device"
            )
        try:
            run_pending(tape, nodes)
        except MaterializationError:
            continue  # the next cut raises it if the asked values need what failed
        except MemoryLimitError as error:
            nodes.clear()  # whoever keeps the error must not keep the nodes: they would count as results that are used
            raise error.with_traceback(None) from None
        return not quiet


def concrete(tensor: Any, reason: str) -> torch.Tensor:
    """The engine's buffer behind ``tensor``, after running what it needs."""
    materialize((tensor,), reason)
    return tensor._value.concrete


def run_pending(tape: Tape, nodes: list[Node]) -> None:
    """Run a cut and keep the books. Raises ``MaterializationError`` for the first operation that fails and, before any
    has run, ``MemoryLimitError``."""
    watching = observer()
    if watching is not None:
        watching.read("running what is pending")
    try:
        limit = settings.memory_limit
        resident = bytes_of(range(handles.device_count)) if limit else _resident_bytes()
        taken = engine.run(nodes, limit - resident if limit else None)
        counters.peak_memory = max(counters.peak_memory, resident + taken)
    except MaterializationError:
        tape.fail_dependents()
        raise
    finally:
        _note_results(tape, nodes)


def run_everything(tape: Tape) -> LazyTensorError | None:
    """Run all that is pending; the first failure, after running what does not depend on it. Runs nothing more when
    memory does not suffice."""
    first = None
    while nodes := tape.pending():
        try:
            run_pending(tape, nodes)
        except MaterializationError as error:
            first = first or error
        except MemoryLimitError as error:
            return first or error.with_traceback(None)
    return first


class _Sample:
    """Bytes resident on all devices, walked over at most 20 times a second: the walk takes longer than small runs."""

    nbytes = 0
    due = 0.0


def _resident_bytes() -> int:
    now = time.monotonic()
    if now >= _Sample.due:
        _Sample.nbytes = bytes_of(range(handles.device_count))
        _Sample.due = now + 0.05
    return _Sample.nbytes


def bytes_of(devices: Iterable[int]) -> int:
    """Bytes of the memory that living values of these devices hold."""
    seen: dict[int, int] = {}
    for index in devices:
        for value in handles.tape(index).resident_values():
            assert value.concrete is not None
            storage = value.concrete.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _note_results(tape: Tape, nodes: list[Node]) -> None:
    tape.note_resident([node for node in nodes if node.concrete is not None])
    for node in nodes:
        for ref in node.outs or ():
            out = ref()
            if out is not None and out.concrete is not None:
                tape.note_resident([out])


def cost_of(nbytes: int) -> int:
    """What one node that allocates ``nbytes`` is charged: its bytes, and its share of the limit on nodes."""
    return nbytes + settings.max_pending_bytes // settings.max_pending_nodes


def overflow(tape: Tape) -> None:
    """The tape may have grown too long or too large: count exactly, and run all of it when it has.

    Half of the limits is enough to run, at the next node like the one where this happened before; at the limits, which
    no charge exceeds, it happens anyway.
    """
    if observer() is not None:
        tape.room = settings.max_pending_bytes  # a function under marid.compile is one program
        return
    newest = tape.entries[-1]()
    here = None if newest is None else (newest.site, newest.scope, newest.op, newest.spec)
    if tape.grace <= 0:
        nodes, nbytes = tape.measure()
        used = max(nbytes / settings.max_pending_bytes, nodes / settings.max_pending_nodes)
        # Charges add up bytes and nodes, so half of what is left is safe for both.
        tape.room = int((1 - used) / 2 * settings.max_pending_bytes)
        if used < 0.5:
            return
        tape.grace = tape.room if tape.cut_at is not None else 0
    else:
        tape.grace += tape.room
    if tape.grace > 0 and here != tape.cut_at:
        tape.room = 0  # to be asked again at the next node
        return
    counters.automatic_cuts += 1
    tape.cut_at, tape.grace = here, 0
    run_everything(tape)  # a failure is raised where its value is read
    tape.room = settings.max_pending_bytes // 2


_HOST_NODES = 16


def _is_host_arithmetic(nodes: list[Node]) -> bool:
    """Whether a cut is a few operations on single numbers that came from the host (a step counter, say).

    Such a value is known without waiting for the device, so reading it is no sync.
    """
    if len(nodes) > _HOST_NODES:
        return False
    return all(_is_scalar_work(node) for node in nodes)


def _is_scalar_work(node: Node) -> bool:
    if node.outs is not None or (node.spec is not None and node.spec.numel > 1):
        return False
    return all(
        value.spec is not None and value.spec.numel <= 1 and _is_from_host(value) for value in input_values(node)
    )


def _is_from_host(value: Value) -> bool:
    return value.concrete is None or value.node.op is None or value.node.op.factory
