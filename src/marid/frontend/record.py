"""Recording: what is done with an operation on tensors of the device.

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

import torch
from torch._C import _current_graph_task_id as current_graph_task
from torch.utils._pytree import tree_map_only

from marid import policy
from marid.frontend import autocast, handles, infer, random
from marid.frontend.calls import BOUNDS, NOT_RECORDED, Call, bucket, read, take, writes_of
from marid.frontend.derive import deriver_of
from marid.frontend.drawing import draw_for, take_numbers
from marid.frontend.eager import run_eagerly
from marid.frontend.handles import new_handle, storage_of
from marid.frontend.indices import first_occurrences, fits_any_count, indexes_by_number
from marid.frontend.known import Known
from marid.frontend.limits import overflow
from marid.frontend.materialize import download, run_everything
from marid.frontend.results import order, results_of, set_geometry
from marid.frontend.storage_objects import resize_memory
from marid.graph.arguments import map_leaves
from marid.graph.node import Node, Operation, Spec, Storage, Value, last_write, root_of
from marid.graph.program import operation_of
from marid.graph.python_operator import autocasting
from marid.graph.tape import Tape
from marid.native import module
from marid.ops.facts import facts_of
from marid.report.hooks import Recorded, recorded
from marid.semantics import scopes
from marid.semantics.scopes import capture_site, current_scope, current_site
from marid.semantics.tracebacks import fold
from marid.settings import settings

logger = logging.getLogger("marid")


Handler = Callable[["Recorder", tuple[Any, ...], dict[str, Any]], Any]
_handlers: dict[Any, Handler] = {}
_handled_by_key: set[Any] = set()


def special(*funcs: Any, by_key: bool = False) -> Callable[[Handler], Handler]:
    """Decorator: ``handler(recorder, args, kwargs)`` takes over these operators, or a kind of collectives
    (``Facts.collective``), some of which PyTorch defines late. ``by_key``: what it does depends on the key of the call
    alone, so once it has recorded one, those with the same key go around it."""

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
    One that may run ``at_once`` does so where its arguments exist (``frontend/ahead.py``), whatever is known; one that
    may only ``at_once_by_rule``, as it writes to ``out``, where what is known says that this keeps its geometry.
    ``exact_floats`` makes floating-point numbers part of the key, ``exact_lists`` those in lists. ``deriver`` gives
    what is known of a new call without inferring it, where that can be. One that ``asks_autocast`` may be composed of
    operators that autocast changes.
    """

    __slots__ = (
        "asks_autocast", "at_once", "at_once_by_rule", "bumps", "deriver", "draws", "dynamic", "exact_floats",
        "exact_lists", "facts", "func", "handler", "indexes", "known", "op", "plain", "position",
        "random", "same_value", "takes_generator", "written"
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.facts = facts = facts_of(func)
        self.written = facts.written
        self.position = {a.name: index for index, a in enumerate(schema.arguments)}
        self.op = operation_of(func)
        self.handler = _handlers.get(func) or _handlers.get(facts.collective)
        if self.handler is None and any(result.type.kind() == "ClassType" for result in schema.returns):
            self.handler = _on_the_host
        self.asks_autocast = self.handler is None and (facts.in_python or autocast.may_call_listed(func))
        self.adopt()
        self.takes_generator = facts.takes_generator
        self.random = facts.draws or facts.takes_generator
        self.dynamic = facts.dynamic
        # Operators on lists leave it to their kernels to note that tensors changed.
        self.bumps = facts.mutates and facts.is_foreach
        self.known: dict[Any, Known] = {}
        self.same_value = facts.same_value
        from_numbers = not any("Tensor" in str(a.type) and not a.is_out for a in schema.arguments)
        self.exact_floats = self.random or from_numbers  # which then may decide the shape
        # Numbers in lists may be factors of sizes, but not where there is one for each tensor.
        self.exact_lists = self.exact_floats or not facts.is_foreach
        self.deriver = None if self.random and not self.takes_generator else deriver_of(self)
        by_key = self.handler is None or func in _handled_by_key
        self.plain = not self.random and not self.dynamic and facts.mask != "written" and by_key
        alone = self.handler is None
        self.draws = by_key and self.random and self.takes_generator and not self.dynamic and not facts.mask
        self.indexes = alone and not self.random and facts.mask != ""
        usual = by_key and (self.draws or not self.random)
        usual = usual and _returns_tensors(schema) and not facts.in_python
        self.at_once = usual and facts.keeps_geometry
        self.at_once_by_rule = usual and facts.writes_to_out

    def adopt(self) -> None:
        """Have the C++ half record calls of the operator, where it can."""
        schema = self.func._schema
        kernel, general = self.facts.kernel, self.facts.with_generator
        module.adopt(schema.name, schema.overload_name, id(self.func), self.asks_autocast, kernel, general)

    def is_changed_by_autocast(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether autocast is on and changes what this operator is composed of, or what its kernel in Python does."""
        if not autocast.is_on():
            return False
        if self.facts.in_python:
            return True
        changed = autocast.calls_listed(self.func, args, kwargs or {})
        if not autocast.may_call_listed(self.func):
            self.asks_autocast = False
            self.adopt()
        return changed

    def under_autocast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what autocast changes: by the operators that it is composed of, or at once."""
        if not self.facts.in_python:
            return autocast.taken_apart(self.func, args, kwargs)
        with autocasting(torch.get_autocast_dtype(handles.DEVICE_TYPE)):
            return run_eagerly(self, args, kwargs, "its kernel is written in Python, and autocast is on")

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, whatever its form; the return value for the user."""
        if recorded.listeners:
            _tell(self.op.name)
        if self.dynamic and not (self.facts.mask == "read" and indexes_by_number(args[1])):
            return run_eagerly(self, args, kwargs, None)
        if self.facts.mask == "written" and not fits_any_count(args[0], args[1], args[2]):
            return run_eagerly(self, args, kwargs, None)
        call = self.read(args, kwargs)
        known = self._known(call)
        if known.rule.eager is not None:
            return run_eagerly(self, args, kwargs, known.rule.eager)
        if self.random and (random.is_of_the_cpu(call.generator) or not take_numbers(self, call, known.rule)):
            return run_eagerly(self, args, kwargs, None)
        for tensor in {id(call.tensors[index]): call.tensors[index] for index, _ in known.rule.resized}.values():
            _unshare(tensor, call)
        for index, spec in known.rule.resized:
            set_geometry(call.tensors[index], spec)
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
        return key, first_occurrences(roots), first_occurrences([id(tensor) for tensor in tensors])

    def _known(self, call: Call) -> Known:
        """What is known of calls like this one, inferred when it is the first."""
        known = self.known.get(call.key)
        if known is None:
            values = tuple([tensor._value for tensor in call.tensors])
            if self.deriver is not None:
                known = self.deriver(self, call.key, call.args, call.kwargs, values)
            if known is None:
                same = list(first_occurrences([id(tensor) for tensor in call.tensors]))
                rule = infer.infer(self.request(call.args, call.kwargs, values, same, call.device))
                known = self.learn(call.key, rule, call.args, call.kwargs, call.device)
        return known

    def request(self, args: Any, kwargs: Any, values: Sequence[Value], same: list[int], device: int) -> infer.Request:
        """A call to infer."""
        probes = not self.facts.of_others and (not self.random or self.takes_generator)
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
            returned = results_of(node, known.rule.returns, tensors, outs)
        else:
            storage = None
            if known.view_of is not None:
                base = tensors[known.view_of]
                node.root, storage = root_of(base._value), storage_of(base)
            returned = new_handle(node, known.spec, storage)
        if self.bumps:
            torch.autograd.graph.increment_version([tensors[index] for index in known.writes])
        tape.append(node, known.cost)
        if tape.budget < 0:
            overflow(tape)
        return returned


def _returns_tensors(schema: Any) -> bool:
    return all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)


def _unshare(tensor: Any, call: Call) -> None:
    """Give ``tensor`` a value of its own before an operation changes its geometry; other aliases keep theirs."""
    old = tensor._value
    own = recorder_of(torch.ops.aten.alias.default).record((tensor,), {})._value
    tensor._value = own
    call.args, call.kwargs = map_leaves(lambda leaf: own if leaf is old else leaf, (call.args, call.kwargs))


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
    recorder_of(torch.ops.aten._to_copy.default)  # which need not come to Python for a tensor of the host


def _settings_changed() -> None:
    handles.record_again()  # who listens is told of what is recorded
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


def dispatch(func: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Record one operation, of which the C++ half does not know how."""
    try:
        recorder = recorder_of(func)
        if recorder.asks_autocast and recorder.is_changed_by_autocast(args, kwargs):
            return recorder.under_autocast(args, kwargs or {})
        if recorder.plain:
            taken = take(handles._handle_class, args, kwargs, recorder.exact_floats, recorder.exact_lists)
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
    with torch._C.DisableTorchFunctionSubclass():  # what is asked of a user's subclass here is no call of theirs
        return (recorder.handler or Recorder.record)(recorder, args, kwargs or {})


def _on_the_host(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that makes an object of tensors, as those of quantised modules do: it is an object of the host."""
    own = handles._handle_class
    args, kwargs = tree_map_only(own, lambda tensor: download(tensor, recorder.op.name), (args, kwargs))
    return recorder.func(*args, **kwargs)


module.configure(
    draw_for=draw_for,
    Operation=Operation,
    Storage=Storage,
    Tape=Tape,
    Recorder=Recorder,
    Known=Known,
    Spec=Spec,
    not_recorded=NOT_RECORDED,
    bucket=bucket,
    bounds=BOUNDS,
    tapes=handles.tapes,
    spec_of=handles.spec_of,
    last_write=last_write,
    run_pending=run_everything,
    dispatch=dispatch,
    recorder_of=recorder_of,
    resize_memory=resize_memory,
)
module.use(_recorders)
scopes.use(module)


def record_in_cpp() -> None:
    """Have operators on tensors of the device recorded, those that are new since the last call too."""
    module.record_calls()
    recorder_of(torch.ops.aten._to_copy.default)
    for found in list(_recorders.values()):
        found.adopt()
