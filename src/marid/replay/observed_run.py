"""Running a function's Python under observation, and describing what it did."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import torch
from torch.utils import _pytree

from marid.engine.protocol import Engine
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.observe import Observer, Upload, observing
from marid.frontend.tensor import LazyTensor
from marid.graph.analysis import analysis_of
from marid.graph.node import Node, Spec, root_of
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task, bind
from marid.graph.tape import Tape
from marid.native import module
from marid.replay.arguments import Call, places_of, same_as_state
from marid.replay.autograd_function import independent_among, record_backwards
from marid.replay.conversions import converting
from marid.replay.counters import rated_groups
from marid.replay.draws import Streams
from marid.replay.gradients import LIVE, graph_of, kept_by_autograd
from marid.replay.guards import Guards, outcomes_of, refuse_unrepeatable
from marid.replay.host import HostWatch
from marid.replay.impure import ImpureWatch
from marid.replay.pending import run_needed
from marid.replay.places import ChangesState, Places, Refused, numbers_of
from marid.replay.reachable import reach
from marid.replay.recording import CONSTANT, GRAD, HOST, OUTPUT, READ, TENSOR, Assigned, Origin, Recording, Ref
from marid.replay.returned_reads import returned_reads
from marid.replay.schedules import ScheduleLog, is_followed
from marid.replay.state_check import Place, Snapshot
from marid.replay.waiting import Computed, ReturnedRead, Waiting, reads_in

_GLOBAL_HOOKS = [
    (f"torch's {name}", hooks)
    for kind in (torch.nn.Module, torch.optim.Optimizer)
    for name, hooks in vars(sys.modules[kind.__module__]).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]


def grad_of(tensor: Any) -> Any:
    """The gradient of a tensor that can have one."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _ran() -> list[int]:
    """How many operations have run, of each device."""
    return [handles.tape(index).run for index in range(handles.device_count)]


class Run:
    """One run of a function's Python. ``recording`` is what it did, or None with ``refusal`` saying why not.

    Holds the work that is pending: drop it soon. A recording ``for_file`` has no reads that wait, no tests of numbers,
    and no learning rates that may be others.
    """

    def __init__(self, function: Any, call: Call, state: Any, for_file: bool = False) -> None:
        self._function = function
        self._call = call
        self._for_file = for_file
        self.recording: Recording | None = None
        self.refusal: Refused | None = None
        root = ("the function", function) if state is None else ("state", state)
        arguments = [("an argument", other) for other in call.others]
        self._reached = reach([root, *arguments, *_GLOBAL_HOOKS], state is None)
        self._follows_rates = not (for_file or self._reached.looks_at_rates)
        follows = self._follows_rates
        rated = rated_groups(self._reached.optimizers) if follows else []
        followed = [one for one in self._reached.schedules if is_followed(one)] if follows else []
        self._snapshot = Snapshot(self._reached, rated, followed)
        self._schedules = ScheduleLog(followed, rated)
        self._tensors = [*call.lazy, *self._reached.lazy]
        self._host = [*call.host, *self._reached.host]
        self._streams = Streams(self._reached.generators, self._reached.drawing)
        self._grads = [grad_of(tensor) for tensor in self._tensors]
        self._start = [self._begin(index) for index in range(handles.device_count)]
        self._ran = _ran()
        self._values = [tensor._value for tensor in self._tensors]
        self._specs: list[Spec] = [value.spec for value in self._values]
        self._histories = [tensor.grad_fn for tensor in self._tensors]
        self._versions = [_version(tensor) for tensor in (*self._tensors, *self._grads)]
        self._host_versions = [_version(tensor) for tensor in self._host]
        self._flags = module.tensor_flags(self._tensors)
        self._looks = module.host_looks(self._reached.host)
        self._task: Task | None = None
        self._backwards: list[Task] = []
        self._replaced: list[tuple[Place, int, Any]] = []

    def _begin(self, device: int) -> int:
        """Have there what the function works on, as at a replay; the place on the tape from which on it records."""
        known = [one for one in (*self._tensors, *self._grads) if one is not None]
        run_needed(device, [one for one in known if one._value.spec.device == device], ())
        return next(handles.tape(device).sequence)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], refuse_reads: bool) -> Any:
        """Run the Python; its result, with reads that wait in it (``values_read``). What it raises leaves as it is."""
        host = HostWatch(self._host, self._reached.host, self._reached.optimizers, self._follows_rates)
        impure = ImpureWatch(self._reached.paused, self._schedules.called)
        self._guards = Guards(host, impure)
        guards = {} if self._for_file or refuse_reads else {"outcome": self._guards.outcome}
        try:
            with (
                contextlib.nullcontext() if self._for_file else converting(self._function),
                returned_reads(None if self._for_file else _CALL) as waiting,
                observing(refuse_reads, **guards) as seen,
                host,
                impure,
            ):
                result = self._function(*args, **kwargs)
        finally:
            self._guards.close()
            for index in range(handles.device_count):
                handles.tape(index).budget = 0  # not cut while the function ran: measured again at the next operation
        try:
            self._check(seen, host, impure)
            if self._call.is_other(args, kwargs):
                raise Refused("it changes a list or dict among its arguments, or a mode of PyTorch")
            self._refuse_known(result)
            leaves, structure = _pytree.tree_flatten(result, is_leaf=lambda one: isinstance(one, torch.Size))
            if {id(one()) for one in waiting} - {id(one) for leaf in leaves for one in reads_in(leaf)} - {id(None)}:
                raise Refused("it keeps a value that it reads")
            with self._engine().lock:
                if not self._describe(leaves, structure, seen, host):
                    gc.collect()  # results in reference cycles that nobody holds
                    self._describe(leaves, structure, seen, host)
        except Refused as refused:
            self.refusal = refused.with_traceback(None)
        return result

    def prepare(self) -> list[Prepared] | None:
        """The programs of the run, to be run again: its own, and those of its derivatives. None where another thread
        has run some of it by now."""
        assert self._task is not None
        tasks = (self._task, *self._backwards)
        with self._engine().lock:
            if any(node.args is None for task in tasks for node in task.nodes):
                return None
            return [Prepared.of(task) for task in tasks]

    def written(self, program: Program, stop: int | None = None) -> list[int]:
        """Which of the tensors that the recording has used lie in memory that the run's own ``program`` writes, before
        instruction ``stop``."""
        assert self._task is not None
        assert self.recording is not None
        values = list(self._task.slots)
        slots = {slot for slots in analysis_of(program).writes[:stop] for slot in slots}
        roots = {root_of(values[slot]) for slot in slots}
        used = [(self._tensors if kind == TENSOR else self._grads)[index] for kind, index in self.recording.used]
        return [position for position, tensor in enumerate(used) if root_of(tensor._value) in roots]

    def _engine(self) -> Engine:
        return engine_of(self._tape().device)

    # --- what cannot be replayed ---

    def _check(self, seen: Observer, host: HostWatch, impure: ImpureWatch) -> None:
        if seen.reads:
            raise Refused(seen.reads[0], for_good=True)
        if self._reached.too_much is not None:
            raise Refused(f"it reaches {self._reached.too_much}", for_good=True)
        refusal = host.refusal or self._streams.refusal(seen.draws) or impure.refusal or self._schedules.refusal
        if refusal is not None:
            raise Refused(refusal)
        self._replaced = [] if self._for_file else self._replaced_state()
        for place, _, _ in self._replaced:
            self._snapshot.expect(place.index, place.get())
        changed = self._snapshot.change() or self._schedules.rate_changed()
        if changed is not None:
            raise ChangesState(f"it changes Python state: {changed}")
        if module.tensor_flags(self._tensors) != self._flags or module.host_looks(self._reached.host) != self._looks:
            raise ChangesState("it changes which tensors require gradients, have hooks or have attributes")
        written = host.counters.written
        first = len(self._call.host)
        for index, (tensor, before) in enumerate(zip(self._host, self._host_versions, strict=True)):
            # Under a dispatch mode, operators on lists do not note that tensors changed.
            if _version(tensor) - before in (0, written.get(index - first, 0)):
                continue
            raise Refused("it changes a tensor of the CPU in place")
        before = zip(self._tensors, self._values, self._specs, self._histories, strict=True)
        for tensor, value, spec, history in before:
            if tensor._value is not value or value.spec is not spec:
                raise Refused("it gives a tensor other memory or another shape in place")
            if tensor.grad_fn is not history:
                raise Refused("it changes in place a tensor that has a history of gradients")

    def _refuse_known(self, result: Any) -> None:
        """Refuse a result with a list or dict that is there without it: a replay makes new ones."""
        pending, met = [result], set[int]()
        while pending:
            one = pending.pop()
            if isinstance(one, (list, dict)):
                if id(one) in self._reached.seen or id(one) in self._call.containers:
                    raise Refused("it returns a list or dict that is an argument or state")
                if id(one) in met:
                    continue
                met.add(id(one))
            if isinstance(one, (list, tuple, dict)):
                pending += one.values() if isinstance(one, dict) else one

    def _replaced_state(self) -> list[tuple[Place, int, Any]]:
        """The places where there was a tensor of the device, nowhere else, and is another one now: with its position
        among those reached, and the other one. None of them if there is a change of another kind."""
        found: list[tuple[Place, int, Any]] = []
        for index, before, now in self._snapshot.differences():
            place = self._snapshot.place(index)
            alike = handles.is_lazy(before) and type(now) is type(before) is LazyTensor
            if place is None or not alike or not self._snapshot.is_once(before):
                return []
            if any(before is one for one in self._call.lazy):
                return []
            position = next((i for i, one in enumerate(self._reached.lazy) if one is before), None)
            if position is None:
                return []
            found.append((place, position, now))
        return found

    # --- what happened ---

    def _describe(self, leaves: list[Any], structure: Any, seen: Observer, host: HostWatch) -> bool:
        """Whether all results that live on are held by what is known; else nothing is noted the first time."""
        live: dict[int, Any] = {id(leaf): leaf for leaf in leaves if handles.is_lazy(leaf) and self._is_live(leaf)}
        if len({root_of(leaf._value) for leaf in live.values()}) < len(live):
            raise Refused("it returns tensors with a history of gradients that share memory", for_good=True)
        tape = self._tape()
        end = next(tape.sequence)
        independent = independent_among([*live.values()])
        backwards = record_backwards([*live.values()], independent, self._tensors, tape) if live else []
        task = bind(self._recorded(tape, end))
        if _ran() != self._ran:
            raise Refused("another thread has run what was pending")
        places = Places(self._tensors, self._grads, seen.uploads, task)
        grads = self._new_grads(places)
        results = [self._result(leaf, places) for leaf in leaves]
        assigned = [Assigned(place, position, self._assigned(now, places)) for place, position, now in self._replaced]
        for leaf in live.values():
            if places.of(root_of(leaf._value))[0] != OUTPUT:
                raise Refused("it returns a view of its argument or state with a history of gradients", for_good=True)
        derivatives = [backward.describe(places) for backward in backwards]
        kept = places.unexplained(kept_by_autograd(self._alive(leaves), self._histories))
        if kept is not None:
            self._guards.give_back(task.nodes)
            self.refusal = Refused(f"a result is kept by something other than what it returns: {kept}")
            return False
        self.refusal = None
        refuse_unrepeatable(task.nodes)
        numbers, sites = numbers_of(task, [drawn.draw for drawn in seen.draws])
        bumps = self._bumps(places)
        used, shared = places.used()
        self._task = task
        self._backwards = [backward.task for backward in backwards]
        self.recording = Recording(
            key=task.key,
            numbers=numbers,
            sites=sites,
            lines=[(node.op.name if node.op is not None else "a tensor", node.site) for node in task.nodes],
            inputs=places.inputs,
            outputs=places.outputs,
            made=places.made,
            results=results,
            structure=structure,
            grads=grads,
            bumps=bumps,
            assigned=assigned,
            draws=seen.draws,
            origins=[self._origin(seen.uploads[value], _spec(value), host) for value in places.uploads],
            device=tape.device,
            used=used,
            shared=shared,
            snapshot=self._snapshot,
            reached=self._reached,
            flags=self._flags[len(self._call.lazy) :],
            looks=self._looks,
            same=same_as_state(self._call.lazy, places_of(self._reached.lazy)),
            grads_before=[None if grad is None else grad._value.spec for grad in self._grads],
            derivatives=derivatives,
            independent=independent,
            counters=host.counters,
            outcomes=outcomes_of(task.nodes),
            schedules=self._schedules.steps,
        )
        return True

    def _alive(self, leaves: list[Any]) -> list[Any]:
        """The tensors of the device that are there after the run."""
        read = [one.tensor for leaf in leaves for one in reads_in(leaf)]
        results = [one for one in (*leaves, *read, *[now for _, _, now in self._replaced]) if handles.is_lazy(one)]
        grads = [grad for grad in map(grad_of, self._tensors) if grad is not None]
        return [*results, *grads, *self._tensors]

    def _is_live(self, tensor: Any) -> bool:
        return not any(tensor is one for one in self._tensors) and graph_of(tensor) == LIVE

    def _recorded(self, tape: Tape, end: int) -> list[Node]:
        """What the run has recorded, before ``end``, and its guards: in a list that alone holds them."""
        nodes = [node for node in tape.pending() if self._start[tape.device] < node.seq < end]
        return sorted([*nodes, *self._guards.take()], key=lambda node: node.seq)

    def _tape(self) -> Tape:
        tapes = [handles.tape(index) for index in range(handles.device_count)]
        busy = [tape for tape in tapes if tape.entries and self._has_recorded(tape)]
        if len(busy) > 1:
            raise Refused("it works on more than one device")
        return busy[0] if busy else tapes[self._specs[0].device if self._specs else 0]

    def _has_recorded(self, tape: Tape) -> bool:
        return any(node.seq > self._start[tape.device] for node in tape.pending())

    def _new_grads(self, places: Places) -> list[tuple[int, Ref | None]]:
        changed: list[tuple[int, Ref | None]] = []
        for index, (tensor, before) in enumerate(zip(self._tensors, self._grads, strict=True)):
            grad = grad_of(tensor)
            if grad is not before:
                if grad is not None and graph_of(grad) == LIVE:
                    raise Refused("it makes gradients that gradients can be taken of")
                places.use((TENSOR, index))
                changed.append((index, None if grad is None else places.of_tensor(grad) or places.make(grad)))
        return changed

    def _result(self, leaf: Any, places: Places) -> tuple[str, Any]:
        if isinstance(leaf, Waiting):
            return READ, self._read(leaf, places)
        if handles.is_lazy(leaf):
            return places.of_tensor(leaf) or places.make(leaf)
        if isinstance(leaf, torch.Tensor):
            for index, tensor in enumerate(self._call.host):
                if tensor is leaf:
                    return HOST, index
            if not any(tensor is leaf for tensor in self._host):
                raise Refused("it returns a tensor of the CPU that it makes")
        return CONSTANT, leaf

    def _read(self, value: Any, places: Places) -> Any:
        if isinstance(value, ReturnedRead):
            return value.method, self._result(value.tensor, places)
        if isinstance(value, Computed):
            return value.function, *[self._read(side, places) for side in value.sides]
        return value

    def _assigned(self, tensor: Any, places: Places) -> Ref:
        if self._is_live(tensor):
            raise Refused("it keeps a tensor that gradients can be taken of")
        return places.of_tensor(tensor) or places.make(tensor)

    def _bumps(self, places: Places) -> list[tuple[Ref, int]]:
        found: list[tuple[Ref, int]] = []
        count = len(self._tensors)
        seen: set[int] = set()
        for index, (tensor, before) in enumerate(zip((*self._tensors, *self._grads), self._versions, strict=True)):
            now = _version(tensor)
            if now != before and id(tensor) not in seen:
                seen.add(id(tensor))
                ref = (TENSOR, index) if index < count else (GRAD, index - count)
                places.use(ref)
                found.append((ref, now - before))
        return found

    def _origin(self, upload: Upload, spec: Spec, host: HostWatch) -> Origin:
        for index, tensor in enumerate(self._call.host):
            if tensor is upload.tensor:
                return Origin(index, None, None, spec, upload.make)
        if host.is_known(upload.tensor):
            return Origin(None, upload.tensor, None, spec, upload.make)
        if host.is_derived(upload.tensor):
            raise Refused("it uploads a tensor that it computes on the CPU")
        if upload.content is None:
            raise Refused(f"it makes a tensor of {upload.tensor.numel()} elements from Python's data")
        return Origin(None, None, upload.content, spec, upload.make)


_CALL = Run.call.__code__


def _version(tensor: Any) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _spec(value: Any) -> Spec:
    assert value.spec is not None
    return value.spec
