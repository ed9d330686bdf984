"""What a client has on a worker, and what its requests do with that: tensors by handle, what it collects from other
workers, and the groups that it is a member of.

Used by whoever has the state of the worker (``background.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.engine.plain import dtype_name, spec_of, spec_to
from marid.errors import WireError
from marid.execute.interrupted import Interrupted
from marid.execute.residency import ROLES
from marid.graph.arguments import map_leaves
from marid.graph.dispatch_state import concretely
from marid.recent import Recent
from marid.remote.wire import requests as ask
from marid.remote.wire.codec import SEGMENT_BYTES, SEGMENTS, SMALL_BYTES
from marid.remote.wire.fields import Handle
from marid.remote.wire.kernel_settings import KernelSettings
from marid.remote.wire.program_records import digest_of, unpacked
from marid.remote.wire.tensors import bytes_of_number, memory_of, packing_of, segments_of, tensor_of
from marid.remote.worker.budget import bytes_of
from marid.remote.worker.chunk_store import ChunkStore
from marid.remote.worker.collectives import Groups, WouldBlock
from marid.remote.worker.copies import Copies
from marid.remote.worker.executor import Executor
from marid.remote.worker.operators import check_call, operator_named

_LAST = 64  # programs of which the last run is remembered


class Missing(Exception):
    """A request names chunks or programs that the worker does not have (any more): the client has to send them."""


class Refused(Exception):
    """A request cannot be done for a reason that is none of an operator's."""


class Workspace:
    """What one client process has here. ``owner`` is whom its key belongs to; several clients may have one key."""

    def __init__(
        self, owner: bytes, executor: Executor, chunks: ChunkStore, copies: Copies, groups: Groups, reply_bytes: int
    ) -> None:
        self.owner = owner
        self.executor = executor
        self.copies = copies
        """What other workers send."""
        self.groups = groups
        """The process groups that it is a member of."""
        self.tensors: dict[int, torch.Tensor] = {}
        self.settings = KernelSettings()
        self.segments: list[Any] = []
        """Of the answer that is being made."""
        self.untaken = 0
        """Bytes of answers that the client has not taken yet."""
        self.at: Callable[[int], None] | None = None
        """Told of each operator that a program comes to."""
        self.leaving: Callable[[], int] = int
        """Bytes of answers that wait for a client that does not read."""
        self.others: Callable[[], int] = int
        """Bytes that other clients hold."""
        self.worker_stats: Callable[[], dict[str, Any]] = dict
        """What the worker counts."""
        self._chunks = chunks
        self._reply_bytes = reply_bytes
        self._last: Recent[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = Recent(_LAST)  # runs, by program

    def apply(self, request: ask.Request) -> Any:
        """Do what a request says; the answer, if it has one.

        Raises what an operator raises, ``Interrupted`` of a run that had begun, and ``WouldBlock`` when others have to
        do something first: then it is to be asked again.
        """
        return _DOES[type(request)](self, request)

    def clear(self) -> None:
        """The client has left."""
        self.tensors.clear()
        self.copies.clear()
        self.groups.clear()

    # --- runs ---

    def _again(self, request: ask.Again) -> None:
        last = self._last.get(request.program)
        if last is None:
            raise Missing("a program was not run before", [request.program])
        self._run(request.run(*last))

    def _run(self, request: ask.Run) -> None:
        self._last.put(request.program, (request.inputs, request.params))
        executor = self.executor
        if not executor.knows(request.program, request.geometry):
            raise Missing("a program or its geometry is not known", [request.program, request.geometry])
        tensors = self.tensors
        try:
            inputs = [tensors[handle] for handle in request.inputs]
        except KeyError as error:
            raise WireError(f"there is no tensor with handle {error}") from None
        if request.until is not None:
            results = executor.run_until(
                request.until, request.keep, request.program, request.geometry, inputs, request.params, self._held
            )
            for slot, tensor in zip(request.keep, results, strict=True):
                self.keep(request.base + slot, tensor)
            return
        params = list(request.params)
        prepared, results = executor.run(request.program, request.geometry, inputs, params, self._held, self.at)
        for slot, tensor in zip(prepared.program.output_slots, results, strict=True):
            self.keep(request.base + slot, tensor)

    def salvage(self, stop: Interrupted, request: ask.Run | ask.Again) -> dict[str, Any]:
        """Keep what a run that stopped has made: nothing runs twice, and nothing is lost. What to say of it."""
        taken = set(self.executor.inputs_of(request.program))
        existing = []
        for slot, tensor in stop.tensors.items():
            if slot not in taken and isinstance(tensor, torch.Tensor):
                self.tensors[request.base + slot] = tensor
                self.executor.residency.note(tensor)
                existing.append(slot)
        return {"index": stop.index, "finished": stop.finished, "existing": sorted(existing)}

    # --- programs ---

    def _program(self, request: ask.Program) -> None:
        self.executor.define(request.digest, _body(request.body, request.digest))

    def _geometry(self, request: ask.Geometry) -> None:
        body = _body(request.body, request.digest)
        if not self.executor.has_program(request.program):
            raise Missing("a program is not known", [request.program])
        self.executor.describe(request.program, request.digest, body)

    def _sizes(self, request: ask.Sizes) -> None:
        if not self.executor.knows(request.program, request.like):
            raise Missing("a geometry is not known", [request.program, request.like])
        self.executor.resize(request.program, request.like, request.digest, request.changes)

    def _configure(self, request: ask.Configure) -> None:
        self.executor.use_settings(request.settings)
        self.settings = request.settings

    # --- the client's tensors ---

    def _chunk(self, request: ask.Chunk) -> None:
        self._chunks.put(self.owner, request.digest, request.data)

    def _have(self, request: ask.Have) -> list[int]:
        return self._chunks.missing(self.owner, request.digests)

    def _load(self, request: ask.Load) -> list[int]:
        return self._chunks.load(self.owner, request.path, request.offset, request.nbytes, request.digests)

    def _upload(self, request: ask.Upload) -> None:
        packing = packing_of(request.shape, request.stride, request.dtype)
        self._reserve(packing.span * request.dtype.itemsize)
        pieces = list(request.data)
        if request.digests:
            found = [self._chunks.get(self.owner, digest) for digest in request.digests]
            lacking = [digest for digest, chunk in zip(request.digests, found, strict=True) if chunk is None]
            if lacking and packing.nbytes > self._chunks.capacity_for(len(found)):
                raise Refused(
                    f"a tensor of {packing.nbytes} bytes is uploaded in chunks, and the worker keeps at most "
                    f"{self._chunks.limit} bytes of chunks: start it with a larger --chunk-memory"
                )
            if lacking:
                raise Missing("chunks are not here", lacking)
            pieces = found
        made = tensor_of(pieces, packing, request.dtype, self.executor.accelerator)
        self.keep(request.handle, made, "input")
        if request.digests and made.device.type == "cpu" and packing.is_dense:
            self._chunks.adopt(self.owner, request.digests, made.untyped_storage())

    def _fetch(self, request: ask.Fetch) -> dict[str, Any]:
        tensor = self._tensor(request.handle)
        self.executor.reserve(0, [tensor], self._held)
        with concretely():
            if request.view is not None:
                offset, shape, stride = request.view
                tensor = tensor.as_strided(shape, stride, offset)  # which checks that it lies in memory
            tensor = tensor.resolve_conj().resolve_neg()
            if not tensor.dim():
                number = bytes_of_number(self.executor.accelerator.to_host(tensor))
                return {"tensor": [dtype_name(tensor.dtype), [], [], number]}
            packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
            if packing.nbytes > SEGMENT_BYTES * (SEGMENTS - len(self.segments)):
                raise Refused("a tensor of this size has to be fetched in pieces")
            waiting = self._untaken() + sum(memoryview(segment).nbytes for segment in self.segments)
            if waiting and waiting + packing.nbytes > self._reply_bytes:
                raise Refused("the client has not taken what it fetched before")
            data = self.executor.accelerator.to_host(packing.pack(tensor))
        described = [dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())]
        if packing.nbytes <= SMALL_BYTES:
            return {"tensor": [*described, bytes(memory_of(data))]}
        first = len(self.segments)
        self.segments += segments_of(data)
        return {"tensor": [*described, first, len(self.segments) - first]}

    def _free(self, request: ask.Free) -> None:
        for handle in request.handles:
            self.tensors.pop(handle, None)

    def _roles(self, request: ask.Roles) -> None:
        for handle, role in request.roles:
            if handle in self.tensors:
                self.executor.residency.hint(self.tensors[handle], ROLES.index(role))

    # --- operators, at once ---

    def _call(self, request: ask.Call) -> dict[str, Any]:
        op = operator_named(request.operator)
        check_call(op, request.args, request.kwargs)
        tensors: list[torch.Tensor] = []

        def concrete(leaf: Any) -> Any:
            if not isinstance(leaf, Handle):
                return leaf
            tensors.append(self._tensor(leaf.number))
            return tensors[-1]

        args = map_leaves(concrete, list(request.args), list)
        kwargs = {name: map_leaves(concrete, arg, list) for name, arg in request.kwargs}
        called = self.executor.call(op, args, kwargs, tensors, request.state, self._held)
        made: list[torch.Tensor] = []
        returned = map_leaves(lambda item: self._returned(item, request.base, made), called.returned)
        for index, tensor in enumerate(made):
            self.keep(request.base + index, tensor)
        geometries = [spec_to(spec_of(tensor)) for tensor in tensors]
        state = None if called.state is None else called.state.numpy().tobytes()
        return {"returned": returned, "arguments": geometries, "state": state}

    def _returned(self, item: Any, base: int, made: list[torch.Tensor]) -> Any:
        """A part of what an operator returned as plain data: ``{"t": [handle, spec, layout, same as, base]}`` for a
        tensor."""
        if hasattr(item, "layout"):
            if item.layout is not None:
                return {"t": [None, None, item.layout, None, None]}
            if min(item.buffer.shape, default=0) < 0:
                raise Refused("an operator returned a tensor with a negative size")
            made.append(item.buffer)
            return {"t": [base + len(made) - 1, spec_to(spec_of(item.buffer)), None, item.same_as, item.base]}
        if item is None or type(item) in (bool, int, float):
            return item
        if type(item) is complex:
            return {"c": [item.real, item.imag]}
        raise Refused(f"an operator returned a {type(item).__name__}, which cannot be sent")

    # --- with other workers ---

    def _pack(self, request: ask.Pack) -> None:
        tensor = self._tensor(request.source)
        self._reserve(tensor.numel() * tensor.itemsize, tensor)
        with concretely():
            tensor = tensor.resolve_conj().resolve_neg()
            packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
            data = self.executor.accelerator.to_host(packing.pack(tensor)).view(torch.uint8)
        self.keep(request.handle, data, None)  # others may come for it at any time

    def packed(self, handle: int, start: int, longest: int) -> tuple[memoryview, int] | None:
        """So many bytes of a packed tensor at most, from a place on, and how many it has; None where there is none.
        For the thread of the sockets."""
        tensor = self.tensors.get(handle)
        if tensor is None or tensor.dtype is not torch.uint8 or tensor.stride() != (1,):
            return None
        try:
            with self.executor.residency.here(tensor):  # where it was made again from a checkpoint, it may be away
                piece = tensor[start : start + longest].cpu().numpy()  # from here on its memory cannot be resized
        except (OSError, RuntimeError):  # nothing to read it into
            return None
        return piece.data, tensor.numel()

    def _take(self, request: ask.Take) -> None:
        packing = packing_of(request.shape, request.stride, request.dtype)
        arrival = self.copies.arrivals.get(request.ticket)
        if arrival is None:
            self._reserve(packing.span * request.dtype.itemsize)
            arrival = self.copies.expect(request.ticket, packing.nbytes)
        if not arrival.has_ended:
            raise WouldBlock(lambda: arrival.has_ended)
        self.copies.forget(request.ticket)
        if arrival.error is not None:
            raise arrival.error
        elements = self.executor.accelerator.to_device(arrival.data.view(request.dtype))
        self.keep(request.handle, packing.unpack(elements))

    def _group(self, request: ask.Meet | ask.Join | ask.Reduce | ask.Leave) -> int | None:
        return self.groups.do(request, self)

    def reduced(self, request: ask.Reduce) -> torch.Tensor:
        """The tensor that is to be reduced in place: a copy of what the request names."""
        source = self._tensor(request.source)
        self._reserve(source.numel() * source.itemsize, source)
        with concretely():
            return source.clone(memory_format=torch.contiguous_format)

    # --- tensors and memory ---

    def _tensor(self, handle: int) -> torch.Tensor:
        found = self.tensors.get(handle)
        if found is None:
            raise WireError(f"there is no tensor with handle {handle}")
        return found

    def keep(self, handle: int, tensor: Any, role: str | None = "activation") -> None:
        """A tensor was made for that handle; without a role it lies on the host, and stays there."""
        if not isinstance(tensor, torch.Tensor):
            raise WireError("a result that was to be kept is no tensor")
        if self.tensors.setdefault(handle, tensor) is not tensor:
            raise WireError(f"handle {handle} is taken")
        if role is not None:
            self.executor.residency.note(tensor, ROLES.index(role))

    def _reserve(self, nbytes: int, *used: torch.Tensor) -> None:
        self.executor.reserve(nbytes, used, self._held)

    def _held(self) -> int:
        return self.nbytes() + self._untaken() + self.others()

    def _untaken(self) -> int:
        """Bytes of answers that are kept, or have not left."""
        return max(self.untaken, self.leaving())

    def nbytes(self) -> int:
        """Bytes of the memory that its tensors lie in."""
        coming = [one.data for one in list(self.copies.arrivals.values())]
        return bytes_of([*self.tensors.values(), *coming])

    def _stats(self, _request: ask.Stats) -> dict[str, Any]:
        self.executor.residency.forget()
        return {
            "tensors": len(self.tensors),
            "bytes": self.nbytes(),
            "other_bytes": self.others(),
            "memory_limit": self.executor.memory_limit,
            "spilled_bytes": self.executor.residency.spilled,
            "spill_moved": self.executor.residency.moved,
            "chunks": len(self._chunks),
            "chunk_bytes": self._chunks.nbytes,
            "chunk_hits": self._chunks.hits,
            "programs": self.executor.programs,
            "runs": self.executor.runs,
            "graph_replays": self.executor.captured.replays,
            **self.worker_stats(),
        }


_DOES: dict[type[ask.Request], Callable[[Workspace, Any], Any]] = {
    ask.Run: Workspace._run,
    ask.Again: Workspace._again,
    ask.Fetch: Workspace._fetch,
    ask.Free: Workspace._free,
    ask.Upload: Workspace._upload,
    ask.Call: Workspace._call,
    ask.Program: Workspace._program,
    ask.Geometry: Workspace._geometry,
    ask.Sizes: Workspace._sizes,
    ask.Configure: Workspace._configure,
    ask.Chunk: Workspace._chunk,
    ask.Have: Workspace._have,
    ask.Load: Workspace._load,
    ask.Roles: Workspace._roles,
    ask.Pack: Workspace._pack,
    ask.Take: Workspace._take,
    ask.Meet: Workspace._group,
    ask.Join: Workspace._group,
    ask.Reduce: Workspace._group,
    ask.Leave: Workspace._group,
    ask.Stats: Workspace._stats,
}


def _body(data: Any, digest: bytes) -> bytes:
    body = unpacked(data)
    if digest_of(body) != digest:
        raise WireError("a body does not have the digest that it was sent with")
    return body
