"""Doing again what a recording did, on the tensors of another call, without its Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import bytes_of
from marid.graph.dispatch_state import concretely
from marid.graph.node import Node, Storage, Value, root_of
from marid.graph.prepared import GuardFailed, Prepared
from marid.native import module
from marid.replay.arguments import Call, places_of, same_as_state
from marid.replay.autograd_function import connect
from marid.replay.draws import take_again
from marid.replay.gradients import LEAF, LIVE, SPENT, with_spent_graph
from marid.replay.guards import Undo, is_guard
from marid.replay.pending import run_needed
from marid.replay.places import is_draw
from marid.replay.recording import (
    CONSTANT,
    GRAD,
    HOST,
    MADE,
    OUTPUT,
    READ,
    TENSOR,
    UPLOAD,
    Derivative,
    Made,
    Recording,
    Ref,
    expressions,
)
from marid.replay.returned_reads import METHODS
from marid.replay.waiting import calculate
from marid.semantics.scopes import current_scope, current_site
from marid.settings import settings

# The tensors of a call, gradients by tensor, values by where they are known from.
Fit = tuple[list[Any], dict[int, Any], dict[Ref, Value]]


class Template:
    """A recording whose program is ready to run.

    ``computed`` are the numbers that come of counters and rates (``Recording.computed``), ``followed`` the groups of
    parameters whose rate may be another one (``CounterLog.moved_rates``), ``writes`` the positions among the
    tensors that the recording has used of those that are written, ``undone`` of those that are written before the last
    guard; ``arguments`` how many tensors a call brings.
    """

    def __init__(
        self,
        recording: Recording,
        computed: list[tuple[int, Any]],
        followed: set[int],
        prepared: list[Prepared],
        writes: list[int],
        undone: list[int],
        arguments: int,
    ) -> None:
        self.recording = recording
        self._undone = [recording.used[position] for position in undone]
        self._followed = followed
        self._writes = writes
        self._computed = computed
        self._counted = {event for _, _, event in expressions(self._computed)}
        self._prepared, *backwards = prepared
        self._backwards = [*zip(recording.derivatives, backwards, strict=True)]
        own = recording.reached.lazy
        for assigned in recording.assigned:  # whose memory the next one may need
            recording.reached.seen.pop(id(own[assigned.position]), None)
        self._places = places_of(own)
        self._state_specs = [tensor._value.spec for tensor in own]
        self._state_flags = recording.flags
        tensors = arguments + len(own)
        asked = {index for kind, index in recording.used if kind == GRAD} | {index for index, _ in recording.grads}
        asked |= {index for index, spec in enumerate(recording.grads_before) if spec is not None}
        asked |= {arguments + index for index, tensor in enumerate(own) if tensor.requires_grad and tensor.is_leaf}
        self._grads_asked = sorted(index for index in asked if index < tensors)
        before = ((index, recording.grads_before[index]) for index in self._grads_asked)
        self._grads_expected = {index: spec for index, spec in before if spec is not None}
        self._draws = [place for place, number in enumerate(recording.numbers) if is_draw(number)]
        self._replaced = [index for index, _ in recording.grads if (GRAD, index) not in recording.used]
        most = max((count for _, count in recording.bumps), default=0)
        self._rounds = [[ref for ref, count in recording.bumps if count > done] for done in range(most)]
        self._simple = recording.structure.is_leaf()

    def departure(self, recording: Recording) -> str | None:
        """How what the Python did just now differs from what a replay would have done, in words."""
        return self.recording.departure(recording, self._computed)

    def fit(self, call: Call) -> Fit | None:
        """What a replay of ``call`` works on, or None (and nothing has happened) where the Python has to run."""
        recording = self.recording
        self._note_replaced()
        if recording.snapshot.change() is not None or not self._is_state_alike():
            return None
        if call.lazy and same_as_state(call.lazy, self._places) != recording.same:
            return None
        tensors = [*call.lazy, *recording.reached.lazy]
        grads = self._grads_of(tensors)
        if grads is None:
            return None
        used = [(tensors if kind == TENSOR else grads)[index] for kind, index in recording.used]
        found: list[Value] = module.values_of(used)
        if (
            not module.share_as(found, recording.shared)
            or not self._has_room()
            or not recording.counters.may_go_on(self._followed)
        ):
            return None
        if not run_needed(recording.device, used, self._writes):
            return None
        values: dict[Ref, Value] = dict(zip(recording.used, found, strict=True))
        if [value for value in found if value.concrete is None] or not self._upload(call, values):
            return None
        return tensors, grads, values

    def is_open_to(self, outcomes: tuple[bool, ...]) -> bool:
        """Whether the first tests of numbers came out so when it was recorded."""
        return self.recording.outcomes[: len(outcomes)] == outcomes

    def outcomes_until(self, guard: Node) -> tuple[bool, ...]:
        """How the tests came out up to ``guard``, which has come out otherwise."""
        passed = [node for node in self._prepared.nodes if is_guard(node)].index(guard)
        return *self.recording.outcomes[:passed], not self.recording.outcomes[passed]

    def run(self, call: Call, fit: Fit) -> Any:
        """The result for ``call``. Raises ``MaterializationError`` when an operation fails, and ``GuardFailed`` when a
        test of a number comes out otherwise: nothing has happened then."""
        tensors, grads, values = fit
        recording = self.recording
        counters = recording.counters
        numbers = recording.numbers
        guarded = bool(recording.outcomes)
        undo = Undo(counters, recording.draws if guarded else [], [values[ref].concrete for ref in self._undone])
        if counters.events or self._computed:
            numbers = recording.numbers_for(self._computed, counters.again(self._counted), {})
        if recording.draws:
            taken = take_again(recording.draws)
            numbers = list(numbers)
            for place in self._draws:
                numbers[place] = taken[numbers[place][1]]
        for index in self._replaced if not guarded else ():
            tensors[index].grad = grads[index] = None  # as the Python, which dropped it: its memory can be used again
        inputs: list[Any] = [values[ref].concrete for ref in recording.inputs]
        try:
            buffers = engine_of(recording.device).replay(self._prepared, inputs, numbers)
        except GuardFailed:
            undo.everything()
            raise
        except BaseException:
            undo.counters()  # the optimizer has not come to its step
            raise
        made = _HandOut(recording, call, tensors, grads, values, buffers, self._rounds, self._backwards)
        for schedule in recording.schedules:
            schedule.step()
        return made.result(self._simple)

    def _note_replaced(self) -> None:
        """Take what is in the places that the function assigns to for what is to be there, if it is a tensor."""
        for assigned in self.recording.assigned:
            now, before = assigned.place.get(), self.recording.reached.lazy[assigned.position]
            if handles.is_lazy(now) and type(now) is type(before):
                self.recording.snapshot.expect(assigned.place.index, now)
                self.recording.reached.lazy[assigned.position] = now
                if self._places.get(id(before)) == assigned.position:
                    del self._places[id(before)]
                self._places[id(now)] = assigned.position

    def _is_state_alike(self) -> bool:
        reached = self.recording.reached
        alike = module.same_tensors(reached.lazy, self._state_specs, self._state_flags)
        return alike and module.host_looks(reached.host) == self.recording.looks

    def _grads_of(self, tensors: list[Any]) -> dict[int, Any] | None:
        grads = module.grads_of(tensors, self._grads_asked)
        specs = {index: grad._value.spec for index, grad in grads.items()}
        return grads if specs == self._grads_expected else None

    def _has_room(self) -> bool:
        # Where there is a limit on memory, the Python records, and what does not fit is refused where it is read.
        limit = settings.memory_limit
        if limit and (self._undone or engine_of(self.recording.device).spilled):
            return False
        return not limit or bytes_of(range(handles.device_count)) + self._prepared.transient_bytes <= limit

    def _upload(self, call: Call, values: dict[Ref, Value]) -> bool:
        device = self.recording.device
        for index, origin in enumerate(self.recording.origins):
            given = origin.tensor if origin.argument is None else call.host[origin.argument]
            with concretely():
                made = origin.make(origin.content if given is None else given)
            spec = handles.spec_of(made, device)
            if spec is not origin.spec:
                return False
            values[UPLOAD, index] = handles.source(engine_of(device).adopt(made), spec)
        return True


class _HandOut:
    """Gives the outputs of a run to whoever gets them: the result, gradients, versions."""

    def __init__(
        self,
        recording: Recording,
        call: Call,
        tensors: list[Any],
        grads: dict[int, Any],
        values: dict[Ref, Value],
        buffers: list[torch.Tensor],
        rounds: list[list[Ref]],
        backwards: list[tuple[Derivative, Prepared]],
    ) -> None:
        self._recording = recording
        self._call = call
        self._tensors = tensors
        self._grads = grads
        self._values = values
        self._groups: dict[int, Storage] = {}
        self._tape = handles.tape(recording.device)
        self._note(buffers)
        for refs in rounds:
            torch.autograd.graph.increment_version([self._known(ref) for ref in refs])
        self._first: dict[Value, Any] = {}  # of the tensors in one memory, for autograd their writes count for all
        with handles.below_autograd():
            later = (SPENT, LIVE)  # made where autograd sees it
            self._made = [None if made.graph in later else self._handle(made) for made in recording.made]
        for index, made in enumerate(recording.made):
            self._made[index] = tensor = self._with_graph(made, self._made[index])
            if tensor is not None:
                _write(tensor, made.version)
        if backwards:
            self._connect(backwards)
        for index, ref in recording.grads:
            tensors[index].grad = None if ref is None else self._tensor(ref)
        for assigned in recording.assigned:
            assigned.place.set(self._tensor(assigned.ref))

    def result(self, simple: bool) -> Any:
        leaves = [self._leaf(kind, of) for kind, of in self._recording.results]
        return leaves[0] if simple else _pytree.tree_unflatten(leaves, self._recording.structure)

    def _connect(self, backwards: list[tuple[Derivative, Prepared]]) -> None:
        """Give the tensors that gradients can be taken of a history: the recorded backward."""
        places = [index for index, made in enumerate(self._recording.made) if made.graph == LIVE]
        inputs = [self._known(ref) for ref in backwards[0][0].wanted]

        known = {ref: self._known(ref) for ref in self._recording.used}
        made = {self._recording.made[i].value: tensor for i, tensor in enumerate(self._made) if tensor is not None}
        live = connect(
            inputs,
            self._recording.independent,
            [self._recording.made[index].value for index in places],
            lambda among: [self._written(self._recording.made[places[index]]) for index in among],
            {**made, **known},
            self._values,
            {**{root_of(tensor._value): tensor for tensor in known.values()}, **self._first},
            backwards,
        )
        for index, tensor in zip(places, live, strict=True):
            self._made[index] = tensor

    def _note(self, buffers: list[torch.Tensor]) -> None:
        site, scope, sequence = current_site(), current_scope(), self._tape.sequence
        nodes: list[Value] = []
        outputs = self._recording.outputs
        for index, ((spec, _), buffer) in enumerate(zip(outputs, buffers, strict=True)):
            node = Node(next(sequence), None, None, None, spec, None, site, scope)
            node.concrete = buffer
            nodes.append(node)
            self._values[OUTPUT, index] = node
        for node, (_, root) in zip(nodes, outputs, strict=True):
            if root is not None:
                node.root = root_of(self._values[root])
        self._tape.note_resident(nodes)

    def _known(self, ref: Ref) -> Any:
        kind, index = ref
        return self._tensors[index] if kind == TENSOR else self._grads[index]

    def _tensor(self, ref: Ref) -> Any:
        return self._made[ref[1]] if ref[0] == MADE else self._known(ref)

    def _leaf(self, kind: str, of: Any) -> Any:
        if kind == CONSTANT:
            return of
        if kind == READ:
            return self._read(of)
        return self._call.host[of] if kind == HOST else self._tensor((kind, of))

    def _read(self, of: Any) -> Any:
        if type(of) is not tuple:
            return of
        name, *sides = of
        if name in METHODS:
            return getattr(self._tensor(sides[0]), name)()
        return calculate(name, *map(self._read, sides))

    def _handle(self, made: Made) -> Any:
        storage = made.storage
        if isinstance(storage, int):
            number, storage = storage, self._groups.get(storage)
            if storage is None:
                storage = self._groups[number] = Storage(next(self._tape.sequence))
        elif storage is not None:
            storage = handles.storage_of(self._known(storage))
        value = self._values[made.value]
        handle = handles.new_handle(value, made.spec, storage)
        of = made.storage
        first = self._known(of) if isinstance(of, tuple) else self._first.setdefault(root_of(value), handle)
        if first is not handle:
            module.share_version(handle, first)
        return handle

    def _written(self, made: Made) -> Any:
        """A handle that was written as often as the Python has written it: before it is saved for the backward."""
        handle = self._handle(made)
        _write(handle, made.version)
        return handle

    def _with_graph(self, made: Made, handle: Any) -> Any:
        if made.graph == SPENT:
            make: Callable[[], Any] = lambda: self._handle(made)  # noqa: E731
            return with_spent_graph(make)
        if made.graph == LEAF:
            return handle.requires_grad_()
        if made.base is None:
            return handle
        base = self._tensor(made.base)
        with torch.no_grad():
            if self._values[made.value] is base._value:
                return base.detach()
            return torch.as_strided(base, made.spec.shape, made.spec.stride, made.spec.offset)


def _write(tensor: Any, times: int) -> None:
    """Count for autograd that a tensor was written so often."""
    for _ in range(times):
        torch.autograd.graph.increment_version(tensor)
