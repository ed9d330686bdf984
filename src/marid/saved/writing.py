"""``marid.save_program``: what a recording did, as text and tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree

from marid.engine.plain import dtype_name, spec_to
from marid.engine.safetensors import write_file
from marid.errors import UnsupportedOperationError, WireError
from marid.frontend import handles
from marid.frontend.observe import Drawn
from marid.graph.node import Node, Spec, root_of
from marid.graph.program import Instruction
from marid.replay.places import is_draw
from marid.replay.recording import CONSTANT, GRAD, HOST, MADE, OUTPUT, TENSOR, UPLOAD, Each, Ref
from marid.saved.json_text import DIGEST, ENTRY, FORMAT, VERSION, argument_to, name_of, number_to, text_to
from marid.saved.names import Names
from marid.saved.recorded_function import RecordedFunction, name_of_function, record_function
from marid.saved.sizes import is_dense
from marid.saved.structure import described, value_to
from marid.semantics.tracebacks import folded


@folded
def save_program(
    path: str | os.PathLike[str],
    fn: Callable[..., Any],
    *examples: Any,
    state: Any = None,
    namespaces: Iterable[str] = (),
) -> None:
    """Write what ``fn`` does to arguments like ``examples``, and the state that it works on, to one file, which
    ``marid.load_program`` runs without the Python of ``fn`` or of its modules.

    ``fn`` is recorded as by ``marid.compile``, which says what can be and what ``state`` is for: it is called with
    copies of ``examples`` until two recordings did the same, and what that did to tensors, gradients and generators of
    the device is undone. A first call that makes Python state, such as the state of an optimizer, counts as a call,
    which is logged; so the file holds what this process holds afterwards. Shapes, dtypes and numbers are those of the
    examples, for good; random numbers go on from the device's generator wherever the file is loaded. Arguments and
    results are tuples, lists and dicts of tensors, numbers, texts and None. Custom operators have to be in one of the
    ``namespaces``, of which ``load_program`` is told too.

    The file is a safetensors file with the state as tensors, and the program as JSON in its metadata
    (``docs/programs.md``). What was at ``path`` is replaced once all is written.

    Raises ``UnsupportedOperationError`` with the line for what cannot be recorded or saved, ``TypeError`` for arguments
    that are none of the above, ``OSError``, and what ``fn`` raises.
    """
    # Late: the operators and their checks are not needed to import marid.
    from marid.remote.worker.operators import also_admitted
    from marid.saved.reading import Plan

    described(examples, "examples", _is_argument)
    taken = record_function(fn, examples, state)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    try:
        writer = _Writer(taken)
        text = text_to(writer.program(name))
        with also_admitted(namespaces):
            Plan.read(text, taken.recording.device)  # what cannot be read again is no file
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_file(path, writer.tensors(), {ENTRY: text, DIGEST: digest})
    except (WireError, TypeError, ValueError) as error:
        why = f"marid.save_program: {name_of_function(fn)} cannot be saved: {error}"
        raise UnsupportedOperationError(why) from error


def _is_argument(leaf: Any, place: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        value_to(leaf, place)


class _Writer:
    """The parts of a file. Raises ``WireError`` and ``TypeError`` for what no file can have."""

    def __init__(self, taken: RecordedFunction) -> None:
        self._taken = taken
        self._recording = taken.recording
        self._call = taken.call
        self._computed = dict(taken.computed)
        self._names = Names(taken.recording.reached)
        self._state: dict[Ref, dict[str, Any]] = {}
        self._held: dict[str, torch.Tensor] = {}  # what is written, by name
        self._named: dict[int, tuple[str, str]] = {}
        self._by_identity: dict[int, str] = {}
        self._roots: dict[Any, str] = {}
        self._specs: dict[Spec, int] = {}
        self._lines: dict[tuple[str, int, str], int] = {}
        self._arguments: dict[Ref, int] = {}

    def program(self, name: str) -> dict[str, Any]:
        arguments = described(self._taken.arguments, "arguments", self._argument)
        self._slots = dict(zip(self._recording.inputs, self._taken.prepared.program.input_slots, strict=True))
        results = self._results()
        placeholders = [self._placeholder(ref, slot) for ref, slot in self._slots.items()]
        self._check_gradients()
        program = self._taken.prepared.program
        pairs = zip(program.instructions, self._taken.prepared.nodes, strict=True)
        calls = [self._node(instruction, node) for instruction, node in pairs]
        outputs = [leaf["output"] for leaf in self._leaves if "output" in leaf]
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": name,
            "torch": torch.__version__,
            "arguments": arguments,
            "results": results,
            "state": list(self._state.values()),
            "more": self._siblings(),
            "counters": self._counters(),
            "draws": [self._draw(drawn) for drawn in self._recording.draws],
            "specs": [spec_to(spec) for spec in self._specs],
            "lines": [list(line) for line in self._lines],
            "nodes": [*placeholders, *calls, {"op": "output", "args": list(dict.fromkeys(outputs))}],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the file holds, on the host."""
        return {name: tensor.detach().cpu().resolve_conj().resolve_neg() for name, tensor in self._held.items()}

    # --- arguments, state and results ---

    def _argument(self, leaf: Any, place: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return value_to(leaf, place)
        on_device = handles.is_lazy(leaf)
        group = self._call.lazy if on_device else self._call.host
        kind = TENSOR if on_device else HOST
        index = next(i for i, one in enumerate(group) if one is leaf and (kind, i) not in self._arguments)
        self._arguments[kind, index] = len(self._arguments)
        spec = leaf._value.spec if on_device else handles.spec_of(leaf, 0)
        return {"tensor": spec_to(spec), "host": not on_device}

    def _placeholder(self, ref: Ref, slot: int) -> dict[str, Any]:
        specs = self._taken.prepared.specs
        spec = self._spec(specs[slot] if slot < len(specs) else self._recording.origins[ref[1]].spec)
        node: dict[str, Any] = {"op": "placeholder", "name": name_of(slot), "spec": spec}
        if ref[0] not in (TENSOR, GRAD):
            return {**node, **self._upload(ref[1])}
        if ref in self._arguments:
            return {**node, "argument": self._arguments[ref]}
        return {**node, "state": self._state_of(ref)}

    def _upload(self, index: int) -> dict[str, Any]:
        origin = self._recording.origins[index]
        if origin.argument is not None:
            return {"argument": self._arguments[HOST, origin.argument]}
        given = origin.content if origin.tensor is None else origin.tensor
        assert given is not None
        name = self._names.unique(f"constant.{index}")
        self._held[name] = origin.make(given).contiguous()
        return {"constant": name}

    def _state_of(self, ref: Ref) -> str:
        """The name of a tensor of the state, or of the gradient of one."""
        known = self._state.get(ref)
        if known is not None:
            return known["name"]
        kind, index = ref
        own = index - len(self._call.lazy)
        if own < 0:
            raise WireError("it reads the gradient of an argument")
        tensor: Any = self._recording.reached.lazy[own]
        name, role = self._named.get(id(tensor)) or self._names.of(tensor)
        self._named[id(tensor)] = name, role
        if kind == GRAD:
            name, role, tensor = self._names.unique(f"{name}.grad"), "gradient", tensor.grad
            if tensor is None:
                raise WireError(
                    f"it adds to gradients that are not there yet ({name}): call it once before it is saved"
                )
        else:
            self._by_identity[id(tensor)] = name
        self._keep(name, tensor)
        self._state[ref] = {"name": name, "role": role, "spec": self._spec(tensor._value.spec)}
        return name

    def _keep(self, name: str, tensor: Any) -> None:
        spec = tensor._value.spec
        if not is_dense(spec):
            raise WireError(f"its state {name!r} is a view of other memory: save a copy, as by contiguous()")
        other = self._roots.setdefault(root_of(tensor._value), name)
        if other != name:
            raise WireError(f"its state {name!r} lies in the same memory as {other!r}")
        self._held[name] = tensor

    def _siblings(self) -> dict[str, str | None]:
        more: dict[str, str | None] = {}
        for name, tensor in self._names.siblings(self._by_identity).items():
            if isinstance(tensor, str):
                more[name] = tensor
            elif name not in self._held:
                self._held[name] = tensor
                more[name] = None
        return more

    def _results(self) -> Any:
        skeleton = _pytree.tree_unflatten([_Leaf(*one) for one in self._recording.results], self._recording.structure)
        self._leaves: list[dict[str, Any]] = []

        def leaf(one: Any, place: str) -> dict[str, Any]:
            if type(one) is not _Leaf:
                raise TypeError(f"{place} is a {type(one).__name__}: a file has tuples, lists and dicts")
            self._leaves.append(self._result(one, place))
            return self._leaves[-1]

        return described(skeleton, "its result", leaf)

    def _result(self, leaf: _Leaf, place: str) -> dict[str, Any]:
        kind, of = leaf.kind, leaf.of
        if kind == MADE:
            kind, of = self._recording.made[of].value
            if kind == OUTPUT:
                return {"output": name_of(self._taken.prepared.program.output_slots[of])}
        if kind == CONSTANT:
            return value_to(of, place)
        if (kind, of) in self._arguments:
            return {"argument": self._arguments[kind, of]}
        if kind == UPLOAD:  # which the program need not work on
            program = self._taken.prepared.program
            extra = len(self._slots) - len(program.input_slots)
            return {"input": name_of(self._slots.setdefault((kind, of), program.slot_count + extra))}
        return {"state": self._state_of((kind, of))}

    def _check_gradients(self) -> None:
        """Gradients that the next call does not read are left out. Others have to be written in place."""
        for index, _ in self._recording.grads:
            if index < len(self._call.lazy):
                raise WireError("it gives an argument a gradient: return it, as by torch.autograd.grad()")
            if (GRAD, index) in self._state:
                raise WireError(f"it replaces a gradient that it reads ({self._state[GRAD, index]['name']})")

    # --- nodes ---

    def _node(self, instruction: Instruction, node: Node) -> dict[str, Any]:
        site = node.site
        line = ("", 0, "") if site is None else (site.file, site.line, site.function)
        slots = self._taken.prepared.specs
        return {
            "op": "call_function",
            "target": str(instruction.op.func),
            "args": [argument_to(arg, self._number) for arg in instruction.args],
            "kwargs": {name: argument_to(arg, self._number) for name, arg in instruction.kwargs},
            "results": [
                [name_of(one.slot), list(one.path), self._spec(slots[one.slot])] for one in instruction.results
            ],
            "line": self._lines.setdefault(line, len(self._lines)),
        }

    def _spec(self, spec: Spec | None) -> int:
        return -1 if spec is None else self._specs.setdefault(spec, len(self._specs))

    def _number(self, place: int) -> Any:
        how = self._computed.get(place)
        if how is not None:
            return [self._expression(part) for part in how] if type(how) is Each else self._expression(how)
        number = self._recording.numbers[place]
        if is_draw(number):
            return {"draw": number[1]}
        return [number_to(item) for item in number] if type(number) is tuple else number_to(number)

    def _expression(self, part: Any) -> Any:
        if type(part) is not tuple:
            return number_to(part)
        formula, group, event = part
        used = self._recording.counters.groups[group]
        if isinstance(used["lr"], torch.Tensor):
            raise WireError("its optimizer has a learning rate in a tensor of the CPU: take a number, or the device's")
        numbers = {key: used[key] for key in ("lr", "lr_decay") if key in used}
        betas = {"betas": list(used["betas"])} if "betas" in used else {}
        return {"computed": formula.__name__.removeprefix("_"), "event": event, "group": {**numbers, **betas}}

    def _draw(self, drawn: Drawn) -> dict[str, Any]:
        if drawn.generator is not None:
            raise WireError(f"{drawn.name} draws from a generator of its own: take the device's")
        return {
            "operator": drawn.name,
            "spec": self._spec(drawn.spec),
            "args": [self._drawn_from(arg) for arg in drawn.args],
            "kwargs": {name: self._drawn_from(arg) for name, arg in drawn.kwargs.items()},
        }

    def _drawn_from(self, arg: Any) -> Any:
        """What can decide how many numbers are drawn; None for the rest."""
        if isinstance(arg, Node):
            return {"spec": self._spec(arg.spec)}
        return arg if type(arg) in (bool, int, float) else None

    # --- counters ---

    def _counters(self) -> dict[str, Any]:
        log = self._recording.counters
        used = {index for event in log.events for index in ([event[1]] if event[0] == "item" else event[2])}
        places = {index: place for place, index in enumerate(sorted(used))}
        names = []
        for index in places:
            name = self._names.of(log.tensors[index])[0]
            names.append(name)
            self._held[name] = log.tensors[index]
        return {"names": names, "events": [_event(event, places) for event in log.events]}


class _Leaf:
    """A leaf of the result."""

    def __init__(self, kind: str, of: Any) -> None:
        self.kind = kind
        self.of = of


def _event(event: Any, places: dict[int, int]) -> dict[str, Any]:
    if event[0] == "item":
        return {"read": places[event[1]]}
    func, several, positions, rest, kwargs = event
    return {
        "write": str(func),
        "list": several,
        "counters": [places[position] for position in positions],
        "args": [_added(arg) for arg in rest],
        "kwargs": {name: number_to(arg) for name, arg in kwargs},
    }


def _added(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return {"tensor": dtype_name(arg.dtype), "value": number_to(arg.item())}
    return number_to(arg)
