"""``marid.load_program``: a saved program on a device, called like the function."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import tree_leaves

from marid.engine.safetensors import Entry, read_file, read_metadata
from marid.errors import LazyTensorError, WireError
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.graph.dispatch_state import concretely
from marid.graph.node import Spec, root_of
from marid.native import module
from marid.replay.reachable import Reached
from marid.replay.recording import CONSTANT, HOST, MADE, OUTPUT, TENSOR, UPLOAD, Made, Origin, Recording, Ref
from marid.replay.state_check import Snapshot, same_number
from marid.replay.template import Template
from marid.saved.json_text import DIGEST, ENTRY
from marid.saved.structure import fitted
from marid.semantics.tracebacks import folded

if TYPE_CHECKING:
    from marid.saved.reading import Argument, Plan


@folded
def load_program(
    path: str | os.PathLike[str],
    device: torch.device | str | int = handles.DEVICE_TYPE,
    *,
    namespaces: Iterable[str] = (),
) -> SavedProgram:
    """A program of ``marid.save_program``, with its state on a device of this process or of a worker.

    Nothing of the file is imported, unpickled or evaluated; operators are those that a worker admits
    (``docs/security.md``), and custom ones of ``namespaces`` (``torch.ops.<namespace>``), which must be registered, in
    a worker too (``marid worker --import``), and are called without a check of their arguments.
    A worker that sees the file reads the state itself (``marid.load_file``).

    Raises ``ValueError`` for what is no program, or is damaged, and ``OSError``.
    """
    # Late: the operators and their checks are not needed to import marid.
    from marid.remote.worker.operators import also_admitted
    from marid.saved.reading import Plan

    place = torch.device(device)
    if place.type != handles.DEVICE_TYPE:
        raise ValueError(f"marid.load_program() loads to {handles.DEVICE_TYPE}, not to {place}")
    handles.check_index(place)
    index = handles.current_device() if place.index is None else place.index
    text = _text(path)
    try:
        with also_admitted(namespaces):
            plan = Plan.read(text, index)
        with torch.inference_mode(False):
            return SavedProgram(plan, _Held(path, index))
    except WireError as error:
        raise ValueError(f"{path} is no program that can be run: {error}") from error


def _text(path: Any) -> str:
    metadata = read_metadata(path)
    text = metadata.get(ENTRY)
    if text is None:
        raise ValueError(f"{path} has no program in it: marid.load_file() loads weights")
    if hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() != metadata.get(DIGEST):
        raise ValueError(f"{path} is damaged: its program does not have the digest that it was saved with")
    return text


class _Held:
    """The tensors of a file, put where they belong."""

    def __init__(self, path: Any, device: int) -> None:
        self._path = os.path.abspath(path)
        self.device = device
        self._entries = read_file(path)

    def on_device(self, name: str, spec: Spec | None = None) -> Any:
        """A tensor of the device, laid out as ``spec`` or row by row. Raises ``WireError``."""
        entry = self._entry(name, spec)
        engine = engine_of(self.device)
        with concretely():
            given = handles.spec_of(entry.tensor, self.device)
            if spec is None or spec is given:
                buffer = engine.load(entry.tensor, self._path, entry.offset)
                return handles.wrap(handles.source(buffer, given), given)
            return handles.wrap(handles.source(engine.adopt(_laid(entry.tensor, spec)), spec), spec)

    def on_host(self, name: str, spec: Spec | None = None) -> torch.Tensor:
        """A copy in this process, laid out in the same way. Raises ``WireError``."""
        with concretely():
            tensor = self._entry(name, spec).tensor
            return tensor.clone() if spec is None else _laid(tensor, spec)

    def _entry(self, name: str, spec: Spec | None) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise WireError(f"it has no tensor {name[:80]!r}")
        tensor = entry.tensor
        if spec is not None and (tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype):
            raise WireError(f"its tensor {name!r} is not what the program says")
        return entry


class SavedProgram:
    """A loaded program. Called like the function that was saved: it returns what that returned, writes its state in
    place, and takes its random numbers from the device's generator. Results have no history of gradients.

    Arguments have the structure, shapes and dtypes of the examples; tensors of the CPU are uploaded. Raises
    ``TypeError`` and ``ValueError`` naming the argument that differs, and ``MaterializationError`` when an operation
    fails, with the line where it was written.
    """

    def __init__(self, plan: Plan, held: _Held) -> None:
        self._plan = plan
        self.name = plan.name
        """Of the function."""
        self._arguments = plan.arguments
        self._lock = threading.Lock()
        state = [held.on_device(entry.name, entry.spec) for entry in plan.state]
        counters = [_counter(held.on_host(name), name) for name in plan.counting.names]
        self.state: dict[str, torch.Tensor] = {
            entry.name: tensor for entry, tensor in zip(plan.state, state, strict=True)
        }
        """Parameters, buffers, optimizer state and gradients by name, and counters of the CPU; written in place."""
        self.state |= {name: self.state[of] if of else held.on_device(name) for name, of in plan.more.items()}
        self.state |= dict(zip(plan.counting.names, counters, strict=True))
        self.roles: dict[str, str] = {entry.name: entry.role for entry in plan.state}
        """What a tensor of the state is, by name: "parameter", "buffer", "optimizer state", "gradient" or "tensor"."""
        self._bind(plan, state, counters, held)

    def _bind(self, plan: Plan, state: list[Any], counters: list[torch.Tensor], held: _Held) -> None:
        """Make what ``replay/template.py`` runs."""
        program, analysis = plan.prepared.program, plan.analysis
        device = self._device = held.device
        slots = dict(zip(program.input_slots, plan.inputs, strict=True))
        self._given = [(slot, of) for slot, (kind, of) in slots.items() if kind == "argument"]
        self._specs = [_spec(plan, slot) for slot, _ in self._given]
        self._written = [slot in analysis.written for slot, _ in self._given]
        seen = {analysis.roots[slot] for slot in program.output_slots} | analysis.written
        seen |= {leaf.of for leaf in tree_leaves(plan.results) if leaf.kind == "input"}
        on_host = {leaf.number for leaf in tree_leaves(plan.arguments) if leaf.on_host}
        self._fresh = [of in on_host and slot in seen for slot, of in self._given]  # as the function made a copy
        refs: dict[int, Ref] = {slot: (TENSOR, i) for i, (slot, _) in enumerate(self._given)}
        lazy, origins = list(state), []
        for slot, (kind, of) in slots.items():
            if kind == "state":
                refs[slot] = TENSOR, len(self._given) + of
            elif kind == "constant" and slot in seen:  # so each call has one of its own
                content = held.on_host(of, plan.prepared.specs[slot])
                spec = handles.spec_of(content, device)
                origins.append(Origin(None, None, content, spec, torch.clone))
                refs[slot] = UPLOAD, len(origins) - 1
            elif kind == "constant":
                refs[slot] = TENSOR, len(self._given) + len(lazy)
                lazy.append(held.on_device(of, plan.prepared.specs[slot]))
        used = sorted({ref for ref in refs.values() if ref[0] == TENSOR})
        outputs = {slot: i for i, slot in enumerate(program.output_slots)}
        made, results = self._results(plan, outputs, refs)
        reached = Reached(False)
        reached.lazy = lazy
        written = [refs[slot] for slot in program.input_slots if slot in analysis.written]
        recording = Recording(
            key=program.key,
            numbers=plan.numbers,
            sites=[],
            lines=[],
            inputs=[refs[slot] for slot in program.input_slots],
            outputs=[(_spec(plan, slot), self._root(slot, plan, outputs, refs)) for slot in outputs],
            made=made,
            results=results,
            structure=_pytree.tree_structure(plan.results),
            grads=[],
            bumps=[(ref, 1) for ref in written if ref[0] == TENSOR],
            assigned=[],
            draws=plan.draws,
            origins=origins,
            device=device,
            used=used,
            shared=tuple(range(len(used))),
            snapshot=Snapshot(reached, [], []),
            reached=reached,
            flags=module.tensor_flags(reached.lazy),
            looks=module.host_looks(reached.host),
            same=(-1,) * len(self._given),
            grads_before=[],
            derivatives=[],
            independent=[],
            counters=plan.counting.log(counters),
            outcomes=(),
            schedules=[],
        )
        writes = [position for position, ref in enumerate(used) if ref in written]
        self._template = Template(
            recording, plan.counting.computed, set(), [plan.prepared], writes, [], len(self._given)
        )

    def _root(self, slot: int, plan: Plan, outputs: dict[int, int], refs: dict[int, Ref]) -> Ref | None:
        root = plan.analysis.roots[slot]
        if root == slot:
            return None
        return refs[root] if root in refs else (OUTPUT, outputs[root])

    def _results(
        self, plan: Plan, outputs: dict[int, int], refs: dict[int, Ref]
    ) -> tuple[list[Made], list[tuple[str, Any]]]:
        made: dict[int, Made] = {}
        results: list[tuple[str, Any]] = []
        for leaf in tree_leaves(plan.results):
            if leaf.kind == "input" and refs[leaf.of][0] == TENSOR:
                results.append(refs[leaf.of])
            elif leaf.kind in ("output", "input"):
                slot = leaf.of
                root = plan.analysis.roots[slot]
                known = refs.get(root)
                storage = root if known is None or known[0] == UPLOAD else known
                value = refs[slot] if leaf.kind == "input" else (OUTPUT, outputs[slot])
                made.setdefault(slot, Made(value, _spec(plan, slot), storage, None, None, 0))
                results.append((MADE, list(made).index(slot)))
            elif leaf.kind == "argument":
                results.append((HOST, leaf.of))  # the very object
            elif leaf.kind == "state":
                results.append((TENSOR, len(self._given) + leaf.of))
            else:
                results.append((CONSTANT, leaf.of))
        return list(made.values()), results

    @folded
    def __call__(self, *args: Any) -> Any:
        given: list[Any] = []
        fitted(args, self._arguments, "arguments", lambda leaf, expected, place: _check(leaf, expected, place, given))
        with self._lock:
            call = _Given([self._placed(i, given[of]) for i, (_, of) in enumerate(self._given)], given)
            fit = self._template.fit(call)  # pyright: ignore[reportArgumentType]
            if fit is None:
                self._refuse_shared(call)
                call.lazy = [one if self._written[i] else _copy(one) for i, one in enumerate(call.lazy)]
                fit = self._template.fit(call)  # pyright: ignore[reportArgumentType]
            if fit is None:
                raise LazyTensorError(self._why_not(call))
            return self._template.run(call, fit)  # pyright: ignore[reportArgumentType]

    def to_fx(self) -> torch.fx.GraphModule:
        """The program as a ``torch.fx.GraphModule`` of ATen operators. Its placeholders are the inputs: ``argument_0``
        and so on, the names of the state with underscores, ``number_0`` and so on for numbers that come of counters.
        Writes are in-place operators; ``node.meta`` has ``val`` (a meta tensor) and ``stack_trace``."""
        from marid.saved.fx_graph import graph_of

        return graph_of(self._plan)

    def __repr__(self) -> str:
        return f"SavedProgram({self.name}, {len(self.state)} tensors, on {handles.DEVICE_TYPE}:{self._device})"

    def _placed(self, index: int, tensor: Any) -> Any:
        """An argument as the program takes it: on the device, with the strides that it was saved for."""
        spec = self._specs[index]
        if handles.is_lazy(tensor):
            if tensor._value.spec is spec and not self._fresh[index]:
                return tensor
            if self._written[index] and not self._fresh[index]:
                raise ValueError(f"{self.name} writes to an argument that lies in memory as {spec}, not as this one")
            with torch.no_grad():
                return _empty(spec).copy_(tensor)
        if self._written[index] and not self._fresh[index]:
            raise ValueError(f"{self.name} writes to an argument of {spec.shape}: give it a tensor of the device")
        with concretely():
            buffer = engine_of(spec.device).adopt(_laid(tensor, spec))
        return handles.wrap(handles.source(buffer, spec), spec)

    def _refuse_shared(self, call: _Given) -> None:
        """Raise where an argument that is only read lies in memory that is written: a copy would not be written."""
        recording = self._template.recording
        tensors = [*call.lazy, *recording.reached.lazy]
        written = {root_of(tensors[index]._value) for (_, index), _ in recording.bumps}
        read = [one for i, one in enumerate(call.lazy) if not self._written[i]]
        if any(root_of(one._value) in written for one in read):
            raise LazyTensorError(self._why_not(call))

    def _why_not(self, call: _Given) -> str:
        roots = [root_of(tensor._value) for tensor in (*call.lazy, *self._template.recording.reached.lazy)]
        if len({id(root) for root in roots}) != len(roots):
            return f"{self.name} writes to tensors that share memory: give it copies"
        return (
            f"{self.name} cannot run: an operation that its arguments or its state need has failed, a counter was set "
            "back, or marid.settings.memory_limit has no room for it"
        )


class _Given:
    """The tensors of one call, as ``replay/arguments.py`` has them: ``host`` are the objects that were given."""

    def __init__(self, lazy: list[Any], host: list[Any]) -> None:
        self.lazy = lazy
        self.host = host


def _check(leaf: Any, expected: Argument, place: str, given: list[Any]) -> None:
    spec = expected.spec
    if spec is None:
        if isinstance(leaf, torch.Tensor) or not same_number(leaf, expected.value):
            raise ValueError(
                f"{place} is {leaf!r}, and the program was saved for {expected.value!r}, which is part of it: "
                "what is to change has to be a tensor when it is saved"
            )
        return
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"{place} is a {type(leaf).__name__}, and the program was saved for a tensor")
    if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
        raise ValueError(
            f"{place} has shape {tuple(leaf.shape)} and {leaf.dtype}, and the program was saved for {spec.shape} and "
            f"{spec.dtype}"
        )
    if not handles.is_lazy(leaf) and (leaf.device.type != "cpu" or leaf.layout is not torch.strided):
        raise ValueError(f"{place} is on {leaf.device}: give tensors of {handles.DEVICE_TYPE} or of the CPU")
    given.append(leaf)


def _spec(plan: Plan, slot: int) -> Spec:
    spec = plan.prepared.specs[slot]
    assert spec is not None
    return spec


def _laid(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of a tensor of the CPU with the strides and the dtype of ``spec``."""
    with torch.no_grad():
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").copy_(tensor)


def _empty(spec: Spec) -> Any:
    place = torch.device(handles.DEVICE_TYPE, spec.device)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=place)


def _copy(tensor: Any) -> Any:
    with torch.no_grad():
        return _empty(tensor._value.spec).copy_(tensor)


def _counter(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.numel() != 1 or not tensor.dtype.is_floating_point or not tensor.item() >= 0:
        raise WireError(f"its counter {name!r} is none")
    return tensor
