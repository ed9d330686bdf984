"""The engine of a device that is a worker's: it sends programs, and brings back what is read.

Runs are kept until a value is read, and go out together with what brings that value, in one message; of a loop that
never reads they go out whenever the tape is cut, and the worker runs them while more is recorded. So ``run`` never
fails; like a flight in this process (``engine/flight.py``) it makes its nodes count as run, and takes them back if the
answer says that something before them has failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from marid.engine.inprocess import concretely
from marid.engine.protocol import Called, Engine, Geometry, GiveBack, Need, Returned
from marid.engine.room import refuse_beyond
from marid.engine.snapshot import snapshot
from marid.errors import LazyTensorError, MaterializationError, WireError
from marid.graph.node import (
    Draw,
    Node,
    Operation,
    Value,
    fail,
    failure_of,
    input_values,
    placed,
    values_in,
    without_frames,
)
from marid.graph.prepared import Prepared
from marid.graph.program import Task, bind
from marid.graph.twister import Twisters
from marid.remote import exchange
from marid.remote.answers import as_stats
from marid.remote.buffers import Block, RemoteBuffer, extent_of, geometry_of_spec
from marid.remote.checkpoint import keep_short
from marid.remote.contents import LARGE, Content, FileContent, content_of
from marid.remote.delivery import Connection, Delivery
from marid.remote.known import Programs, Sized
from marid.remote.link import Link, LinkLost, RequestFailed
from marid.remote.memory import Memory
from marid.remote.operators import operator_name
from marid.remote.requests import Handle, Request, Stats
from marid.remote.returns import Returns
from marid.remote.roles import note_roles, role_of
from marid.remote.specs import spec_from
from marid.remote.work import AskWork, CallWork, FetchWork, FreeWork, ReplayWork, RolesWork, RunWork, UploadWork, Work
from marid.report.traffic import traffic
from marid.semantics.scopes import current_site
from marid.uninterrupted import Uninterrupted

__all__ = ["RemoteEngine"]

_EAGER_BYTES = 4 << 20  # uploads are sent without being asked for once there are so many bytes of them
_USUAL = "activation"  # what a worker takes the memory of results for until it is told
_AHEAD = 8  # runs that were sent before anybody needs them, each of some thousand operations
_RESULTS = 1 << 12  # handles set aside for what an operator returns
_FAREWELL = 3.0  # seconds for a worker's last answer
_LOOK = 0.2  # between looks at whether it is there
_NODES = 4000  # in one program; a request has no more than 16,384 inputs or numbers


class RemoteEngine:
    """Runs programs on the worker of ``connection``, or on its successor when it was lost."""

    pieces = False
    elsewhere = True

    def __init__(self, connection: Connection) -> None:
        self.name = connection.name
        self.lock = threading.RLock()
        self.remote = Memory()
        self.delivery = Delivery(connection, self.remote)
        self._programs = Programs()
        self._twisters = Twisters()
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
        runs = [step for step in self.delivery.steps() if isinstance(step, RunWork)]
        if len(runs) > _AHEAD:
            self._await(runs[-1])
            keep_short(self.delivery)

    def _run(self, nodes: list[Node], give_back: GiveBack, room: int | None) -> int:
        """The same for as many nodes as fit into one request; the list must be the only one that holds them."""
        task = bind(nodes)
        self._refuse_spoiled(task)
        sized = self._programs.find(task)
        if room is not None:
            refuse_beyond(room, task, sized.known.program)
        base = self.remote.take(sized.known.program.slot_count)
        step = RunWork(sized, task.inputs, task.params, base, current_site())
        with Uninterrupted():
            self.remote.enter(sized, task.inputs, step)
            for value in task.outputs:
                value.concrete = self.remote.result(step, task.slots[value], value.node)
            note_roles(task, step)
            step.record(task, give_back)
            self.delivery.do(step)
        self._tell([*task.inputs, *[value.concrete for value in task.outputs]])
        return sized.transient_bytes

    def _tell(self, buffers: Sequence[Any]) -> None:
        """Say what memory is for, where the worker chooses by that what waits on the host."""
        if not self.delivery.link.welcome["limits"].get("spill"):
            return
        new = {
            b.block.identity: (b.handle, b.block)
            for b in buffers
            if (b.block.role or _USUAL) != (b.block.told or _USUAL)
        }
        if new:
            self.delivery.do(RolesWork(new.values()))

    def replay(self, prepared: Prepared, inputs: list[RemoteBuffer], params: list[Any]) -> list[RemoteBuffer]:
        with self.lock:
            self.delivery.settle()
            for buffer in inputs:
                buffer.block.check()
            sized: Sized | None = prepared.ready
            if sized is None:
                sized = prepared.ready = self._programs.find(prepared)
            base = self.remote.take(sized.known.program.slot_count)
            step = ReplayWork(sized, inputs, params, base, current_site(), prepared.nodes)
            slots = sized.known.program.output_slots
            with Uninterrupted():
                self.remote.enter(sized, inputs, step)
                outputs = [self.remote.result(step, slot, prepared.nodes[0]) for slot in slots]
                step.buffers += outputs
                self.delivery.do(step)
            return outputs

    # --- reading ---

    def wait(self, values: Sequence[Value] | None = None, need: Need = "run") -> bool:
        with self.lock:
            self.delivery.settle()
            buffers = [value.concrete for value in values or () if isinstance(value.concrete, RemoteBuffer)]
            self._raise_spoiled(values or ())
            if need == "buffer":
                return False
            wanted = [buffer for buffer in buffers if need == "value" and self._brought(buffer) is None]
            last: Work | None = None
            for buffer in wanted:
                last = self._ask(buffer)
            if last is None:
                last = next((step for step in reversed(self.delivery.steps()) if isinstance(step, RunWork)), None)
            if last is None:
                return False
            self._await(last)
            self._raise_spoiled(values or ())
            keep_short(self.delivery)
            return True

    def _await(self, step: Work) -> None:
        self._unsent = 0
        self.delivery.wait(step)

    def has(self, value: Value) -> bool:  # noqa: ARG002
        return False  # the worker has it

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

    def _ask(self, buffer: RemoteBuffer) -> Work:
        step = _Read(buffer)
        self.delivery.do(step)
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
        step = FetchWork(
            buffer.handle, buffer.block, (0, (count,), (1,)), got.append, (buffer.geometry.dtype, (count,)), buffer
        )
        self.delivery.do(step)
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
            self._raise_spoiled(values)
            buffers: list[RemoteBuffer] = [value.concrete for value in values]
            foreign = [arg for arg in (*args, *[arg for _, arg in kwargs]) if isinstance(arg, torch.layout)]
            if any(layout is not torch.strided for layout in foreign):
                return Called(Returned(None, None, str(foreign[0])), [buffer.geometry for buffer in buffers], None)
            named = tuple([(name, placed(arg, _handle_of)) for name, arg in kwargs])
            given = None if state is None else bytes(state.tolist())
            step = CallWork(
                operator_name(op.func),
                tuple([placed(arg, _handle_of) for arg in args]),
                named,
                given,
                self.remote.take(_RESULTS),
                current_site(),
            )
            step.reads = tuple(dict.fromkeys([buffer.block for buffer in buffers]))
            step.writes = step.reads if op.mutates else ()
            self.delivery.do(step)
            try:
                self._await(step)
            except BaseException:
                self.delivery.withdraw(step)
                raise
            if step.error is not None:
                raise step.error
            return self._called(step, buffers)

    def _called(self, step: CallWork, buffers: list[RemoteBuffer]) -> Called:
        parts = Returns(self.remote, buffers, step)
        try:
            returned = parts.read(step.result["returned"])
            geometries = [geometry_of_spec(spec_from(spec)) for spec in step.result["arguments"]]
            state = step.result["state"]
            after = None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)
            if len(geometries) != len(buffers):
                raise WireError("a call has as many arguments as it was given")
        except (LookupError, TypeError, ValueError, WireError) as error:
            problem = WireError(f"what {step.operator} returned cannot be read: {error}")
            self.link.distrust(problem)
            raise problem from None
        for buffer, geometry in zip(buffers, geometries, strict=True):
            if geometry != buffer.geometry:
                buffer.geometry = geometry
                buffer.block.nbytes = max(buffer.block.nbytes, extent_of(geometry))
                self.remote.alive[buffer.handle] = buffer.block, geometry
        step.makes, step.handles = tuple(parts.blocks), (*parts.handles, *parts.extra)
        if parts.extra:  # further handles of arguments
            self.delivery.do(FreeWork(tuple(parts.extra)))
        return Called(returned, geometries, after)

    # --- the host's tensors ---

    def upload(self, tensor: torch.Tensor) -> RemoteBuffer:
        with concretely():
            return self.adopt(snapshot(tensor))

    def adopt(self, tensor: torch.Tensor) -> RemoteBuffer:
        with self.lock:
            if tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
                raise AssertionError("an adopted tensor begins where its memory does, with its bits resolved")
            geometry = Geometry(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype)
            with concretely():
                return self._send(geometry, content_of(tensor))

    def load(self, tensor: torch.Tensor, path: str, offset: int) -> RemoteBuffer:
        if tensor.nbytes < LARGE:
            return self.upload(tensor)
        content = FileContent(path, offset, tensor.nbytes)
        with self.lock:
            return self._send(Geometry(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype), content)

    def _send(self, geometry: Geometry, content: Content | FileContent) -> RemoteBuffer:
        block = Block(geometry, current_site())
        buffer = self.remote.made(self.remote.take(1), geometry, block, None)
        self.delivery.do(UploadWork(buffer, content))
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

    def finish(self, step: Work) -> None:
        """Wait for a step. Raises as ``wait``, and what the step raised."""
        with self.lock:
            self._await(step)

    def cancel(self) -> None:
        """Have the worker stop what it was sent; what it has not done is pending again, where that can be."""
        with self.lock:
            self.delivery.cancel()

    def ask(self, request: Request) -> AskWork:
        """Ask the worker, without waiting."""
        with self.lock:
            self.delivery.settle()
            step = AskWork(request)
            self.delivery.do(step)
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

    def generator(self, draw: Draw) -> torch.Generator:
        with self.lock:
            return self._twisters.at(draw)

    def compiling(self) -> int:
        return 0

    def mark(self, buffer: RemoteBuffer, role: str) -> None:
        with self.lock:
            buffer.block.role, buffer.block.marked = role, True
            self._tell([buffer])

    def trim(self) -> None:
        pass

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
            step = AskWork(Stats())
            self.delivery.do(step)
            self._await(step)
            return as_stats(step.result or {})

    def _refuse_spoiled(self, task: Task) -> None:
        """Fail a node that needs what cannot be had, and raise why."""
        if all(buffer is not None and buffer.block.error is None for buffer in task.inputs):
            return
        for node in task.nodes:
            for value in input_values(node):
                known = isinstance(value.concrete, RemoteBuffer)
                error = value.concrete.block.error if known else failure_of(value.node)
                if error is not None:
                    fail(node, error)
                    raise without_frames(error)

    def _raise_spoiled(self, values: Sequence[Value]) -> None:
        """Raise why one of these values cannot be had; whoever asks for it later gets that too."""
        for value in values:
            if isinstance(value.concrete, RemoteBuffer) and value.concrete.block.error is not None:
                error = value.concrete.block.error
                value.concrete = None
                fail(value.node, error)
                raise without_frames(error)


class _Read(FetchWork):
    """Bring a tensor for whoever reads it next."""

    def __init__(self, buffer: RemoteBuffer) -> None:
        super().__init__(buffer.handle, buffer.block, None, None, (buffer.geometry.dtype, buffer.geometry.shape))
        self._buffer = buffer
        self._version = buffer.block.version
        self.site = current_site()

    def done(self, result: torch.Tensor) -> None:
        super().done(result)
        tensor = result
        self._buffer.brought = self._version, tensor
        traffic.moved(self.site, role_of(self._buffer.block), down=tensor.numel() * tensor.element_size())


def _handle_of(value: Value) -> Handle:
    return Handle(value.concrete.handle)
