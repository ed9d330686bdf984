"""Recording: what ``LazyTensor.__torch_dispatch__`` does with an operation.

Every operator overload gets a ``Recorder`` when it is first seen. A recorder looks up what is known of calls with the
same input specs and constants, appends a node to the tape, and returns handles for the results. Operators that cannot
be recorded run at once on their real inputs (``eager.py``); operators that need special care have handlers in
``special.py``. ``native/record.cpp`` does all of this for the usual calls, in a fraction of the time: ``dispatch``
and ``Recorder.append`` say what it does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from sys import _getframe as getframe
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch._C import _current_graph_task_id as current_graph_task
from torch.utils._pytree import tree_map_only

from marid import policy
from marid.frontend import autocast, handles, infer, random
from marid.frontend.calls import BOUNDS, NOT_RECORDED, Call, Pairs, bucket, read, take, writes_of
from marid.frontend.derive import deriver_of
from marid.frontend.handles import new_handle, storage_of
from marid.frontend.materialize import cost_of, download, overflow, run_everything
from marid.frontend.observe import observer
from marid.graph.node import Node, Operation, Output, Spec, Storage, Value, last_write, root_of
from marid.graph.program import operation_of
from marid.graph.tape import Tape
from marid.native import module
from marid.ops.facts import facts_of
from marid.report.hooks import Recorded, recorded
from marid.semantics import scopes
from marid.semantics.scopes import capture_site, current_scope, current_site
from marid.semantics.tracebacks import fold
from marid.settings import settings

__all__ = ["Recorder", "dispatch", "follow_switches", "forget_calls", "order", "recorder_of", "special"]

logger = logging.getLogger("marid")


Handler = Callable[["Recorder", tuple[Any, ...], dict[str, Any]], Any]
_handlers: dict[Any, Handler] = {}
_handled_by_key: set[Any] = set()


def special(*funcs: Any, by_key: bool = False) -> Callable[[Handler], Handler]:
    """Decorator: ``handler(recorder, args, kwargs)`` takes over these operators. ``by_key``: what it does depends on
    the key of the call alone, so once it has recorded one, those with the same key go around it."""

    def register(handler: Handler) -> Handler:
        for func in funcs:
            if func in _handlers:
                raise ValueError(f"{func} has a handler already")
            _handlers[func] = handler
        if by_key:
            _handled_by_key.update(funcs)
        return handler

    return register


class Recorder:
    """How one operator overload is recorded.

    ``known`` has what is known of its calls, by key. A ``plain`` operator needs nothing but the key to be recorded, one
    that returns the ``same_value`` not even that. One that ``draws`` takes numbers from a generator, too, and one that
    ``indexes`` is like a plain one where it does so by numbers, not by masks.
    ``exact_floats`` makes floating-point numbers part of the key, ``exact_lists`` those in lists. ``deriver`` gives
    what is known of a new call without inferring it, where that can be. One that ``asks_autocast`` may be composed of
    operators that autocast changes.
    """

    __slots__ = (
        "asks_autocast",
        "bumps",
        "deriver",
        "draws",
        "dynamic",
        "exact_floats",
        "exact_lists",
        "facts",
        "func",
        "handler",
        "indexes",
        "known",
        "op",
        "plain",
        "position",
        "random",
        "same_value",
        "takes_generator",
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.facts = facts = facts_of(func)
        self.written = facts.written
        self.position = {a.name: index for index, a in enumerate(schema.arguments)}
        self.op = operation_of(func)
        self.handler = _handlers.get(func)
        if self.handler is None and any(result.type.kind() == "ClassType" for result in schema.returns):
            self.handler = _on_the_host
        self.asks_autocast = self.handler is None and autocast.may_call_listed(func)
        self.adopt()
        self.takes_generator = facts.takes_generator
        self.random = facts.draws or facts.takes_generator
        self.dynamic = facts.dynamic
        # Operators on lists leave it to their kernels to note that tensors changed.
        self.bumps = facts.mutates and facts.is_foreach
        self.known: dict[Any, Known] = {}
        self.same_value = facts.same_value
        if self.handler is None and _is_composite(func):
            self.handler = _decompose
        from_numbers = not any("Tensor" in str(a.type) and not a.is_out for a in schema.arguments)
        self.exact_floats = self.random or from_numbers  # which then may decide the shape
        # Numbers in lists may be factors of sizes, but not where there is one for each tensor.
        self.exact_lists = self.exact_floats or not facts.is_foreach
        self.deriver = None if self.random and not self.takes_generator else deriver_of(self)
        by_key = self.handler is None or func in _handled_by_key
        self.plain = not self.random and not self.dynamic and facts.mask != "written" and by_key
        alone = self.handler is None
        self.draws = alone and self.random and self.takes_generator and not self.dynamic and not facts.mask
        self.indexes = alone and not self.random and facts.mask != ""

    def adopt(self) -> None:
        """Have the C++ half record calls of the operator, where it can."""
        schema = self.func._schema
        module.adopt(schema.name, schema.overload_name, id(self.func), self.asks_autocast)

    def is_changed_by_autocast(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether autocast is on and changes what this operator is composed of."""
        if not autocast.is_on():
            return False
        changed = autocast.calls_listed(self.func, args, kwargs or {})
        if not autocast.may_call_listed(self.func):
            self.asks_autocast = False
            self.adopt()
        return changed

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, whatever its form; the return value for the user."""
        if recorded.listeners:
            _tell(self.op.name)
        if self.dynamic and not (self.facts.mask == "read" and _indexes_by_number(args[1])):
            return _eagerly(self, args, kwargs, None)
        if self.facts.mask == "written" and not _fits_any_count(args[0], args[1], args[2]):
            return _eagerly(self, args, kwargs, None)
        call = self.read(args, kwargs)
        known = self._known(call)
        if known.rule.eager is not None:
            return _eagerly(self, args, kwargs, known.rule.eager)
        if self.random and (random.is_of_the_cpu(call.generator) or not self._draw(call, known.rule)):
            return _eagerly(self, args, kwargs, None)
        for tensor in {id(call.tensors[index]): call.tensors[index] for index, _ in known.rule.resized}.values():
            _unshare(tensor, call)
        for index, spec in known.rule.resized:
            _set_geometry(call.tensors[index], spec)
        if settings.log_intercepts:
            _log(self.op.name)
        return self.append(known, call.args, call.kwargs, call.tensors, getframe())

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call whose tensors are all on one device. Raises torch's device error for others."""
        call = read(self, args, kwargs)
        call.key = self.key_of(call.key, call.tensors) if call.tensors else (call.key, call.device)
        return call

    def key_of(self, key: Any, tensors: list[Any]) -> Any:
        """The key of a call in ``known``: where an argument is written, which of them share memory is part of it."""
        if not self.op.mutates:
            return key
        roots = [id(root_of(tensor._value)) for tensor in tensors]
        if len(set(roots)) == len(roots):
            return key
        return key, _first_occurrences(roots), _first_occurrences([id(tensor) for tensor in tensors])

    def _known(self, call: Call) -> Known:
        """What is known of calls like this one, inferred when it is the first."""
        known = self.known.get(call.key)
        if known is None:
            values = tuple([tensor._value for tensor in call.tensors])
            if self.deriver is not None:
                known = self.deriver(self, call.key, call.args, call.kwargs, values)
            if known is None:
                same = list(_first_occurrences([id(tensor) for tensor in call.tensors]))
                rule = infer.infer(self.request(call.args, call.kwargs, values, same, call.device))
                known = self.learn(call.key, rule, call.args, call.kwargs, call.device)
        return known

    def request(self, args: Any, kwargs: Any, values: Sequence[Value], same: list[int], device: int) -> infer.Request:
        """A call to infer."""
        probes = not self.random or self.takes_generator
        named = dict(kwargs or ())
        return infer.Request(self.func, args, named, list(values), same, device, probes, self.op.view, self.op.mutates)

    def learn(self, key: Any, rule: infer.Rule, args: Any, kwargs: Any, device: int) -> Known:
        """Keep the rule of calls with this key."""
        if len(self.known) >= policy.RULES_PER_OPERATOR:
            self.forget()
        if key in self.known:
            module.forget_known()
        known = self.known[key] = Known(rule, writes_of(self, args, kwargs), handles.tape(device))
        return known

    def forget(self) -> None:
        """Know nothing of its calls any more."""
        self.known.clear()
        module.forget_known()

    def _draw(self, call: Call, rule: infer.Rule) -> bool:
        """Take the numbers that the call will need from its generator; whether that is known beforehand."""
        if not self.takes_generator:
            return False
        of = rule.outs[0].spec
        assert of is not None
        named = dict(call.kwargs or ())
        with random.generator_of(call.generator, call.device) as generator:
            drawn = random.draw(self.func.name(), generator, of, call.args, named)
        if drawn is not None:
            watching = observer()
            if watching is not None:
                watching.drew(call.generator, call.device, self.func.name(), of, call.args, named, drawn)
            call.kwargs = tuple({**named, "generator": drawn}.items())
        return drawn is not None

    def append(
        self,
        known: Known,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] | None,
        tensors: list[Any],
        frame: FrameType | None,
    ) -> Any:
        """Add a node for a call to the tape, with the user's line at or outside ``frame``; handles for its results."""
        tape, scope = known.tape, current_scope()
        node = Node(
            next(tape.sequence),
            self.op,
            args,
            kwargs,
            known.spec,
            None,
            capture_site(frame),
            scope if current_graph_task() < 0 else scope.backward,
        )
        order(node, tensors, known.writes)
        if known.spec is None:
            node.outs = outs = []
            returned = _results(node, known.rule.returns, tensors, outs)
        else:
            storage = None
            if known.view_of is not None:
                base = tensors[known.view_of]
                node.root, storage = root_of(base._value), storage_of(base)
            returned = new_handle(node, known.spec, storage)
        if self.bumps:
            torch.autograd.graph.increment_version([tensors[index] for index in known.writes])
        tape.append(node, known.cost)
        if tape.room < 0:
            overflow(tape)
        return returned


_NOTHING = infer.OutSpec((), None)


class Known:
    """What is known of calls with one key: the rule, which tensors they write, and what recording them needs.

    ``repeats`` says that another such call needs nothing but one more node. Where there is one result, it is an
    argument (``returned``), or new: of ``spec``, a view of argument ``view_of`` if that is not None, and copied from
    the pattern at the address ``pattern`` where there are patterns. Of several results, ``several`` says the same in
    tuples; it is None where they are not a plain list.
    """

    __slots__ = ("cost", "pattern", "repeats", "returned", "rule", "several", "spec", "tape", "view_of", "writes")

    def __init__(self, rule: infer.Rule, writes: list[int], tape: Tape) -> None:
        self.rule = rule
        self.writes = writes
        self.tape = tape
        self.follow_settings()
        one = rule.returns if isinstance(rule.returns, infer.OutSpec) else _NOTHING
        self.returned = one.same_as
        self.spec = one.spec if one.same_as is None else None
        self.view_of = one.view_of
        self.pattern = _pattern(self.spec)
        self.several = () if rule.returns is None else None
        if type(rule.returns) is list:
            described = [_described(part) for part in rule.returns]
            self.several = None if NotImplemented in described else tuple(described)

    def follow_settings(self) -> None:
        """Work out again what depends on ``marid.settings``."""
        self.cost = cost_of(self.rule.nbytes)
        watched = settings.log_intercepts or recorded.listeners  # then each call comes by here
        self.repeats = self.rule.eager is None and not self.rule.resized and not watched


def _pattern(spec: Spec | None) -> int | None:
    return None if spec is None or spec.pattern is None else spec.pattern._cdata


def _described(part: Any) -> Any:
    if part is None:
        return None
    if type(part) is list or (part.same_as is None and _pattern(part.spec) is None):
        return NotImplemented
    return part.same_as, part.path, part.spec, _pattern(part.spec), part.view_of


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


def order(node: Node, tensors: list[Any], writes: Sequence[int]) -> None:
    """Note what the node must see and, for what it writes, who may still have to read."""
    storages = [storage for tensor in tensors if (storage := tensor._storage) is not None]
    if not storages and not writes:
        return
    after = [write for storage in storages if (write := last_write(storage)) is not None]
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
    out = Output(node, described.path, spec, root)
    outs.append(ref(out))
    return new_handle(out, spec, storage)


def _unshare(tensor: Any, call: Call) -> None:
    """Give ``tensor`` a value of its own before an operation changes its geometry; other aliases keep theirs."""
    old = tensor._value
    own = recorder_of(torch.ops.aten.alias.default).record((tensor,), {})._value
    tensor._value = own
    call.args, call.kwargs = _swapped(call.args, old, own), _swapped(call.kwargs, old, own)


def _swapped(arg: Any, old: Value, new: Value) -> Any:
    if type(arg) is tuple:
        return tuple([_swapped(item, old, new) for item in arg])
    return new if arg is old else arg


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


def _switches() -> tuple[Any, ...]:
    """What results depend on, beside the arguments of a call: their dtype may be the default, and the kernel that is
    taken decides how they lie in memory."""
    private: Any = torch._C
    kernels = private._get_mkldnn_enabled(), private._get_nnpack_enabled(), torch.get_num_threads()
    return torch.get_default_dtype(), *kernels


_tables = {_switches(): _recorders}


def follow_switches() -> None:
    """Record by the rules for the switches as they are now."""
    global _recorders
    _recorders = _tables.setdefault(_switches(), {})
    module.use(_recorders)


def _settings_changed() -> None:
    for recorders in _tables.values():
        for recorder in recorders.values():
            for known in recorder.known.values():
                known.follow_settings()


settings.when_changed(_settings_changed)
recorded.when_changed(_settings_changed)


def _tell(name: str) -> None:
    site, scope = current_site(), current_scope()
    scope = scope if current_graph_task() < 0 else scope.backward
    recorded.tell(Recorded(name, scope.module_path, scope.phase, None if site is None else str(site)))


def _log(name: str) -> None:
    """Say that an operation is recorded: to the logger, or where nobody has set that up, to standard error."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("recorded %s at %s", name, current_site())
    else:
        print(f"marid: recorded {name} at {current_site()}", file=sys.stderr)


def forget_calls() -> None:
    """Know nothing of calls any more, of any operator and under any switches; what they return is inferred again."""
    for table in list(_tables.values()):
        for recorder in list(table.values()):
            recorder.known.clear()
    module.forget_known()


def recorder_of(func: Any) -> Recorder:
    """The recorder of an operator overload."""
    found = _recorders.get(id(func))
    if found is None:
        found = _recorders[id(func)] = Recorder(func)
    return found


def dispatch(cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """``__torch_dispatch__``: record one operation."""
    try:
        recorder = recorder_of(func)
        if recorder.asks_autocast and recorder.is_changed_by_autocast(args, kwargs):
            return autocast.taken_apart(func, args, kwargs or {})
        if recorder.plain:
            taken = take(cls, args, kwargs, recorder.exact_floats, recorder.exact_lists)
            if taken is not None:
                key, values, named, tensors = taken
                known = recorder.known.get(recorder.key_of(key, tensors))
                if known is not None and known.repeats:
                    return recorder.append(known, values, named, tensors, getframe().f_back)
        return _record(func, args, kwargs)
    except BaseException as error:
        fold(error)
        raise


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Record a call that is not like one recorded before, or needs more than a node."""
    recorder = recorder_of(func)
    if recorder.handler is not None:
        return recorder.handler(recorder, args, kwargs or {})
    return recorder.record(args, kwargs or {})


def _on_the_host(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that makes an object of tensors, as those of quantised modules do: it is an object of the host."""
    own = handles._handle_class
    args, kwargs = tree_map_only(own, lambda tensor: download(tensor, recorder.op.name), (args, kwargs))
    return recorder.func(*args, **kwargs)


def _eagerly(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> Any:
    from marid.frontend.eager import run_eagerly

    return run_eagerly(recorder, args, kwargs, reason)


def draw_for(
    recorder: Recorder, known: Known, args: tuple[Any, ...], kwargs: Pairs | None, at_once: bool
) -> tuple[Pairs, torch.Generator | None] | None:
    """Take the numbers that a call like one that is ``known`` needs from its device's generator.

    Returns its keyword arguments with the position of these numbers, and a generator that is there if the call runs
    ``at_once``; None, and nothing is taken, where that is not known beforehand or somebody watches.
    """
    spec, device = known.rule.outs[0].spec, known.tape.device
    if spec is None or observer() is not None:
        return None
    named = dict(kwargs or ())
    drawn = random.draw(recorder.func.name(), random.default_generator(device), spec, args, named)
    if drawn is None:
        return None
    generator = random.generator_at(drawn) if at_once else None
    return tuple({**named, "generator": drawn}.items()), generator


def _draw_failed(known: Known, kwargs: Pairs) -> None:
    """A call that ran at once has failed, with keyword arguments of ``draw_for``."""
    random.draw_failed(known.tape.device, dict(kwargs)["generator"])


module.configure(
    draw_for=draw_for,
    draw_failed=_draw_failed,
    Operation=Operation,
    Node=Node,
    Output=Output,
    Storage=Storage,
    Tape=Tape,
    Recorder=Recorder,
    Known=Known,
    not_recorded=NOT_RECORDED,
    bucket=bucket,
    bounds=BOUNDS,
    tapes=handles.tapes,
    last_write=last_write,
    run_pending=run_everything,
)
module.use(_recorders)
scopes.use(module)


def record_in_cpp() -> Callable[[], None]:
    """Have the C++ half record what it can. Returns what ends that."""
    module.record_calls(True)
    for found in _recorders.values():
        found.adopt()
    return lambda: module.record_calls(False)


def detach_in_cpp() -> Callable[[], None]:
    """Have the C++ half detach the device's tensors where autograd saves them. Returns what ends that."""
    module.detach_directly(True)
    return lambda: module.detach_directly(False)
