"""Gradients of what a compiled function returns: its backward, recorded with it, as an ``autograd.Function``.

The backward is recorded once for each choice of outputs that gradients may come for, on stand-ins for these gradients.
It reads tensors of the run, which become outputs of the forward's program and are saved for it as PyTorch saves
tensors: changed in place in between, they raise PyTorch's error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from marid.frontend import handles, random
from marid.frontend.engines import engine_of
from marid.frontend.observe import Drawn, observing
from marid.graph.node import Node, Spec, Storage, Value, root_of
from marid.graph.prepared import Prepared
from marid.graph.program import Task, bind
from marid.graph.tape import Tape
from marid.native import module
from marid.replay.pending import run_needed
from marid.replay.places import Places, Refused, numbers_of
from marid.replay.recording import GIVEN, OUTPUT, TENSOR, Derivative, Ref
from marid.semantics.scopes import current_scope, current_site

_LIVE = 3  # outputs; each choice among them is a backward of its own


class Backward:
    """One recorded backward. ``task`` is its pending work."""

    def __init__(
        self, given: tuple[int, ...], wanted: list[int], grads: list[Any], results: list[Any], task: Task
    ) -> None:
        self.task = task
        self._given = given
        self._wanted = wanted
        self._grads = grads
        self._results = results

    def describe(self, places: Places) -> Derivative:
        """The backward in terms of what is known outside."""
        mine = {value: (OUTPUT, index) for index, value in enumerate(self.task.outputs)}
        given = {grad._value: (GIVEN, index) for index, grad in enumerate(self._grads)}
        by_slot = {slot: value for value, slot in self.task.slots.items()}

        def outward(ref: Ref) -> Ref:
            return ("forward" if ref[0] == OUTPUT else ref[0]), ref[1]

        def outside(value: Value) -> Ref:
            if value in given:
                return given[value]
            return outward(places.of(value))

        def of(value: Value) -> Ref:
            return mine[value] if value in mine else outside(value)

        def memory_of(value: Value) -> Ref | None:
            if value.root is not None and (value.root in mine or value.root in given):
                return of(value.root)
            ref = places.memory_of(value)
            return None if ref is None else outward(ref)

        return Derivative(
            given=self._given,
            wanted=[_used(places, index) for index in self._wanted],
            key=self.task.key,
            numbers=numbers_of(self.task, [])[0],
            inputs=[outside(by_slot[slot]) for slot in self.task.input_slots],
            outputs=[(value.spec, memory_of(value)) for value in self.task.outputs],  # pyright: ignore
            results=[None if result is None else of(result._value) for result in self._results],
            given_specs=[grad._value.spec for grad in self._grads],
        )


def _used(places: Places, index: int) -> Ref:
    places.use((TENSOR, index))
    return TENSOR, index


def independent_among(live: list[Any]) -> list[list[int]]:
    """Groups of outputs, by position, whose histories share no function: what a backward of one group frees, the
    others do not need."""
    groups: list[tuple[list[int], set[Any]]] = []
    for index, output in enumerate(live):
        own, functions = [index], _functions_behind(output)
        for group in [one for one in groups if not one[1].isdisjoint(functions)]:
            groups.remove(group)
            own, functions = sorted([*group[0], *own]), functions | group[1]
        groups.append((own, functions))
    return [own for own, _ in groups]


def _functions_behind(output: Any) -> set[Any]:
    """The functions of a history, without those that gradients end at."""
    found: set[Any] = set()
    pending = [output.grad_fn]
    while pending:
        function = pending.pop()
        if function is None or function in found or hasattr(function, "variable"):
            continue
        found.add(function)
        pending += [following for following, _ in function.next_functions]
    return found


def record_backwards(live: list[Any], independent: list[list[int]], tensors: list[Any], tape: Tape) -> list[Backward]:
    """Record the backward of ``live`` outputs to those of ``tensors`` that their graph leads to; the graph stays.
    Gradients may come for each choice of outputs among those of one ``independent`` group.

    Raises ``Refused`` where it leads elsewhere.
    """
    if len(live) > _LIVE:
        raise Refused(f"it returns {len(live)} tensors that gradients can be taken of", for_good=True)
    wanted = _reached(live, tensors)
    inputs = [tensors[index] for index in wanted]
    # What an input was computed of may be another input: that is the history of the user's, and stays.
    module.end_backwards_at([tensor for tensor in inputs if tensor.grad_fn is not None])
    try:
        if module.meets_hooks(live):
            raise Refused("gradients of what it returns go through hooks", for_good=True)
        return _recorded(live, independent, wanted, inputs, tape)
    finally:
        module.end_backwards_at([])


def _recorded(
    live: list[Any], independent: list[list[int]], wanted: list[int], inputs: list[Any], tape: Tape
) -> list[Backward]:
    found: list[Backward] = []
    for among in independent:
        choices = (itertools.combinations(among, count) for count in range(1, len(among) + 1))
        for given in itertools.chain.from_iterable(choices):
            grads = [_stand_in(live[index]) for index in given]
            start = next(tape.sequence)
            with observing(False) as seen:
                results = _gradients([live[index] for index in given], inputs, grads)
            _put_back(seen.draws)
            if seen.reads or seen.draws:
                raise Refused("its backward reads values or draws random numbers", for_good=True)
            found.append(Backward(given, wanted, grads, list(results), bind(_since(tape, start))))
    return found


def _gradients(outputs: list[Any], inputs: list[Any], grads: list[Any]) -> Any:
    try:
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    except Exception as error:  # the graph cannot be used, or a hook of the user raised: so will the user's backward
        raise Refused(f"its backward cannot be recorded: {error}", for_good=True) from None


def _put_back(draws: list[Drawn]) -> None:
    """Put generators back to where they were before ``draws``."""
    for drawn in reversed(draws):
        with random.generator_of(drawn.generator, drawn.device) as generator:
            generator.seed, generator.offset, generator.spare = drawn.draw.seed, drawn.draw.offset, drawn.draw.spare


def _since(tape: Tape, start: int) -> list[Node]:
    return [node for node in tape.pending() if node.seq > start]


def _stand_in(output: Any) -> Any:
    spec = output._value.spec
    dense = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"))
    zeros = torch.empty_strided(dense.shape, dense.stride(), dtype=spec.dtype, device="cpu").zero_()
    of = handles.spec_of(zeros, spec.device)
    return handles.wrap(handles.source(engine_of(spec.device).adopt(zeros), of), of)


def _reached(live: list[Any], tensors: list[Any]) -> list[int]:
    leaves = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)]) if tensor.is_leaf}
    inner = {
        (tensor.grad_fn, tensor.output_nr): index
        for index, tensor in reversed([*enumerate(tensors)])
        if tensor.grad_fn is not None
    }
    functions = {function for function, _ in inner}
    found: set[int] = set()
    seen: set[Any] = set()
    pending = [(tensor.grad_fn, tensor.output_nr) for tensor in live]
    while pending:
        function, number = pending.pop()
        if function in functions:
            if (function, number) not in inner:
                raise Refused("gradients flow out of it to what is not an argument", for_good=True)
            found.add(inner[function, number])
            continue
        if function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            if id(function.variable) not in leaves:
                raise Refused("gradients flow to a tensor that is neither an argument nor reachable", for_good=True)
            found.add(leaves[id(function.variable)])
        pending += [edge for edge in function.next_functions if edge[0] is not None]
    for index in found:
        if tensors[index]._backward_hooks:
            raise Refused("gradients flow to a tensor with hooks", for_good=True)
    return sorted(found)


# --- replaying -------------------------------------------------------------------------------------------------------


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, connection: _Connection, *inputs: Any) -> Any:  # noqa: ARG004
        ctx.set_materialize_grads(False)
        ctx.connection = connection
        outputs = connection.make()
        ctx.save_for_backward(*connection.saved(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = ctx.connection.backward(ctx.saved_tensors, grads)
        return (None, *(map(_not_again, found) if torch.is_grad_enabled() else found))


def _not_again(grad: Any) -> Any:
    """A gradient from ``create_graph=True``: what is computed of it can be differentiated, up to it."""
    return None if grad is None else _DelayedError(_ONCE, 1)(grad.detach().requires_grad_())


_DelayedError: Any = torch._C._functions.DelayedError
_ONCE = (
    "a second derivative of what a function under marid.compile returns: its backward was recorded, and has no "
    "history. Call the function without marid.compile, or take both derivatives in it"
)


class _Result(torch.autograd.Function):
    """One of several results, for autograd a tensor of a function of its own, as in eager PyTorch: hooks on it run only
    where a gradient comes. It counts its writes with what the backward has saved."""

    @staticmethod
    def forward(ctx: Any, output: Any) -> Any:
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(_ctx: Any, grad: Any) -> Any:
        return grad


def connect(
    inputs: list[Any],
    independent: list[list[int]],
    places: list[Ref],
    make: Callable[[list[int]], list[Any]],
    tensors: dict[Ref, Any],
    values: dict[Ref, Value],
    versions: dict[Value, Any],
    backwards: list[tuple[Derivative, Prepared]],
) -> list[Any]:
    """The outputs whose values are at ``places``, with a history that leads to ``inputs``; ``make`` makes those of the
    ``independent`` groups.

    ``tensors`` are the tensors that somebody outside has, ``values`` all values, by where they are; ``versions`` has
    for memory a tensor that counts what is written to it.
    """
    found: dict[int, Any] = {}
    with torch.enable_grad():
        for among in independent:
            own = [(one, prepared) for one, prepared in backwards if not {*one.given}.isdisjoint(among)]
            connection = _Connection(among, places, make, tensors, values, versions, own)
            outputs: Any = _Replayed.apply(connection, *inputs)
            one_each = [_Result.apply(output) for output in outputs] if len(outputs) > 1 else outputs
            found.update(zip(among, one_each, strict=True))
    return [found[index] for index in range(len(places))]


class _Connection:
    """Between one replay and its backward."""

    def __init__(
        self,
        among: list[int],
        places: list[Ref],
        make: Callable[[list[int]], list[Any]],
        tensors: dict[Ref, Any],
        values: dict[Ref, Value],
        versions: dict[Value, Any],
        backwards: list[tuple[Derivative, Prepared]],
    ) -> None:
        self.make: Callable[[], list[Any]] = functools.partial(make, among)
        self._among = among
        self._versions = versions
        self._backwards = {derivative.given: (derivative, prepared) for derivative, prepared in backwards}
        self._wanted = len(backwards[0][0].wanted)
        needed = {ref for derivative, _ in backwards for ref in _needed(derivative)}
        self._needed = sorted(needed)
        self._places = [places[index] for index in among]
        self._tensors = {ref: tensors.get(_outer(ref)) for ref in self._needed}
        self._values = {ref: values[_outer(ref)] for ref in self._needed}

    def saved(self, outputs: list[Any]) -> list[Any]:
        """What the backward needs, as tensors; called once."""
        own = {("forward", index): output for (_, index), output in zip(self._places, outputs, strict=True)}
        found = []
        for ref in self._needed:
            tensor = own.get(ref)
            if tensor is None:
                tensor = self._tensors[ref]
            if tensor is None:
                value = self._values[ref]
                tensor = handles.wrap(value, value.spec)  # pyright: ignore[reportArgumentType]
                same = [self._versions.get(root_of(value)), *(one for one in outputs if _share(one._value, value))]
                for counted in [one for one in same if one is not None][:1]:
                    module.share_version(tensor, counted)
            found.append(tensor)
        self._tensors.clear()
        self._values.clear()
        self._versions = {}  # the others of the call have the same
        self.make = list
        return found

    def backward(self, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> list[Any]:
        """The gradients of the inputs."""
        came = {index: grad for index, grad in zip(self._among, grads, strict=True) if grad is not None}
        given = tuple(came)
        if not given:  # autograd calls a function also where no gradient comes, as from one that returns None
            return [None] * self._wanted
        derivative, prepared = self._backwards[given]
        present = [_restrided(came[index], spec) for index, spec in zip(given, derivative.given_specs, strict=True)]
        tensors: dict[Ref, Any] = dict(zip(self._needed, saved, strict=True))
        tensors.update({(GIVEN, index): grad for index, grad in enumerate(present)})
        used = [tensors[ref] for ref in derivative.inputs]
        run_needed(derivative.given_specs[0].device, used, range(len(used)))
        inputs = [tensor._value.concrete for tensor in used]
        if any(buffer is None for buffer in inputs):
            for tensor in used:
                tensor.materialize()  # raises what made it fail
        buffers = engine_of(derivative.given_specs[0].device).replay(prepared, inputs, derivative.numbers)
        return _handed_out(derivative, tensors, buffers)


def _share(one: Value, other: Value) -> bool:
    return root_of(one) is root_of(other)


def _needed(derivative: Derivative) -> set[Ref]:
    roots = [root for _, root in derivative.outputs if root is not None]
    refs = {*derivative.inputs, *roots, *[ref for ref in derivative.results if ref is not None]}
    return {ref for ref in refs if ref[0] not in (GIVEN, OUTPUT)}


def _outer(ref: Ref) -> Ref:
    return (OUTPUT, ref[1]) if ref[0] == "forward" else ref


def _restrided(grad: Any, spec: Spec) -> Any:
    if grad._value.spec is spec:
        return grad
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=grad.device)
    return made.copy_(grad)


def _handed_out(derivative: Derivative, tensors: dict[Ref, Any], buffers: list[torch.Tensor]) -> list[Any]:
    device = derivative.given_specs[0].device
    tape, site, scope = handles.tape(device), current_site(), current_scope()
    nodes: list[Value] = []
    for (spec, _), buffer in zip(derivative.outputs, buffers, strict=True):
        node = Node(next(tape.sequence), None, None, None, spec, None, site, scope)
        node.concrete = buffer
        nodes.append(node)
    storages: dict[Value, Storage | None] = {}
    for node, (_, root) in zip(nodes, derivative.outputs, strict=True):
        if root is not None and root[0] == OUTPUT:
            node.root = root_of(nodes[root[1]])
        elif root is not None:
            node.root = root_of(tensors[root]._value)
            storages[node] = handles.storage_of(tensors[root])
    tape.note_resident(nodes)
    shared: dict[Value, Storage] = {}

    # One for several inputs is one tensor: so autograd makes copies of it.
    found: dict[Ref, Any] = {}

    def tensor(ref: Ref | None) -> Any:
        if ref is not None and ref not in found:
            found[ref] = made(ref)
        return None if ref is None else found[ref]

    def made(ref: Ref) -> Any:
        if ref[0] != OUTPUT:
            return tensors[ref] if ref[0] == GIVEN else tensors[ref].detach()
        node = nodes[ref[1]]
        storage = storages.get(node)
        if storage is None:
            storage = shared.setdefault(root_of(node), Storage(next(tape.sequence)))
        return handles.wrap(node, node.spec, storage)  # pyright: ignore[reportArgumentType]

    return [tensor(ref) for ref in derivative.results]
