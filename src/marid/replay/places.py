"""Where the values of a run come from and go to: the pending work of a function in terms of what is known outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from marid.frontend import handles
from marid.frontend.observe import Upload
from marid.frontend.tensor import LazyTensor
from marid.graph.node import Draw, Node, Output, Spec, Value, root_of
from marid.graph.program import Task
from marid.native import module
from marid.replay.arguments import HOOKS
from marid.replay.gradients import LEAF, graph_of
from marid.replay.recording import GRAD, MADE, OUTPUT, TENSOR, UPLOAD, Made, Ref


class Refused(Exception):
    """A run cannot be replayed. ``for_good`` says that no later one can."""

    def __init__(self, why: str, for_good: bool = False) -> None:
        super().__init__(why)
        self.for_good = for_good


class ChangesState(Refused):
    """A run has changed Python state, such as the first step of an optimizer, which makes its state."""


class Places:
    """The values of one run by where they are known from: ``tensors`` and their gradients before the run, ``uploads``,
    and the outputs of ``task``."""

    def __init__(self, tensors: list[Any], grads: list[Any], uploads: dict[Value, Upload], task: Task) -> None:
        self.tensors = tensors
        self.grads = grads
        self.uploads: list[Value] = []
        self.made: list[Made] = []
        self._uploaded = uploads
        self._known: dict[Value, list[Ref]] = {}
        self._in_memory: dict[Value, Ref] = {}
        for kind, group in ((TENSOR, tensors), (GRAD, grads)):
            for index, tensor in enumerate(group):
                if tensor is not None:
                    self._known.setdefault(tensor._value, []).append((kind, index))
                    self._in_memory.setdefault(root_of(tensor._value), (kind, index))
        self._outputs: dict[Value, int] = {value: index for index, value in enumerate(task.outputs)}
        self._explained: set[Value] = set()
        self._handles: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._used: dict[Ref, None] = {}
        by_slot = {slot: value for value, slot in task.slots.items()}
        self.inputs = [self.of(by_slot[slot]) for slot in task.input_slots]
        self.outputs = [(_spec(value), self.memory_of(value)) for value in task.outputs]

    def of(self, value: Value) -> Ref:
        """Where ``value`` is known from. Raises ``Refused`` for one that nobody knows."""
        if value in self._known:
            refs = self._known[value]
            self._used.update(dict.fromkeys(refs))
            return refs[0]
        if value in self._uploaded:
            if value not in self.uploads:
                self.uploads.append(value)
            return UPLOAD, self.uploads.index(value)
        if value in self._outputs:
            return OUTPUT, self._outputs[value]
        spec = value.spec
        shape = list(spec.shape) if spec is not None else "unknown shape"
        raise Refused(f"it uses a tensor of shape {shape} that is neither an argument nor reachable ({_line(value)})")

    def memory_of(self, view: Value) -> Ref | None:
        """Where the memory that ``view`` lies in is known from: what it belongs to, or a tensor in it, such as one of
        the parameters that share a vector which nobody holds. None for a value with memory of its own."""
        root = view.root
        if root is None:
            return None
        if root in self._known or root in self._outputs or root not in self._in_memory:
            return self.of(root)
        self._used[self._in_memory[root]] = None
        return self._in_memory[root]

    def of_tensor(self, tensor: Any) -> Ref | None:
        """Which known tensor, or gradient from before, this very object is."""
        for ref in self._known.get(tensor._value, ()):
            group = self.tensors if ref[0] == TENSOR else self.grads
            if group[ref[1]] is tensor:
                self._used.update(dict.fromkeys(self._known[tensor._value]))
                return ref
        return None

    def make(self, tensor: Any) -> Ref:
        """The place in ``made`` of a tensor that the run has made."""
        index = self._handles.get(id(tensor))
        if index is None:
            if module.attributes_of(tensor) is not None:
                raise Refused(f"it makes a Parameter, or a tensor with attributes ({_line(tensor._value)})")
            graph = graph_of(tensor)
            if type(tensor) is not LazyTensor or (graph == LEAF and module.tensor_flags([tensor])[0] & HOOKS):
                raise Refused(f"it makes a tensor of a class of its own, or with hooks ({_line(tensor._value)})")
            value, base = tensor._value, self._base(tensor)
            new = len(self._groups)
            storage = self._storage(tensor)
            first = storage is None or len(self._groups) > new  # in its memory, whose writes are counted together
            version = tensor._version if first else 0
            self.made.append(Made(self.of(value), _spec(value), storage, base, graph, version))
            self._explained.add(value)
            self._handles[id(tensor)] = index = len(self.made) - 1
        return MADE, index

    def _base(self, tensor: Any) -> Ref | None:
        """The tensor that another one is a view of for autograd too."""
        base = tensor._base if tensor._is_view() and not tensor.requires_grad else None
        if base is None or base.requires_grad or not _is_plain_view(_spec(base._value), _spec(tensor._value)):
            return None
        return self.of_tensor(base) or (self.make(base) if base._value in self._outputs else None)

    def _storage(self, tensor: Any) -> Ref | int | None:
        storage = tensor._storage
        if storage is None:
            return None
        for kind, group in ((TENSOR, self.tensors), (GRAD, self.grads)):
            for index, one in enumerate(group):
                if one is not None and one._storage is storage:
                    self._used[kind, index] = None
                    return kind, index
        return self._groups.setdefault(id(storage), len(self._groups))

    def unexplained(self, by_autograd: Iterable[Any]) -> str | None:
        """A result that somebody unknown keeps, in words. ``by_autograd`` are tensors that autograd keeps."""
        explained = self._explained | {tensor._value for tensor in by_autograd if handles.is_lazy(tensor)}
        explained |= {root_of(value) for value in explained}
        for value in self._outputs:
            if value not in explained:
                op = value.node.op
                return f"{op.name if op is not None else 'a result'} ({_line(value)})"
        return None

    def use(self, ref: Ref) -> None:
        """Note that which memory a tensor lies in counts."""
        value = (self.tensors if ref[0] == TENSOR else self.grads)[ref[1]]._value
        self._used.update(dict.fromkeys(self._known[value]))

    def used(self) -> tuple[list[Ref], tuple[int, ...]]:
        """The known tensors whose memory counts, and which of them share it, by first occurrence."""
        refs = sorted(self._used)
        roots = [id(root_of((self.tensors if kind == TENSOR else self.grads)[index]._value)) for kind, index in refs]
        return refs, tuple([roots.index(one) for one in roots])


def _spec(value: Value) -> Spec:
    assert value.spec is not None
    return value.spec


def _is_plain_view(base: Spec, view: Spec) -> bool:
    return base.dtype is view.dtype and (base.conj, base.neg) == (view.conj, view.neg)


def _line(value: Value) -> str:
    return str(value.node.site) if value.node.site is not None else "unknown line"


def is_draw(number: Any) -> bool:
    """Whether a parameter of a task stands for a position in a random stream: ``("draw", position)``."""
    return type(number) is tuple and len(number) == 2 and number[0] == "draw"


def numbers_of(task: Task, draws: list[Draw]) -> tuple[list[Any], list[Any]]:
    """The parameters of a task, those of ``draws`` as ``("draw", position)``, and the line where each was written."""
    places = {id(draw): ("draw", position) for position, draw in enumerate(draws)}
    numbers: list[Any] = []
    for param in task.params:
        if isinstance(param, Draw) and id(param) not in places:
            raise Refused("random numbers are drawn out of sight")
        numbers.append(places[id(param)] if isinstance(param, Draw) else param)
    sites: list[Any] = []
    for node in task.nodes:
        arguments = (*(node.args or ()), *[arg for _, arg in node.kwargs or ()])
        sites += [node.site] * sum(_parameters_in(arg) for arg in arguments)
    return numbers, sites


def _parameters_in(arg: Any) -> int:
    if isinstance(arg, tuple):
        if all(type(item) in (int, float, bool) for item in arg):
            return 1
        return sum(_parameters_in(item) for item in arg)
    return int(type(arg) in (int, float, complex, Draw) and not isinstance(arg, (Node, Output)))
