"""Recording: what ``LazyTensor.__torch_dispatch__`` does with an operation.

Every operator overload gets a ``Recorder`` when it is first seen. A recorder looks up the rule for the input specs and
constants, appends a node to the tape, and returns handles for the results. Operators that cannot be recorded run at
once on their real inputs (``eager.py``); operators that need special care have handlers in ``special.py``.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from sys import _getframe as getframe
from typing import Any
from weakref import ref

import torch
from torch._C import _current_graph_task_id as current_graph_task

from marid.frontend import handles, infer, random
from marid.frontend.handles import make_subclass, new_handle, storage_of
from marid.frontend.materialize import cost_of, overflow
from marid.graph.node import Node, Operation, Output, Spec, Storage, Value, last_write, root_of
from marid.graph.tape import Tape
from marid.semantics.scopes import INTERNAL, capture_site, sites, state
from marid.settings import settings

__all__ = ["Call", "Recorder", "dispatch", "follow_default_dtype", "recorder_of", "special"]

logger = logging.getLogger("marid")

_RULES_PER_OPERATOR = 8192

# Operators that write arguments which their schema does not mark as written, by argument name.
_UNMARKED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}
# Operators tagged as random that draw nothing on the CPU.
_NEVER_RANDOM = {"aten::_scaled_dot_product_flash_attention_for_cpu"}
# Operators whose output shape depends on data only where they index by a mask.
_MASK_INDEXED = {"aten::index", "aten::_unsafe_index"}
# Operators that raise, depending on data, where the values do not fit what a mask chooses.
_MASK_WRITTEN = {"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"}
# Operators whose result lies in the memory of its first argument although the schema does not say so.
_UNMARKED_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}

Handler = Callable[["Recorder", tuple[Any, ...], dict[str, Any]], Any]
_handlers: dict[Any, Handler] = {}


def special(*funcs: Any) -> Callable[[Handler], Handler]:
    """Decorator: ``handler(recorder, args, kwargs)`` takes over these operators."""

    def register(handler: Handler) -> Handler:
        for func in funcs:
            if func in _handlers:
                raise ValueError(f"{func} has a handler already")
            _handlers[func] = handler
        return handler

    return register


class Call:
    """One call of an operator, flattened: ``key`` finds its rule; ``values`` stand in ``args``/``kwargs`` for tensors.

    ``tensors`` are the lazy tensors in order of appearance (CPU scalars lifted), ``writes`` those of them written.
    """

    __slots__ = ("args", "device", "key", "kwargs", "tensors", "writes")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Any] = []
        self.writes: list[int] = []
        self.device = -1
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}


# Arguments that PyTorch takes from the CPU, whatever the device of the others: positions by operator.
_ON_CPU = {
    "aten::index": (1,),
    "aten::index_put": (1,),
    "aten::index_put_": (1,),
    "aten::_unsafe_index": (1,),
}


class Recorder:
    """How one operator overload is recorded."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        name = schema.name
        unmarked = _UNMARKED_WRITES.get(name, ())
        self.written = [
            bool((a.alias_info is not None and a.alias_info.is_write) or a.name in unmarked) for a in schema.arguments
        ]
        self.position = {a.name: index for index, a in enumerate(schema.arguments)}
        mutates = any(self.written)
        view = name in _UNMARKED_VIEWS or any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.op = Operation(func, mutates, view and not mutates)
        self.random = torch.Tag.nondeterministic_seeded in func.tags and name not in _NEVER_RANDOM
        self.takes_generator = "generator" in self.position
        # An operator that returns nothing and writes nothing is there to check values, and must run.
        checks = not schema.returns and not mutates
        self.dynamic = (
            checks or torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        )
        # Operators on lists leave it to their kernels to note that tensors changed.
        self.bumps = mutates and name.startswith("aten::_foreach_")
        self.rules: dict[tuple[Any, ...], infer.Rule] = {}
        self.known: dict[Any, tuple[Spec, torch.Tensor, Tape, int]] = {}
        self.handler = _handlers.get(func)
        if self.handler is None and _is_composite(func):
            self.handler = _decompose
        self.on_cpu = _ON_CPU.get(self.op.name, ())
        single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        self.simple = single and not mutates and not self.random and not self.dynamic and self.handler is None
        from_numbers = not any("Tensor" in str(a.type) and not a.is_out for a in schema.arguments)
        self.exact_floats = self.random or from_numbers  # which then may decide the shape

    # --- flattening ---

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read the arguments. Raises torch's device error for tensors of other devices."""
        call = Call()
        foreign: list[torch.Tensor] = []
        self._find_device(args, kwargs, call)
        plain = tuple([self._take(call, arg, index, foreign) for index, arg in enumerate(args)])
        named: dict[str, Any] = {}
        for name, arg in kwargs.items():
            if name == "device" or name == "pin_memory" or (name == "layout" and arg is torch.strided):
                continue
            call.key.append(name)
            named[name] = self._take(call, arg, self.position.get(name, -1), foreign)
        call.args, call.kwargs = plain, named
        if not call.tensors:
            call.key.append(call.device)
        if self.op.mutates and len(call.tensors) > 1:
            # Whether a result lies in an input decides which errors PyTorch raises.
            call.key.append(_first_occurrences([id(root_of(t._value)) for t in call.tensors]))
            call.key.append(_first_occurrences([id(t) for t in call.tensors]))
        return call

    def _find_device(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        cls = handles._handle_class
        for arg in (*args, *kwargs.values()):
            if type(arg) is cls:
                call.device = arg._value.spec.device
                return
            if isinstance(arg, (list, tuple)):
                for item in arg:
                    if type(item) is cls:
                        call.device = item._value.spec.device
                        return
        device = kwargs.get("device")
        call.device = _index_of(device)

    def _take(self, call: Call, arg: Any, position: int, foreign: list[torch.Tensor]) -> Any:
        kind = type(arg)
        key = call.key
        if kind is handles._handle_class:
            return self._take_tensor(call, arg, position)
        if kind is float:
            key.append(arg if self.exact_floats else _bucket(arg))
            key.append(kind)
            return arg
        if kind is int or kind is bool:
            key.append(arg)
            key.append(kind)
            return arg
        if kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            key.append(len(arg))
            key.append(tuple)
            return tuple([self._take_exact(call, item, position, foreign) for item in arg])
        if isinstance(arg, torch.Tensor):
            return self._take_tensor(call, self._lift(call, arg, position), position)
        if isinstance(arg, torch.Generator):
            return arg
        if isinstance(arg, complex):
            key.append(complex)
            return arg
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._take(
                call, arg.node.guard_int("", 0) if isinstance(arg, torch.SymInt) else arg, position, foreign
            )
        key.append(arg)
        return arg

    def _take_exact(self, call: Call, arg: Any, position: int, foreign: list[torch.Tensor]) -> Any:
        if type(arg) is float:
            call.key.append(arg)
            call.key.append(float)
            return arg
        return self._take(call, arg, position, foreign)

    def _take_tensor(self, call: Call, tensor: Any, position: int) -> Value:
        value = tensor._value
        if value.spec.device != call.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{handles.DEVICE_TYPE}:{call.device} and {handles.DEVICE_TYPE}:{value.spec.device}!"
            )
        if position >= 0 and self.written[position]:
            call.writes.append(len(call.tensors))
        call.key.append(value.spec)
        call.tensors.append(tensor)
        return value

    def _lift(self, call: Call, tensor: torch.Tensor, position: int) -> Any:
        from marid.frontend.capture import lift, lifts_everything

        written = position >= 0 and self.written[position]
        on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if on_cpu and not written and (tensor.dim() == 0 or position in self.on_cpu or lifts_everything()):
            return lift(tensor, call.device)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{handles.DEVICE_TYPE}:{call.device} and {tensor.device}!"
            f" (in {self.op.name} at {capture_site(getframe())}; move it with .to('{handles.DEVICE_TYPE}') or "
            "marid.LazyTensor.lift)"
        )

    # --- recording ---

    def rule_of(self, call: Call) -> infer.Rule:
        """The cached rule of a call, inferred when it is new."""
        key = tuple(call.key)
        rule = self.rules.get(key)
        if rule is None:
            rule = infer.infer(
                infer.Request(
                    self.func,
                    call.args,
                    {k: v for k, v in call.kwargs.items() if k != "generator"},
                    [t._value for t in call.tensors],
                    list(_first_occurrences([id(t) for t in call.tensors])),
                    call.device,
                    not self.random or self.takes_generator,
                    self.op.view,
                    self.op.mutates,
                )
            )
            if len(self.rules) >= _RULES_PER_OPERATOR:
                self.rules.clear()
            self.rules[key] = rule
        return rule

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, whatever its form; the return value for the user."""
        if self.dynamic and not (self.op.name in _MASK_INDEXED and _indexes_by_number(args[1])):
            return _eagerly(self, args, kwargs, None)
        if self.op.name in _MASK_WRITTEN and not _fits_any_count(args[0], args[1], args[2]):
            return _eagerly(self, args, kwargs, None)
        call = self.flatten(args, kwargs)
        rule = self.rule_of(call)
        if rule.eager is not None:
            return _eagerly(self, args, kwargs, rule.eager)
        if self.random:
            given = call.kwargs.get("generator")
            if random.is_of_the_cpu(given) or self._draw(call, rule) is None:
                return _eagerly(self, args, kwargs, None)
        return self._append(call, rule)

    def _draw(self, call: Call, rule: infer.Rule) -> Any:
        if not self.takes_generator:
            return None
        of = rule.outs[0].spec
        assert of is not None
        with random.generator_of(call.kwargs.get("generator"), call.device) as generator:
            drawn = random.draw(self.func.name(), generator, of, call.args, call.kwargs)
        if drawn is not None:
            call.kwargs["generator"] = drawn
        return drawn

    def _append(self, call: Call, rule: infer.Rule) -> Any:
        tape = handles.tape(call.device)
        tensors = call.tensors
        for tensor in {id(tensors[index]): tensors[index] for index, _ in rule.resized}.values():
            _unshare(tensor, call)
        node = Node(
            next(tape.sequence),
            self.op,
            call.args,
            tuple(call.kwargs.items()) if call.kwargs else None,
            None,
            None,
            capture_site(getframe()),
            state.scope if current_graph_task() < 0 else state.scope.backward,
        )
        _order(node, tensors, call.writes)
        outs: list[ref[Output]] = []
        returned = _results(node, rule.returns, tensors, outs)
        if not (len(rule.outs) == 1 and rule.outs[0].path == () and rule.outs[0].same_as is None):
            node.outs = outs
        for index, spec in rule.resized:
            _set_geometry(tensors[index], spec)
        if self.bumps:
            torch.autograd.graph.increment_version([tensors[index] for index in call.writes])
        tape.append(node, cost_of(rule.nbytes))
        if settings.log_intercepts:
            logger.info("recorded %s at %s", self.op.name, node.site)
        if tape.room < 0:
            overflow(tape)
        return returned


def _indexes_by_number(indices: Any) -> bool:
    return not any(index is not None and _is_mask(index) for index in indices)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype is torch.bool or index.dtype is torch.uint8


def _fits_any_count(target: torch.Tensor, indices: Any, values: torch.Tensor) -> bool:
    """Whether values can be written however many elements a mask among the indices chooses."""
    if _indexes_by_number(indices) or values.numel() == 1:
        return True
    (position, mask), *others = [(i, index) for i, index in enumerate(indices) if index is not None]
    behind = target.dim() - position - mask.dim()  # dimensions of the result to the right of the chosen elements
    return not others and (values.dim() <= behind or values.shape[-1 - behind] == 1)


def _first_occurrences(ids: list[int]) -> tuple[int, ...]:
    return tuple([ids.index(one) for one in ids])


def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


def _decompose(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Autograd takes these apart; they arrive whole when it is off (inference mode).
    return recorder.func.decompose(*args, **kwargs)


# Beyond these, a number does not fit into some dtype: filling a tensor with it raises.
_BOUNDS = sorted(
    [float(torch.iinfo(dtype).max) for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)]
    + [float(torch.iinfo(dtype).max) for dtype in (torch.uint32, torch.int64, torch.uint64)]
    + [torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
)
_LARGE = ["large", *(f"beyond {bound}" for bound in _BOUNDS)]
_NEGATIVE = ["negative", *(f"beyond -{bound}" for bound in _BOUNDS)]


def _bucket(number: float) -> str:
    """The metadata of a result may depend on the sign and range of a number, never on the number."""
    if number != number:
        return "nan"
    if 0.0 <= number <= 1.0:
        return "unit"
    return _LARGE[bisect_left(_BOUNDS, number)] if number > 0 else _NEGATIVE[bisect_left(_BOUNDS, -number)]


def _index_of(device: Any) -> int:
    if device is None:
        return handles.current_device()
    device = torch.device(device)
    return handles.current_device() if device.index is None else device.index


def _order(node: Node, tensors: list[Any], writes: list[int]) -> None:
    """Note what the node must see and, for what it writes, who may still have to read."""
    after: list[Node] = []
    for tensor in tensors:
        storage = tensor._storage
        if storage is not None:
            write = last_write(storage)
            if write is not None:
                after.append(write)
    overwrites: list[Value] = []
    for index in writes:
        storage = storage_of(tensors[index])
        write = storage.last_write
        if storage.last_read > (write.seq if write is not None else 0):
            overwrites.append(root_of(tensors[index]._value))
        storage.last_write = node
    for tensor in tensors:
        if tensor._storage is not None:
            tensor._storage.last_read = node.seq
    if writes:
        for index in writes:
            tensors[index]._storage.last_read = 0
    node.after = tuple(after) if after else None
    node.overwrites = tuple(overwrites) if overwrites else None


def _results(node: Node, described: Any, tensors: list[Any], outs: list[ref[Output]]) -> Any:
    """Handles in the shape of the return value; fills ``outs`` for nodes with several results."""
    if described is None:
        return None
    if type(described) is list:
        return [_results(node, part, tensors, outs) for part in described]
    if described.same_as is not None:
        return tensors[described.same_as]
    spec = described.spec
    root: Value | None = None
    storage: Storage | None = None
    if described.view_of is not None:
        base = tensors[described.view_of]
        root, storage = root_of(base._value), storage_of(base)
    if described.path == ():
        node.spec, node.root = spec, root
        return new_handle(node, spec, storage)
    out = Output(node, described.path, spec, root)
    outs.append(ref(out))
    return new_handle(out, spec, storage)


def _unshare(tensor: Any, call: Call) -> None:
    """Give ``tensor`` a value of its own before an operation changes its geometry; other aliases keep theirs."""
    old = tensor._value
    own = recorder_of(torch.ops.aten.alias.default).record((tensor,), {})._value
    tensor._value = own

    def swap(arg: Any) -> Any:
        if type(arg) is tuple:
            return tuple([own if item is old else item for item in arg])
        return own if arg is old else arg

    call.args = tuple([swap(arg) for arg in call.args])
    call.kwargs = {name: swap(arg) for name, arg in call.kwargs.items()}


def _set_geometry(tensor: Any, spec: Spec) -> None:
    """Let the handle and its value show a new geometry."""
    tensor._value.spec = spec
    retarget(tensor, tensor._value, tensor._storage)


def retarget(tensor: Any, value: Value, storage: Storage | None) -> None:
    """Make ``tensor`` a handle of another value: what ``.data =`` and ``set_`` do."""
    assert value.spec is not None
    if tensor.is_conj() != value.spec.conj:
        torch._C._set_conj(tensor, value.spec.conj)
    if tensor.is_neg() != value.spec.neg:
        torch._C._set_neg(tensor, value.spec.neg)
    with handles.below_autograd():
        torch._C.TensorBase.data.__set__(tensor, new_handle(value, value.spec, storage))  # pyright: ignore
    tensor._value = value
    tensor._storage = storage


# --- the dispatch entry --------------------------------------------------------------------------------------------

# By identity, because hashing an OpOverload runs Python; a recorder keeps its operator alive.
_recorders: dict[int, Recorder] = {}
_tables = {torch.get_default_dtype(): _recorders}  # the dtype of a result may be the default


def follow_default_dtype() -> None:
    """Record by the rules of the default dtype that is set now."""
    global _recorders
    _recorders = _tables.setdefault(torch.get_default_dtype(), {})


def _settings_changed() -> None:
    for recorders in _tables.values():
        for recorder in recorders.values():
            recorder.known.clear()  # what dispatch remembers has charges in it, and does not log


settings.when_changed(_settings_changed)


def recorder_of(func: Any) -> Recorder:
    """The recorder of an operator overload."""
    found = _recorders.get(id(func))
    if found is None:
        found = _recorders[id(func)] = Recorder(func)
    return found


def dispatch(cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """``__torch_dispatch__``: record one operation.

    The common case is written out, because it is most of what recording costs: an operator that returns one tensor and
    writes none, on one tensor, two tensors, or a tensor and a number, seen before with these specs. Everything else
    goes through ``Recorder.record``, which does the same in general.
    """
    recorder = _recorders.get(id(func))
    if recorder is None:
        recorder = recorder_of(func)
    if recorder.simple and not kwargs and type(first := args[0]) is cls:
        value = first._value
        storage = first._storage
        other = None
        key: Any = None
        values: tuple[Any, ...] = ()
        if len(args) == 1:
            key = value.spec
            values = (value,)
        elif len(args) == 2:
            second = args[1]
            kind = type(second)
            if kind is cls:
                operand = second._value
                other = second._storage
                key = (value.spec, operand.spec)
                values = (value, operand)
            elif kind is float:
                key = (
                    value.spec,
                    "unit" if 0.0 <= second <= 1.0 else "large" if 1.0 < second <= 127.0 else _bucket(second),
                )
                values = (value, second)
            elif kind is int:
                key = (value.spec, second)
                values = (value, second)
        known = recorder.known.get(key)
        if known is not None:
            spec, pattern, tape, cost = known
            frame = getframe().f_back
            # capture_site, with its first step written out: most often the caller is the user.
            site = sites.get(id(frame.f_code)) if frame is not None else None
            if site is None or site is INTERNAL or (site := site.get(frame.f_lasti)) is None:  # pyright: ignore[reportOptionalMemberAccess]
                site = capture_site(frame)
            node = Node(
                next(tape.sequence),
                recorder.op,
                values,
                None,
                spec,
                None,
                site,
                state.scope if current_graph_task() < 0 else state.scope.backward,
            )
            if storage is not None:
                storage.last_read = node.seq
                if storage.last_write is not None and (write := last_write(storage)) is not None:
                    node.after = (write,)
            if other is not None:
                other.last_read = node.seq
                if other.last_write is not None and (write := last_write(other)) is not None:
                    node.after = (write,) if node.after is None else (*node.after, write)
            tape.entries.append(ref(node))
            handle = make_subclass(cls, pattern)
            handle._value = node
            if recorder.op.view:
                node.root = value.root or value
                handle._storage = storage if storage is not None else storage_of(first)
            else:
                handle._storage = None
            tape.room -= cost
            if tape.room < 0:
                overflow(tape)
            return handle
        if key is not None:
            result = recorder.record(args, {})
            _remember(recorder, key, args, result)
            return result
    if recorder.handler is not None:
        return recorder.handler(recorder, args, kwargs or {})
    return recorder.record(args, kwargs or {})


def _remember(recorder: Recorder, key: Any, args: tuple[Any, ...], _result: Any) -> None:
    """Let ``dispatch`` record the next call with these specs by itself."""
    rule = recorder.rule_of(recorder.flatten(args, {}))
    if rule.eager is not None or settings.log_intercepts:
        return
    spec = rule.outs[0].spec
    assert spec is not None
    if spec.pattern is not None:
        if len(recorder.known) >= _RULES_PER_OPERATOR:
            recorder.known.clear()
        recorder.known[key] = (spec, spec.pattern, handles.tape(spec.device), cost_of(rule.nbytes))


def _eagerly(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> Any:
    from marid.frontend.eager import run_eagerly

    return run_eagerly(recorder, args, kwargs, reason)
