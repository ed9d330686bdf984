"""The way out: operators that cannot be recorded run at once, on their real inputs.

Nothing is made up here: the operator's own CPU kernel computes the result, or raises.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch

from marid.engine.inprocess import concretely
from marid.errors import UnsupportedOperationError
from marid.frontend import handles, random
from marid.frontend.calls import Call, writes_of
from marid.frontend.materialize import engine, materialize, run_anyway
from marid.graph.node import Draw, Node, Output, input_values, root_of
from marid.report.stats import counters
from marid.semantics.scopes import capture_site

if TYPE_CHECKING:
    from marid.frontend.record import Recorder

__all__ = ["run_eagerly"]

logger = logging.getLogger("marid")


def run_eagerly(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> Any:
    """Run one operator now. ``reason`` says why it fell back (warned once for each operator); None for no fallback."""
    name = recorder.op.name
    call = recorder.read(args, kwargs)
    writes = writes_of(recorder, call)
    if reason == "unsupported layout":
        raise unsupported(name, "its result has a layout other than torch.strided")
    site = capture_site(sys._getframe())
    counters.count_eager(name, reason or "the shape of its result depends on data", site)
    if reason is None:
        counters.count_operator(counters.dynamic, name)
    else:
        _note_fallback(name, reason)
    readers = _readers_of_written(call, writes)
    materialize(call.tensors, f"{name} (data-dependent)" if reason is None else f"{name} (eager fallback)")
    if writes:  # what reads or writes the same memory comes first
        run_anyway(handles.tape(call.device), readers)
    plain = [_placed(arg) for arg in call.args]
    named = {name: _placed(arg) for name, arg in call.kwargs or ()}
    if recorder.random:
        returned = _run_random(recorder, call, plain, named)
    else:
        with concretely():
            returned = recorder.func(*plain, **named)
    return _hand_back(recorder, call, writes, returned)


def _placed(arg: Any) -> Any:
    """The argument with buffers in place of values."""
    if isinstance(arg, (Node, Output)):
        return arg.concrete
    return [_placed(item) for item in arg] if type(arg) is tuple else arg


def unsupported(name: str, why: str) -> UnsupportedOperationError:
    """The error for what the device cannot represent, at the user's line."""
    return UnsupportedOperationError(
        f"{name} at {capture_site(sys._getframe())}: {why}, which {handles.DEVICE_TYPE} does not support; "
        "move the tensors to the CPU first with .cpu()"
    )


def _note_fallback(name: str, reason: str) -> None:
    if counters.count_operator(counters.fallbacks, name) == 1:
        logger.warning(
            "%s runs eagerly: %s. Its inputs are materialised at each call (first at %s).",
            name,
            reason,
            capture_site(sys._getframe()),
        )


def _readers_of_written(call: Call, writes: list[int]) -> list[Any]:
    """Pending nodes that read memory which the operator is about to write."""
    if not writes:
        return []
    written = {root_of(call.tensors[index]._value) for index in writes}
    return [
        node
        for node in handles.tape(call.device).pending()
        if any(root_of(value) in written for value in input_values(node))
    ]


def _run_random(recorder: Recorder, call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = call.generator
    if random.is_of_the_cpu(given):
        with concretely():
            return recorder.func(*args, **kwargs, generator=given)
    with random.generator_of(given, call.device) as generator:
        here = Draw(generator.seed, generator.offset, generator.spare, generator.offset, generator.spare)
        source = torch.Generator()
        source.set_state(engine.generator(here).get_state())
        before = source.get_state()
        with concretely():
            if recorder.takes_generator:
                returned = recorder.func(*args, **kwargs, generator=source)
            else:
                default = torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]
                users = default.get_state()
                try:
                    default.set_state(before)
                    returned = recorder.func(*args, **kwargs)
                    source.set_state(default.get_state())
                finally:
                    default.set_state(users)
        random.measure(generator, before, source)
    return returned


def _hand_back(recorder: Recorder, call: Call, writes: list[int], returned: Any) -> Any:
    """Handles for what the operator returned, and up-to-date geometry for what it wrote."""
    from marid.frontend.record import retarget

    handed = _HandBack(recorder, call)
    for index in writes:
        tensor = call.tensors[index]
        spec = handles.spec_of(tensor._value.concrete, call.device)
        if spec is not tensor._value.spec:
            tensor._value.spec = spec
            retarget(tensor, tensor._value, tensor._storage)
    return handed.describe(returned)


class _HandBack:
    """Finds the handle for a returned tensor: an argument itself, an alias of one, or a new one."""

    def __init__(self, recorder: Recorder, call: Call) -> None:
        self.name = recorder.op.name
        self.device = call.device
        self.by_identity = {id(tensor._value.concrete): tensor for tensor in call.tensors}
        self.memory: dict[int, Any] = {}
        for tensor in call.tensors:
            self.memory.setdefault(tensor._value.concrete.untyped_storage().data_ptr(), tensor)

    def describe(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [self.describe(part) for part in item]
        if not isinstance(item, torch.Tensor):
            return item
        if item.layout is not torch.strided or item.is_quantized:
            raise unsupported(self.name, f"its result has layout {item.layout}")
        if id(item) in self.by_identity:
            return self.by_identity[id(item)]
        spec = handles.spec_of(item, self.device)
        address = item.untyped_storage().data_ptr()
        base = self.memory.get(address) if address else None
        if base is None:
            return handles.wrap(handles.source(item, spec), spec)
        return handles.wrap(handles.source(item, spec, root_of(base._value)), spec, handles.storage_of(base))
