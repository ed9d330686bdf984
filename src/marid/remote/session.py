"""A session: what one client process has on a worker, and how its requests are applied, each exactly once.

Requests have sequence numbers. The next one is applied, one that was applied before is answered from what is kept of
its answer, and one that is too early is refused. When a request fails the session *halts*: what was sent behind it is
refused, because the client took for granted that it would succeed, until the client goes on in a new epoch.

A session is used on the thread that runs programs; the thread of the sockets only puts messages into ``inbox``.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from marid.engine.inprocess import concretely
from marid.errors import WireError
from marid.execute.interrupted import Interrupted
from marid.remote import requests as ask
from marid.remote.chunks import ChunkStore
from marid.remote.copies import Copies
from marid.remote.groups import Groups
from marid.remote.machine import Machine, TooLarge, Warned, bytes_of
from marid.remote.operators import operator_named
from marid.remote.packing import packing_of
from marid.remote.programs import digest_of
from marid.remote.request_readers import read_requests
from marid.remote.residency import ORDER
from marid.remote.specs import spec_of, spec_to
from marid.remote.switches import Switches, apply
from marid.remote.tensors import segments_of, tensor_of
from marid.remote.waits import Waits
from marid.remote.wire import SEGMENT_BYTES, SEGMENTS, dtype_name

__all__ = ["Answer", "Cancelled", "Message", "Session"]

_TEXT = 8192  # characters of an error that are sent
_WARNINGS = 16
_LAST = 64  # programs of which the last run is remembered


class Cancelled(BaseException):
    """The client has asked to stop what runs for it."""


class Missing(Exception):
    """A request names chunks or programs that the worker does not have (any more): the client has to send them."""


class Refused(Exception):
    """A request cannot be done for a reason that is none of an operator's."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a client: where its requests begin, what they are, and up to where it has our answers."""

    epoch: int
    seq: int
    acked: int
    requests: Any
    segments: list[Any]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back: fields of a header, and segments."""

    fields: dict[str, Any]
    segments: list[Any]
    nbytes: int


class Session:
    """What one client process has here. ``owner`` is whom its key belongs to; several clients may have one key."""

    def __init__(self, number: bytes, owner: bytes, machine: Machine, chunks: ChunkStore, reply_bytes: int) -> None:
        self.number = number
        self.owner = owner
        self.tensors: dict[int, torch.Tensor] = {}
        self.applied = 0
        self.epoch = 0
        self.switches = Switches()
        self._last: OrderedDict[bytes, tuple[tuple[int, ...], tuple[Any, ...]]] = OrderedDict()  # runs, by program
        self.failure: dict[str, Any] | None = None
        # Of the thread of the sockets:
        self.inbox: deque[Message] = deque()
        self.inbox_bytes = 0
        self.scheduled = False
        self.route: bytes = b""
        self.seen = time.monotonic()
        self._ended = False
        self._cancelled = 0, 0  # epoch, and the newest request of it that is to be stopped
        self._machine = machine
        self._chunks = chunks
        self._reply_bytes = reply_bytes
        self._answers: OrderedDict[int, Answer] = OrderedDict()  # with payload, by the last request they answer
        self._answer_bytes = 0
        self._resident = 0
        self.others: Callable[[], int] = int
        """Bytes that other sessions hold."""
        self.worker_stats: Callable[[], dict[str, Any]] = dict
        """What the worker counts."""
        self.copies: Copies | None = None
        """What other workers send."""
        self.groups: Groups | None = None
        """The process groups that it is a member of."""
        self._running = 0
        self._begun: tuple[list[list[Any]], list[Any], list[str]] | None = None
        """What a message that has to wait has done by now: results, segments, warnings."""
        self.waiting: Waits | None = None
        """What it waits for."""

    @property
    def is_cancelled(self) -> bool:
        """Whether what runs now is to be stopped."""
        return self._running > 0 and self._is_cancelled(self._running)

    def _is_cancelled(self, seq: int) -> bool:
        epoch, through = self._cancelled
        return self._ended or (epoch == self.epoch and seq <= through)

    def cancel(self, epoch: int, through: int) -> None:
        """Let what runs of an epoch, and is to run, end with ``Cancelled`` up to a request. What the client sends again
        in the next epoch has the same numbers, and is not meant."""
        self._cancelled = max(self._cancelled, (epoch, through))

    def end(self) -> None:
        """Let all that is still to run end."""
        self._ended = True

    @property
    def may_go_on(self) -> bool:
        """Whether what it waits for is over, or not wanted any more."""
        return self.waiting is None or self._is_cancelled(self.applied + 1) or self.waiting.is_over()

    # --- exactly once ---

    def answer(self, message: Message) -> Answer | None:
        """Apply what is new in a message; what to send back. None when it has to wait (``waiting``): to be called again
        with the same message, before any other, once it ``may_go_on``."""
        self._forget(message.acked)
        if message.epoch == self.epoch + 1 and self.failure is not None:
            self.applied, self.epoch, self.failure = self.failure["seq"], message.epoch, None
        if message.epoch != self.epoch:
            return self._plain({"stale": True}, 0)
        kept = self._answers.get(message.seq)
        if kept is not None:
            return kept
        last = message.seq + len(message.requests) - 1 if type(message.requests) is list else message.seq
        if last <= self.applied:
            return self._plain({}, last)
        if self.failure is not None:
            return self._plain({"error": self.failure}, self.applied)
        if message.seq > self.applied + 1:
            return self._plain({"expected": self.applied + 1}, 0)
        try:
            requests = read_requests(message.requests, message.segments)
        except WireError as error:
            self._halt(max(message.seq, self.applied + 1), error)
            return self._plain({"error": self.failure}, self.applied)
        return self._apply(message, requests)

    def _apply(self, message: Message, requests: list[ask.Request]) -> Answer | None:
        results, segments, warned = self._begun or ([], [], [])
        self._begun = self.waiting = None
        apply(self.switches)  # another session may have others
        for seq, request in enumerate(requests, message.seq):
            if seq <= self.applied:
                continue
            try:
                if self._is_cancelled(seq):
                    raise Cancelled("the client asked to stop")
                self._running = seq
                if isinstance(request, ask.Again):
                    request = self._meant(request)
                with Warned() as warnings:
                    value = self._one(request, segments)
                warned += warnings.texts
            except Waits as waits:
                self._begun, self.waiting = (results, segments, warned), waits
                return None
            except (Exception, Cancelled) as error:  # an operator may raise anything; it goes to the client
                self._halt(seq, error, request)
                break
            finally:
                self._running = 0
            self.applied = seq
            if value is not None:
                results.append([seq, value])
        fields: dict[str, Any] = {"results": results}
        if self.failure is not None:
            fields["error"] = self.failure
        if warned:
            fields["warnings"] = [text[:_TEXT] for text in warned[:_WARNINGS]]
        if not results:
            return self._plain(fields, self.applied)
        nbytes = sum(memoryview(segment).nbytes for segment in segments)
        answer = Answer({**fields, **self._state(self.applied)}, segments, nbytes)
        self._answers[message.seq] = answer
        self._answer_bytes += nbytes
        return answer

    def give_up(self, error: WireError) -> Answer:
        """What to send in place of an answer that is too long to be sent."""
        seq = self.applied + 1 if self.failure is None else self.failure["seq"]
        self.failure = {"seq": seq, "type": "WireError", "text": str(error)}
        return self._plain({"error": self.failure}, self.applied)

    def _plain(self, fields: dict[str, Any], applied: int) -> Answer:
        return Answer({**fields, **self._state(applied)}, [], 0)

    def _state(self, applied: int) -> dict[str, Any]:
        """``applied`` is how far the client has its answers with this one: what was lost on the way comes again."""
        return {"kind": "reply", "epoch": self.epoch, "applied": applied}

    def _forget(self, acked: int) -> None:
        while self._answers:
            first, answer = next(iter(self._answers.items()))
            if first > acked:
                return
            del self._answers[first]
            self._answer_bytes -= answer.nbytes

    def _halt(self, seq: int, error: BaseException, request: ask.Request | None = None) -> None:
        failure: dict[str, Any] = {"seq": seq}
        if isinstance(error, Interrupted):
            assert isinstance(request, ask.Run)
            failure |= self._salvage(error, request)
            error = error.error
        if isinstance(error, Missing):
            failure["missing"] = error.args[1]
        if isinstance(error, TooLarge):
            failure |= {"nbytes": error.nbytes, "room": error.room, "held": [list(one) for one in error.held]}
        if isinstance(error, WireError):
            self._machine.refused += 1
        failure |= {"type": _type_of(error), "text": str(error)[:_TEXT]}
        self.failure = failure

    def _salvage(self, stop: Interrupted, request: ask.Run) -> dict[str, Any]:
        """Keep what a run that stopped has made: nothing runs twice, and nothing is lost."""
        taken = set(self._machine.inputs_of(request.program))
        existing = []
        for slot, tensor in stop.tensors.items():
            if slot not in taken and isinstance(tensor, torch.Tensor):
                self.tensors[request.base + slot] = tensor
                self._machine.residency.note(tensor)
                existing.append(slot)
        lost = [[slot, _type_of(error), str(error)[:200]] for slot, error in stop.lost.items()]
        return {"index": stop.index, "finished": stop.finished, "existing": sorted(existing), "lost": lost}

    # --- requests ---

    def _meant(self, request: ask.Again) -> ask.Run:
        last = self._last.get(request.program)
        if last is None:
            raise Missing("a program was not run before", [request.program])
        return request.run(*last)

    def _one(self, request: ask.Request, segments: list[Any]) -> Any:
        if isinstance(request, ask.Run):
            self._last[request.program] = request.inputs, request.params
            self._last.move_to_end(request.program)
            if len(self._last) > _LAST:
                self._last.popitem(last=False)
            return self._run(request)
        if isinstance(request, ask.Free):
            for handle in request.handles:
                self.tensors.pop(handle, None)
            return None
        if isinstance(request, ask.Fetch):
            return self._fetch(request, segments)
        if isinstance(request, ask.Upload):
            return self._upload(request)
        if isinstance(request, ask.Chunk):
            return self._chunks.put(self.owner, request.digest, request.data)
        if isinstance(request, ask.Have):
            return self._chunks.missing(self.owner, request.digests)
        if isinstance(request, ask.Program):
            _check_digest(request.digest, request.body)
            return self._machine.define(request.digest, request.body)
        if isinstance(request, ask.Geometry):
            _check_digest(request.digest, request.body)
            if not self._machine.has_program(request.program):
                raise Missing("a program is not known", [request.program])
            return self._machine.describe(request.program, request.digest, request.body)
        if isinstance(request, ask.Sizes):
            if not self._machine.knows(request.program, request.like):
                raise Missing("a geometry is not known", [request.program, request.like])
            return self._machine.resize(request.program, request.like, request.digest, request.changes)
        if isinstance(request, ask.Call):
            return self._call(request)
        if isinstance(request, ask.Load):
            return self._chunks.load(self.owner, request.path, request.offset, request.nbytes, request.digests)
        if isinstance(request, ask.Roles):
            for handle, role in request.roles:
                if handle in self.tensors:
                    self._machine.residency.hint(self.tensors[handle], ORDER.index(role))
            return None
        if isinstance(request, ask.Switch):
            apply(request.switches)
            self.switches = request.switches
            return None
        if isinstance(request, ask.Pack):
            return self._pack(request)
        if isinstance(request, ask.Take):
            return self._take(request)
        if isinstance(request, (ask.Meet, ask.Join, ask.Reduce, ask.Leave)):
            assert self.groups is not None
            return self.groups.do(request, self)
        return self.stats()

    def _run(self, request: ask.Run) -> None:
        machine = self._machine
        if not machine.knows(request.program, request.geometry):
            raise Missing("a program or its geometry is not known", [request.program, request.geometry])
        tensors = self.tensors
        try:
            inputs = [tensors[handle] for handle in request.inputs]
        except KeyError as error:
            raise WireError(f"there is no tensor with handle {error}") from None
        if request.until is not None:
            results = machine.run_until(
                request.until, request.keep, request.program, request.geometry, inputs, request.params, self._held
            )
            for slot, tensor in zip(request.keep, results, strict=True):
                self.keep(request.base + slot, tensor)
            return
        prepared, results = machine.run(request.program, request.geometry, inputs, list(request.params), self._held)
        for slot, tensor in zip(prepared.program.output_slots, results, strict=True):
            self.keep(request.base + slot, tensor)

    def keep(self, handle: int, tensor: Any, role: str | None = "activation") -> None:
        """A tensor was made for that handle; without a role it lies on the host, and stays there."""
        if not isinstance(tensor, torch.Tensor):
            raise WireError("a result that was to be kept is no tensor")
        if self.tensors.setdefault(handle, tensor) is not tensor:
            raise WireError(f"handle {handle} is taken")
        if role is not None:
            self._machine.residency.note(tensor, ORDER.index(role))

    def _upload(self, request: ask.Upload) -> None:
        packing = packing_of(request.shape, request.stride, request.dtype)
        self._make_room(packing.span * request.dtype.itemsize)
        pieces = list(request.data)
        if request.digests:
            found = [self._chunks.get(self.owner, digest) for digest in request.digests]
            lacking = [digest for digest, chunk in zip(request.digests, found, strict=True) if chunk is None]
            if lacking and packing.nbytes > self._chunks.room_for(len(found)):
                raise Refused(
                    f"a tensor of {packing.nbytes} bytes is uploaded in chunks, and the worker keeps at most "
                    f"{self._chunks.limit} bytes of chunks: start it with a larger --chunk-memory"
                )
            if lacking:
                raise Missing("chunks are not here", lacking)
            pieces = found
        self.keep(request.handle, tensor_of(pieces, packing, request.dtype, self._machine.device), "input")

    def _fetch(self, request: ask.Fetch, segments: list[Any]) -> dict[str, Any]:
        tensor = self._tensor(request.handle)
        self._machine.make_room(0, [tensor], self._held)
        with concretely():
            if request.view is not None:
                offset, shape, stride = request.view
                tensor = tensor.as_strided(shape, stride, offset)  # which checks that it lies in memory
            tensor = tensor.resolve_conj().resolve_neg()
            packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
            if packing.nbytes > SEGMENT_BYTES * (SEGMENTS - len(segments)):
                raise Refused("a tensor of this size has to be fetched in pieces")
            if self._answer_bytes and self._answer_bytes + packing.nbytes > self._reply_bytes:
                raise Refused("the client has not taken what it fetched before")
            data = packing.pack(tensor).cpu()
        first = len(segments)
        segments += segments_of(data)
        shape, stride = list(tensor.shape), list(tensor.stride())
        return {"tensor": [dtype_name(tensor.dtype), shape, stride, first, len(segments) - first]}

    def _call(self, request: ask.Call) -> dict[str, Any]:
        op = operator_named(request.operator)
        tensors: list[torch.Tensor] = []
        args = [self._argument(arg, tensors) for arg in request.args]
        kwargs = {name: self._argument(arg, tensors) for name, arg in request.kwargs}
        called = self._machine.call(op, args, kwargs, tensors, request.state, self._held)
        made: list[torch.Tensor] = []
        returned = self._returned(called.returned, request.base, made)
        for index, tensor in enumerate(made):
            self.keep(request.base + index, tensor)
        geometries = [spec_to(spec_of(tensor)) for tensor in tensors]
        state = None if called.state is None else called.state.numpy().tobytes()
        return {"returned": returned, "arguments": geometries, "state": state}

    def _argument(self, arg: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(arg, ask.Handle):
            tensors.append(self._tensor(arg.number))
            return tensors[-1]
        if isinstance(arg, list):
            return [self._argument(item, tensors) for item in arg]
        return list(arg) if isinstance(arg, tuple) else arg

    def _returned(self, item: Any, base: int, made: list[torch.Tensor]) -> Any:
        """What an operator returned as plain data: ``{"t": [handle, spec, layout, same as, base]}`` for a tensor."""
        if isinstance(item, list):
            return [self._returned(part, base, made) for part in item]
        if hasattr(item, "layout"):
            if item.layout is not None:
                return {"t": [None, None, item.layout, None, None]}
            made.append(item.buffer)
            return {"t": [base + len(made) - 1, spec_to(spec_of(item.buffer)), None, item.same_as, item.base]}
        if item is None or type(item) in (bool, int, float):
            return item
        if type(item) is complex:
            return {"c": [item.real, item.imag]}
        raise Refused(f"an operator returned a {type(item).__name__}, which cannot be sent")

    def _pack(self, request: ask.Pack) -> None:
        tensor = self._tensor(request.source)
        with concretely():
            tensor = tensor.resolve_conj().resolve_neg()
            packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
            self._make_room(packing.nbytes)
            data = packing.pack(tensor).cpu().view(torch.uint8)
        self.keep(request.handle, data, None)  # collected by the thread of the sockets, at any time

    def _take(self, request: ask.Take) -> None:
        assert self.copies is not None
        packing = packing_of(request.shape, request.stride, request.dtype)
        arrival = self.copies.arrivals.get(request.ticket)
        if arrival is None:
            self._make_room(packing.span * request.dtype.itemsize)
            arrival = self.copies.expect(request.ticket, packing.nbytes)
        if not arrival.has_ended:
            raise Waits(lambda: arrival.has_ended)
        self.copies.forget(request.ticket)
        if arrival.error is not None:
            raise arrival.error
        elements = arrival.data.view(request.dtype).to(self._machine.device)
        self.keep(request.handle, packing.unpack(elements))

    def reduced(self, request: ask.Reduce) -> torch.Tensor:
        """The tensor that is to be reduced in place: a copy of what the request names."""
        source = self._tensor(request.source)
        self._make_room(source.numel() * source.itemsize)
        with concretely():
            return source.clone(memory_format=torch.contiguous_format)

    def _tensor(self, handle: int) -> torch.Tensor:
        found = self.tensors.get(handle)
        if found is None:
            raise WireError(f"there is no tensor with handle {handle}")
        return found

    # --- memory ---

    def _make_room(self, nbytes: int) -> None:
        self._machine.make_room(nbytes, (), self._held)

    def _held(self) -> int:
        return self.nbytes() + self.others()

    def nbytes(self) -> int:
        """Bytes of the memory that its tensors lie in."""
        coming = [] if self.copies is None else [one.data for one in list(self.copies.arrivals.values())]
        return bytes_of([*self.tensors.values(), *coming])

    def stats(self) -> dict[str, Any]:
        """What it holds, and what the worker has done."""
        self._machine.residency.forget()
        return {
            "tensors": len(self.tensors),
            "bytes": self.nbytes(),
            "other_bytes": self.others(),
            "memory_limit": self._machine.memory_limit,
            "spilled_bytes": self._machine.residency.spilled,
            "spill_moved": self._machine.residency.moved,
            "chunks": len(self._chunks),
            "chunk_bytes": self._chunks.nbytes,
            "chunk_hits": self._chunks.hits,
            "programs": self._machine.programs,
            "runs": self._machine.runs,
            **self.worker_stats(),
        }


def _check_digest(digest: bytes, body: Any) -> None:
    if digest_of(body) != digest:
        raise WireError("a body does not have the digest that it was sent with")


def _type_of(error: BaseException) -> str:
    return type(error).__name__
