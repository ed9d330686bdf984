"""A lazy tensor engine for PyTorch in one file, to be read from top to bottom.

It retells the core of Marid without what makes that fast or complete. A tensor here is a promise: operations on it are
recorded, not run. When the program needs a value, the engine chooses what must run, makes a program of it, and runs it.

1. **Recording** a call, and finding out what it returns without running it.
2. **Aliasing**: views share memory, and writes to it must stay in order.
3. **The cut**: which recorded calls must run so that a value can be read.
4. **The canonical program**: the cut without the identity of its tensors, so that the same work is recognised.
5. **The plan**: which results can be dropped, and which can be written over.
6. **The run**, and what happens to errors.
7. **Autograd** needs nothing: it works on top, because what PyTorch differentiates is what we record.

    x = lazy(torch.randn(3, 4))
    y = (x @ x.t()).relu().sum()  # nothing has run
    print(y.item())  # runs here

The tensors live on the CPU, so that every result can be compared with eager PyTorch bit for bit, as the tests do.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

aten: Any = torch.ops.aten
_count = itertools.count()

# --- 1. Recording ----------------------------------------------------------------------------------------------------
#
# There are three kinds of objects. A ``Value`` is the promise of one tensor. A ``Node`` is one recorded call. A
# ``Storage`` is the memory that a tensor and its views share. References go from a value to what it needs, and never
# strongly back: a tensor that is dropped takes with it what only it needed, and dead code never runs.


class Geometry(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def geometry_of(tensor: Tensor) -> Geometry:
    return Geometry(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


class Storage:
    """The memory that a tensor and its views share: who writes it, and who has read it since."""

    def __init__(self, untyped: torch.UntypedStorage) -> None:
        self.untyped = untyped  # held, so that its address stays ours (see ``storage_of``)
        self.number = next(_count)
        self.write: Node | None = None  # the newest
        self.readers: weakref.WeakSet[Node] = weakref.WeakSet()  # recorded after it


class Value:
    """What one tensor will be. ``meta`` is its twin without memory, on PyTorch's device ``meta``: it says everything
    about shape, strides and dtype, and whose memory is shared. ``concrete`` is the tensor itself, once it was computed.
    """

    def __init__(self, meta: Tensor, node: Node | None = None, index: int = 0, concrete: Tensor | None = None) -> None:
        self.meta, self.node, self.index, self.concrete = meta, node, index, concrete
        self.storage = storage_of(meta)
        self.tensor: weakref.ref[Lazy] | None = None  # the user's handle
        self.users: weakref.WeakSet[Node] = weakref.WeakSet()


class Output(NamedTuple):
    """What a node knows of one of its results, also when nobody holds that any more."""

    value: weakref.ref[Value]
    geometry: Geometry
    storage: int


class Node:
    """One recorded call. ``args`` and ``kwargs`` hold values in the place of tensors."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.number = next(_count)  # program order
        self.outputs: list[Output | None] = []  # None for an argument that was written and is returned
        self.writes_before: list[Node] = []  # to memory that this call uses: they must run before it
        self.readers_before: weakref.WeakSet[Node] = weakref.WeakSet()  # of memory that it writes: those too, if alive
        self.done = False
        self.error: Exception | None = None

    @property
    def values(self) -> list[Value]:
        return values_in((self.args, self.kwargs))

    def finish(self, error: Exception | None = None) -> None:
        """It has run: what it needed is let go of."""
        self.done, self.error = error is None, error
        self.args, self.kwargs, self.writes_before = (), {}, []
        self.readers_before = weakref.WeakSet()


def values_in(tree: Any) -> list[Value]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]


class Lazy(Tensor):
    """The tensor that a user holds: a handle on a value. PyTorch asks ``__torch_dispatch__`` for every operation, after
    autograd has done its part and composed operators have been taken apart."""

    value: Value
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __new__(cls, value: Value) -> Self:
        meta = value.meta
        self = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=torch.device("cpu")
        )
        self.value, value.tensor = value, weakref.ref(self)
        return self

    def __repr__(self, **_: Any) -> str:  # runs nothing
        value = self.value
        return f"Lazy({geometry_of(value.meta) if value.concrete is None else value.concrete!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(as_value, (tuple(args), kwargs or {}))
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} changes the shape of a tensor that others may hold")
        if any(value.tensor is None for value in written(func, args, kwargs)):
            raise TypeError(f"{func} would write a lazy value into an eager tensor: read() it first")
        if _MUST_RUN & set(func.tags):
            return run_now(func, args, kwargs)
        try:
            return record(func, args, kwargs)
        except NotImplementedError:  # no kernel for the device meta
            return run_now(func, args, kwargs)


_MUST_RUN = {  # what they return, or its shape, depends on values; or they draw random numbers
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


def as_value(item: Any) -> Any:
    if isinstance(item, Lazy):
        return item.value
    return concrete_value(snapshot(item)) if isinstance(item, Tensor) else item


def snapshot(tensor: Tensor) -> Tensor:
    """A copy that lies as the original does: whoever writes that later must not change what was recorded."""
    copied = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())


def concrete_value(tensor: Tensor) -> Value:
    return Value(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), concrete=tensor)


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append a call to the recording; handles for what it will return. The twins are asked first: shapes and dtypes
    that do not fit raise here, at the user's line, and not later at a read."""
    metas, meta_kwargs = tree_map(lambda item: item.meta if isinstance(item, Value) else item, (args, kwargs))
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = "meta"
    results = func(*metas, **meta_kwargs)

    node = Node(func, args, kwargs)
    order(node, {value.storage for value in written(func, args, kwargs)})
    arguments = {id(value.meta): value for value in node.values}

    def promise(meta: Any) -> Any:
        if not isinstance(meta, Tensor):
            return meta
        if id(meta) in arguments:
            node.outputs.append(None)
            handle = arguments[id(meta)].tensor
            return None if handle is None else handle()
        value = Value(meta, node, len(node.outputs))
        node.outputs.append(Output(weakref.ref(value), geometry_of(meta), value.storage.number))
        return Lazy(value)

    return tree_map(promise, results)


# --- 2. Aliasing -----------------------------------------------------------------------------------------------------
#
# A view is a call like any other: it will be made from the tensor that its base will be, and share that one's memory.
# What must be known while recording is only which values share memory, because writes to it must not change places
# with reads. The twins know: a view of a twin shares the twin's storage.

_storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()


def storage_of(meta: Tensor) -> Storage:
    untyped = meta.untyped_storage()
    found = _storages.get(untyped._cdata)
    if found is None:
        found = _storages[untyped._cdata] = Storage(untyped)
    return found


_WRITES_UNDECLARED = {aten.native_batch_norm.default: (3, 4)}  # running means and variances: the schema hides it


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
    """The values whose memory a call writes, as its schema says: ``add_(Tensor(a!) self, ...)``."""
    found = [args[index] for index in _WRITES_UNDECLARED.get(func, ())]
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return values_in(found)


def order(node: Node, writes: set[Storage]) -> None:
    """Note what must run before ``node``. *Read after write*: the newest write of all memory that it uses. *Write after
    read*: who has read what it writes, so that nobody sees a value too new."""
    for value in node.values:
        value.users.add(node)
    for storage in {value.storage for value in node.values}:
        if storage.write is not None:
            node.writes_before.append(storage.write)
        if storage in writes:
            node.readers_before |= storage.readers
            storage.write, storage.readers = node, weakref.WeakSet()
        else:
            storage.readers.add(node)


# --- 3. The cut ------------------------------------------------------------------------------------------------------


def cut(asked: list[Node | None]) -> list[Node]:
    """The pending nodes that must run for ``asked``, in program order. Closed in both directions: what makes a value,
    with the writes that it must see, and what still has to read memory before it is written. Everything else can run
    later, or never. No recursion: a recording may be deep."""
    chosen: set[Node] = set()
    stack = [*asked]
    while stack:
        node = stack.pop()
        if node is None or node.done or node in chosen:
            continue
        if node.error is not None:
            raise node.error  # it failed before, and so does what needs it
        chosen.add(node)
        stack += [value.node for value in node.values]
        stack += node.writes_before
        stack += node.readers_before
    return sorted(chosen, key=lambda node: node.number)


# --- 4. The canonical program ----------------------------------------------------------------------------------------
#
# A training loop records the same work again and again, on other tensors. A program names tensors by *slots*, in the
# order in which they come, and holds no tensor. Floats are inputs too: a learning rate that changes is no new program.


@dataclass(frozen=True)
class Slot:
    slot: int


@dataclass(frozen=True)
class Number:
    number: int


@dataclass(frozen=True)
class Constant:
    kind: type  # since 1 == True
    value: Any


class Instruction(NamedTuple):
    func: Any
    args: tuple[Any, ...]  # of slots, numbers, constants, and tuples of these
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[int | None, ...]


class Key(NamedTuple):
    """All that a program depends on: two cuts with equal keys are the same work."""

    instructions: tuple[Instruction, ...]
    geometries: tuple[Geometry, ...]  # of the slots
    roots: tuple[int, ...]  # for each slot the first one that has the same memory
    inputs: tuple[int, ...]
    kept: frozenset[int]  # results that somebody holds


@dataclass
class Binding:
    """A cut as its program sees it, with the tensors and numbers of this run."""

    key: Key
    inputs: list[Tensor]
    numbers: list[complex]
    values: dict[int, weakref.ref[Value]]  # by slot


def bind(nodes: list[Node]) -> Binding:
    chosen = set(nodes)
    geometries: list[Geometry] = []
    roots: list[int] = []
    first: dict[int, int] = {}  # slot by storage
    slots: dict[Any, int] = {}  # by node and output, or by identity of an input
    inputs: list[tuple[int, Tensor]] = []
    numbers: list[complex] = []
    values: dict[int, weakref.ref[Value]] = {}
    kept: set[int] = set()

    def new_slot(name: Any, geometry: Geometry, storage: int) -> int:
        slot = slots[name] = len(geometries)
        geometries.append(geometry)
        roots.append(first.setdefault(storage, slot))
        return slot

    def slot_of(value: Value) -> int:
        if value.concrete is None:
            assert value.node is not None
            return slots[value.node, value.index]
        if id(value) not in slots:
            inputs.append((new_slot(id(value), geometry_of(value.concrete), value.storage.number), value.concrete))
        return slots[id(value)]

    def template(item: Any) -> Any:
        if isinstance(item, Value):
            return Slot(slot_of(item))
        if isinstance(item, (float, complex)):
            numbers.append(item)
            return Number(len(numbers) - 1)
        if isinstance(item, (list, tuple)):
            return tuple(template(part) for part in item)
        return Constant(type(item), item)

    instructions = []
    for node in nodes:
        args, kwargs = template(node.args), tuple((name, template(item)) for name, item in node.kwargs.items())
        made: list[int | None] = [None] * len(node.outputs)
        for index, output in enumerate(node.outputs):
            if output is not None:
                slot = made[index] = new_slot((node, index), output.geometry, output.storage)
                values[slot] = output.value
                if is_held(output.value(), chosen):
                    kept.add(slot)
        instructions.append(Instruction(node.func, args, kwargs, tuple(made)))
    places = tuple(slot for slot, _ in inputs)
    key = Key(tuple(instructions), tuple(geometries), tuple(roots), places, frozenset(kept))
    return Binding(key, [tensor for _, tensor in inputs], numbers, values)


def is_held(value: Value | None, chosen: set[Node]) -> bool:
    """Whether anybody but the nodes that run now may ask for it: the user, or what is still pending."""
    if value is None:
        return False
    held = value.tensor is not None and value.tensor() is not None
    return held or any(not user.done and user not in chosen for user in value.users)


# --- 5. The plan -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An instruction; ``over`` is the slot whose memory its result takes, ``dies`` are those not needed afterwards."""

    instruction: Instruction
    over: int | None
    dies: tuple[int, ...]


def plan(key: Key) -> list[Step]:
    """Made once for a program: tensors are dropped after their last use, and pointwise results written over arguments
    that die there."""
    used = [slots_in((instruction.args, instruction.kwargs)) for instruction in key.instructions]
    last: dict[int, int] = {}
    for index, instruction in enumerate(key.instructions):
        last |= dict.fromkeys([*used[index], *(slot for slot in instruction.results if slot is not None)], index)
    last |= dict.fromkeys(key.kept, len(used))
    until: dict[int, int] = {}  # the last use of some memory by any slot; that of inputs is somebody else's
    for slot, index in [*last.items(), *((slot, len(used)) for slot in key.inputs)]:
        until[key.roots[slot]] = max(index, until.get(key.roots[slot], 0))

    def donor(index: int) -> int | None:
        func, results = key.instructions[index].func, key.instructions[index].results
        plain = func._overloadname in ("default", "Tensor") and "out" in func.overloadpacket.overloads()
        if not plain or torch.Tag.pointwise not in func.tags or len(results) != 1 or results[0] is None:
            return None
        for slot in used[index]:
            alone = sum(key.roots[other] == key.roots[slot] for other in used[index]) == 1
            fits = key.geometries[slot] == key.geometries[results[0]]
            if alone and fits and until[key.roots[slot]] == index:
                return slot
        return None

    dying: list[list[int]] = [[] for _ in used]
    for slot, index in last.items():
        if index < len(used):
            dying[index].append(slot)
    return [Step(key.instructions[i], donor(i), tuple(dying[i])) for i in range(len(used))]


def slots_in(tree: Any) -> set[int]:
    if isinstance(tree, Slot):
        return {tree.slot}
    return set().union(*(slots_in(part) for part in tree)) if isinstance(tree, tuple) else set()


# --- 6. The run ------------------------------------------------------------------------------------------------------


statistics = {"built": 0, "reused": 0}
_programs: dict[Key, list[Step]] = {}


def compute(asked: list[Node | None]) -> None:
    """Run what ``asked`` needs, by the program that is kept for such work."""
    nodes = cut(asked)
    if not nodes:
        return
    binding = bind(nodes)
    statistics["reused" if binding.key in _programs else "built"] += 1
    steps = _programs[binding.key] if binding.key in _programs else plan(binding.key)
    _programs[binding.key] = steps
    slots: dict[int, Tensor] = dict(zip(binding.key.inputs, binding.inputs, strict=True))
    with torch.no_grad():
        for node, step in zip(nodes, steps, strict=True):
            try:
                run(step, slots, binding.numbers, binding.key)
                node.finish()
            except Exception as error:
                node.finish(error)  # what has run, has run; what comes behind stays pending
                break
    # Without an error, the slots that are left are those that somebody holds.
    for slot, reference in binding.values.items():
        value = reference()
        if value is not None and slot in slots:
            value.concrete, value.node = slots[slot], None
    cut(asked)  # raises the error, if it is one of theirs


def run(step: Step, slots: dict[int, Tensor], numbers: list[complex], key: Key) -> None:
    def filled(item: Any) -> Any:
        if isinstance(item, Slot):
            return slots[item.slot]
        if isinstance(item, Number):
            return numbers[item.number]
        return item.value if isinstance(item, Constant) else [filled(part) for part in item]

    func, args, kwargs, results = step.instruction
    given, options = [filled(item) for item in args], {name: filled(item) for name, item in kwargs}
    if step.over is None:
        returned = func(*given, **options)
    else:
        returned = func.overloadpacket.out(*given, **options, out=slots[step.over])
    tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    for slot, tensor in zip(results, tensors, strict=True):
        if slot is not None:
            slots[slot] = as_recorded(tensor, key.geometries[slot], is_view=key.roots[slot] != slot)
    for slot in step.dies:
        del slots[slot]


def as_recorded(tensor: Tensor, geometry: Geometry, is_view: bool) -> Tensor:
    """What was recorded is a claim, on which the user's code and autograd have built: a kernel that lays its result out
    otherwise is corrected, or refused."""
    if geometry_of(tensor) == geometry:
        return tensor
    if is_view or (tensor.dtype, tuple(tensor.shape)) != geometry[:2]:
        raise RuntimeError(f"a result was recorded as {geometry}, but is {geometry_of(tensor)}")
    return torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype).copy_(tensor)


def run_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that cannot be recorded; ``item()`` is one of them, so this is also how values are read."""
    values = values_in((args, kwargs))
    readers = [reader for value in written(func, args, kwargs) for reader in value.storage.readers]
    compute([*readers, *(node for value in values for node in (value.node, value.storage.write))])
    given, options = tree_map(lambda item: item.concrete if isinstance(item, Value) else item, (args, kwargs))
    with torch.no_grad():
        results = func(*given, **options)
    arguments = {id(value.concrete): value for value in values}

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        handle = arguments[id(result)].tensor if id(result) in arguments else None
        return Lazy(concrete_value(result)) if handle is None else handle()

    return tree_map(wrapped, results)


# --- 7. What a user needs --------------------------------------------------------------------------------------------
#
# Autograd, optimizers and modules are PyTorch's own. Autograd calls operators to compute gradients, and they are
# recorded like those of the forward; an optimizer writes parameters in place, and section 2 keeps that in order.


def lazy(tensor: Tensor) -> Tensor:
    """A lazy tensor with the values of ``tensor``."""
    return Lazy(concrete_value(snapshot(tensor.detach()))).requires_grad_(tensor.requires_grad)


def read(tensor: Tensor) -> Tensor:
    """An eager tensor with the values that ``tensor`` has now; runs what they need."""
    assert isinstance(tensor, Lazy)
    compute([tensor.value.node, tensor.value.storage.write])
    assert tensor.value.concrete is not None
    return snapshot(tensor.value.concrete)


def lazy_module(module: nn.Module) -> nn.Module:
    """Make the parameters and buffers of ``module`` lazy; those that are shared stay shared."""
    moved: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor not in moved:
                    new = lazy(tensor)
                    moved[tensor] = nn.Parameter(new, tensor.requires_grad) if name in owner._parameters else new
                table[name] = None if tensor is None else moved[tensor]  # pyright: ignore[reportArgumentType]
    return module


def main() -> None:
    torch.manual_seed(0)
    model = lazy_module(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x, labels = lazy(torch.randn(32, 16)), lazy(torch.randint(4, (32,)))
    for step in range(10):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.6f}, programs: {statistics}")


if __name__ == "__main__":
    main()
