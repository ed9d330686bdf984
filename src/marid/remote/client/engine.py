"""The engine of a device that is a worker's: it sends programs, and brings back what is read.

Runs are kept until a value is read, and go out together with what brings that value, in one message; of a loop that
never reads they go out whenever the tape is cut, and the worker runs them while more is recorded. So ``run`` never
fails; like a task in flight in this process (``engine/in_flight.py``) it makes its nodes count as run, and takes them
back if the answer says that something before them has failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from marid.engine.memory_limit import refuse_beyond
from marid.engine.plain import interned
from marid.engine.protocol import Called, Engine, GiveBack, Need, Returned
from marid.engine.snapshot import snapshot
from marid.errors import LazyTensorError, MaterializationError, WireError
from marid.graph.arguments import values_in
from marid.graph.dispatch_state import concretely
from marid.graph.node import Node, Operation, Value
from marid.graph.prepared import Prepared
from marid.graph.program import bind
from marid.remote.client import blocks
from marid.remote.client import transfers as exchange
from marid.remote.client.blocks import Block, Memory, RemoteBuffer, extent_of, note_roles, role_of
from marid.remote.client.contents import LARGE, Content, FileContent, content_of
from marid.remote.client.delivery import Connection, Delivery
from marid.remote.client.journal import compact
from marid.remote.client.link import Link
from marid.remote.client.runs import EncodedPrograms, ReplayStep, RunStep, Specialization
from marid.remote.client.steps import RESULTS, AskStep, CallStep, FetchStep, FreeStep, ReadStep, RolesStep, Step
from marid.remote.client.uploads import UploadStep
from marid.remote.client.window import LinkLost, RequestFailed
from marid.remote.wire.replies import as_stats
from marid.remote.wire.requests import Request, Stats
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site
from marid.uninterrupted import Uninterrupted

_EAGER_BYTES = 4 << 20  # uploads are sent without being asked for once there are so many bytes of them
_USUAL = "activation"  # what a worker takes the memory of results for until it is sent their role
_AHEAD = 8  # runs that were sent before anybody needs them, each of some thousand operations
_FAREWELL = 3.0  # seconds for a worker's last answer
_LOOK = 0.2  # between looks at whether it is there
_NODES = 4000  # in one program; a request has no more than 16,384 inputs or numbers


class RemoteEngine:
    """Runs programs on the worker of ``connection``, or on its replacement when it was lost."""

    runs_ahead = False
    elsewhere, local, spilled = True, False, 0

    def __init__(self, connection: Connection) -> None:
        self.name = connection.name
        self.lock = threading.RLock()
        self.remote = Memory()
        self.delivery = Delivery(connection, self.remote)
        self.queue = self.delivery.queue
        self._programs = EncodedPrograms()
        self._unsent = 0  # bytes of uploads
        self.reached: weakref.WeakKeyDictionary[Any, tuple[tuple[Link, Link], bool]] = weakref.WeakKeyDictionary()
        self._last_stats: dict[str, Any] = {}

    # --- what is recorded ---

    def run(self, nodes: list[Node], give_back: GiveBack, ahead: bool = False, room: int | None = None) -> int:
        with self.lock:
            self.delivery.settle()
            nodes[:] = [node for node in nodes if node.args is not None]
            parts = [nodes[start : start + _NODES] for start in range(0, len(nodes), _NODES)]
            most = 0
            nodes.clear()  # each node is in one list only
            try:
                for part in parts:
                    most = max(most, self._run(part, give_back, room))
            finally:
                nodes += [node for part in parts for node in part]  # whoever gave them asks what they have become
            if ahead:
                self.delivery.flush()
                self._hold_back()
            return most

    def _hold_back(self) -> None:
        """Let a loop that never reads not run away from the worker, nor from what can be done again."""
        runs = [step for step in self.queue.steps() if isinstance(step, RunStep)]
        if len(runs) > _AHEAD:
            self._await(runs[-1])
            compact(self.delivery)

    def _run(self, nodes: list[Node], give_back: GiveBack, room: int | None) -> int:
        """The same for as many nodes as fit into one request; the list must be the only one that holds them."""
        task = bind(nodes)
        blocks.refuse_spoiled(task)
        specialization = self._programs.find(task)
        if room is not None:
            refuse_beyond(room, task, specialization.encoded.program)
        base = self.remote.take(specialization.encoded.program.slot_count)
        step = RunStep(specialization, task.inputs, task.params, base, current_site())
        with Uninterrupted():
            step.enter(task.inputs)
            for value in task.outputs:
                value.concrete = step.output(self.remote, task.slots[value], value.node)
            note_roles(task, step)
            step.record(task, give_back)
            self.queue.do(step)
        self._send_roles([*task.inputs, *[value.concrete for value in task.outputs]])
        return specialization.transient_bytes

    def _send_roles(self, buffers: Sequence[Any]) -> None:
        """Say what memory is for, where the worker chooses by that what waits on the host."""
        if not self.delivery.link.welcome["limits"].get("spill"):
            return
        new = {
            b.block.identity: (b.handle, b.block)
            for b in buffers
            if (b.block.role or _USUAL) != (b.block.role_sent or _USUAL)
        }
        if new:
            self.queue.do(RolesStep(new.values()))

    def replay(self, prepared: Prepared, inputs: list[RemoteBuffer], params: list[Any]) -> list[RemoteBuffer]:
        with self.lock:
            self.delivery.settle()
            for buffer in inputs:
                buffer.block.check()
            specialization: Specialization | None = prepared.ready
            if specialization is None:
                specialization = prepared.ready = self._programs.find(prepared)
            base = self.remote.take(specialization.encoded.program.slot_count)
            step = ReplayStep(specialization, inputs, params, base, current_site(), prepared.nodes)
            slots = specialization.encoded.program.output_slots
            with Uninterrupted():
                step.enter(inputs)
                outputs = [step.output(self.remote, slot, prepared.nodes[0]) for slot in slots]
                step.buffers += outputs
                self.queue.do(step)
            return outputs

    # --- reading ---

    def wait(self, values: Sequence[Value] | None = None, need: Need = "run") -> bool:
        with self.lock:
            self.delivery.settle()
            buffers = [value.concrete for value in values or () if isinstance(value.concrete, RemoteBuffer)]
            blocks.raise_spoiled(values or ())
            if need == "buffer":
                return False
            wanted = [buffer for buffer in buffers if need == "value" and self._brought(buffer) is None]
            last: Step | None = None
            for buffer in wanted:
                last = self._ask(buffer)
            if last is None:
                last = next((step for step in reversed(self.queue.steps()) if isinstance(step, RunStep)), None)
            if last is None:
                return False
            self._await(last)
            blocks.raise_spoiled(values or ())
            compact(self.delivery)
            return True

    def _await(self, step: Step) -> None:
        self._unsent = 0
        self.delivery.wait(step)

    def has(self, value: Value) -> bool:
        if not self.lock.acquire(blocking=False):  # another thread waits for the worker
            return False
        try:  # the worker has it, unless it was brought a moment ago
            buffer, runs = value.concrete, any(isinstance(step, RunStep) for step in self.queue.steps())
            return isinstance(buffer, RemoteBuffer) and self._brought(buffer) is not None and not runs
        finally:
            self.lock.release()

    def settle(self) -> None:
        with self.lock:
            self.delivery.settle()

    def read(self, buffer: RemoteBuffer, whole: bool = False) -> torch.Tensor:
        with self.lock:
            if whole:
                return self._read_whole(buffer)
            found = self._brought(buffer)
            while found is None:
                buffer.block.check()
                self._await(self._ask(buffer))
                found = self._brought(buffer)
            buffer.brought = None
            return found

    def download(self, buffer: RemoteBuffer) -> torch.Tensor:
        return self.read(buffer)  # which came for this

    def _ask(self, buffer: RemoteBuffer) -> Step:
        step = ReadStep(buffer)
        self.queue.do(step)
        return step

    def _brought(self, buffer: RemoteBuffer) -> torch.Tensor | None:
        if buffer.brought is None or buffer.brought[0] != buffer.block.version:
            return None
        return buffer.brought[1]

    def _read_whole(self, buffer: RemoteBuffer) -> torch.Tensor:
        block, of = buffer.block, buffer.geometry
        storage = block.host[1]() if block.host is not None and block.host[0] == block.version else None
        if storage is None:
            flat = self._flat(buffer)
            storage = flat.untyped_storage()
            block.host = block.version, weakref.ref(storage)
        with concretely():
            tensor = torch.empty(0, dtype=of.dtype, device="cpu").set_(storage, of.offset, of.shape, of.stride)
            if of.conj:
                tensor = tensor.conj()
            return torch.ops.aten._neg_view.default(tensor) if of.neg else tensor

    def _flat(self, buffer: RemoteBuffer) -> torch.Tensor:
        """All of the memory that a buffer lies in, in its dtype."""
        got: list[torch.Tensor] = []
        count = max(buffer.block.nbytes, extent_of(buffer.geometry)) // buffer.geometry.dtype.itemsize
        step = FetchStep(
            buffer.handle, buffer.block, (0, (count,), (1,)), got.append, (buffer.geometry.dtype, (count,)), buffer
        )
        self.queue.do(step)
        self._await(step)
        traffic.moved(current_site(), role_of(buffer.block), down=got[0].numel() * got[0].element_size())
        return got[0]

    # --- at once ---

    def call(
        self, op: Operation, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], state: torch.Tensor | None
    ) -> Called:
        with self.lock:
            self.delivery.settle()
            values = list(values_in((*args, *[arg for _, arg in kwargs])))
            blocks.raise_spoiled(values)
            buffers: list[RemoteBuffer] = [value.concrete for value in values]
            foreign = [arg for arg in (*args, *[arg for _, arg in kwargs]) if isinstance(arg, torch.layout)]
            if any(layout is not torch.strided for layout in foreign):
                return Called(Returned(None, None, str(foreign[0])), [buffer.geometry for buffer in buffers], None)
            step = CallStep.of(op, args, kwargs, state, self.remote.take(RESULTS))
            step.reads = tuple(dict.fromkeys([buffer.block for buffer in buffers]))
            step.writes = step.reads if op.mutates else ()
            self.queue.do(step)
            try:
                self._await(step)
            except BaseException:
                self.queue.withdraw(step)
                raise
            if step.error is not None:
                raise step.error
            try:
                called = step.called(self.remote, buffers)
            except WireError as error:
                self.link.distrust(error)
                raise
            if step.extra:  # further handles of arguments
                self.queue.do(FreeStep(step.extra))
            return called

    # --- the host's tensors ---

    def upload(self, tensor: torch.Tensor) -> RemoteBuffer:
        with concretely():
            return self.adopt(snapshot(tensor))

    def adopt(self, tensor: torch.Tensor) -> RemoteBuffer:
        with self.lock:
            if tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
                raise AssertionError("an adopted tensor begins where its memory does, with its bits resolved")
            with concretely():
                return self._send(tensor, content_of(tensor))

    def load(self, tensor: torch.Tensor, path: str, offset: int) -> RemoteBuffer:
        if tensor.nbytes < LARGE:
            return self.upload(tensor)
        with self.lock:
            return self._send(tensor, FileContent(path, offset, tensor.nbytes))

    def _send(self, tensor: torch.Tensor, content: Content | FileContent) -> RemoteBuffer:
        geometry = interned(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype)
        block = Block(geometry, current_site())
        buffer = self.remote.made(self.remote.take(1), geometry, block, None)
        self.queue.do(UploadStep(buffer, content))
        self._unsent += content.nbytes
        if self._unsent >= _EAGER_BYTES:
            self._unsent = 0
            with contextlib.suppress(MaterializationError):  # of something before it: raised where that is read
                self.delivery.flush(streaming=True)
        return buffer

    def take(self, source: Engine, buffer: RemoteBuffer) -> RemoteBuffer | None:
        return exchange.take(self, source, buffer) if isinstance(source, RemoteEngine) else None

    @property
    def is_closed(self) -> bool:
        """Whether it was disconnected for good."""
        return self.delivery.closed

    @property
    def is_lost(self) -> bool:
        """Whether what the worker held is gone, or not all there again."""
        return self.delivery.is_lost

    def flush(self) -> None:
        """Send all that there is to do. Raises as ``run``."""
        with self.lock:
            self.delivery.settle()
            self.delivery.flush()

    def finish(self, step: Step) -> None:
        """Wait for a step. Raises as ``wait``, and what the step raised."""
        with self.lock:
            self._await(step)

    def cancel(self) -> None:
        """Have the worker stop what it was sent; what it has not done is pending again, where that can be."""
        with self.lock:
            self.delivery.cancel()

    def ask(self, request: Request) -> AskStep:
        """Ask the worker, without waiting."""
        with self.lock:
            self.delivery.settle()
            step = AskStep(request)
            self.queue.do(step)
            self.delivery.flush()
            return step

    @property
    def link(self) -> Link:
        """The session, now."""
        return self.delivery.link

    def revive(self) -> None:
        """See to it that the worker does what it can, unless another thread is at it."""
        if self.lock.acquire(blocking=False):
            try:
                self.delivery.revive()
            finally:
                self.lock.release()

    def memory(self, buffer: RemoteBuffer) -> tuple[int, int] | None:
        return buffer.block.identity, buffer.block.nbytes

    def resize(self, buffer: RemoteBuffer, nbytes: int) -> None:
        if nbytes > buffer.block.nbytes:
            raise RuntimeError(f"memory on a worker cannot grow, here from {buffer.block.nbytes} to {nbytes} bytes")

    def compiling(self) -> int:
        return 0

    def mark(self, buffer: RemoteBuffer, role: str) -> None:
        with self.lock:
            buffer.block.role, buffer.block.marked = role, True
            self._send_roles([buffer])

    def trim(self) -> None:
        pass

    def forget(self) -> None:
        with self.lock:  # what was sent keeps its program; the worker has them for all of its clients
            self._programs.forget()

    def close(self) -> None:
        """Say good-bye to the worker, having asked it for its last statistics if it still answers."""
        self.delivery.ending = True
        with contextlib.suppress(LazyTensorError, RuntimeError):  # at the end of the process, ZeroMQ may have ended
            self._last_stats = self._stats_at_once()
        self.delivery.close()

    def _stats_at_once(self) -> dict[str, Any]:
        """The same as ``worker_stats`` of a worker that is there; nothing is done to have it back."""
        with self.lock:
            until = time.monotonic() + _FAREWELL
            try:
                seq = 0 if self.delivery.closed else self.link.send([Stats()])
                while seq and not self.delivery.is_lost and time.monotonic() < until:
                    with contextlib.suppress(TimeoutError):
                        return as_stats(self.link.wait(seq, _LOOK) or {})
            except (LinkLost, RequestFailed):
                pass  # said already, or of no interest any more
            return self._last_stats

    def worker_stats(self) -> dict[str, Any]:
        """What the worker says of itself and of our session."""
        with self.lock:
            if self.delivery.closed:
                return self._last_stats
            self.queue.do(step := AskStep(Stats()))
            self._await(step)
            return as_stats(step.result or {})
