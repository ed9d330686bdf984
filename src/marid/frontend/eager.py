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
from marid.frontend.materialize import engine, materialize
from marid.graph.node import Draw, input_values, root_of
from marid.report.stats import counters
from marid.semantics.scopes import capture_site

if TYPE_CHECKING:
    from marid.frontend.record import Recorder

__all__ = ["run_eagerly"]

logger = logging.getLogger("marid")


def run_eagerly(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> Any:
    """Run one operator now. ``reason`` says why it fell back (warned once for each operator); None for no fallback."""
    name = recorder.op.name
    call = recorder.flatten(args, kwargs)
    if reason == "unsupported layout":
        raise unsupported(name, "its result has a layout other than torch.strided")
    if reason is None:
        counters.count_operator(counters.dynamic, name)
    else:
        _note_fallback(name, reason)
    readers = _readers_of_written(call)
    materialize(call.tensors, f"{name} (data-dependent)" if reason is None else f"{name} (eager fallback)")
    for node in readers:
        tape = handles.tape(call.device)
        from marid.frontend.materialize import run_pending

        run_pending(tape, tape.cut([node]))
    buffers = {id(tensor._value): tensor._value.concrete for tensor in call.tensors}

    def place(arg: Any) -> Any:
        if id(arg) in buffers:
            return buffers[id(arg)]
        if type(arg) is tuple:
            return [place(item) for item in arg]
        return arg

    plain = [place(arg) for arg in call.args]
    named = {key: place(arg) for key, arg in call.kwargs.items()}
    if recorder.random:
        returned = _run_random(recorder, call, plain, named)
    else:
        with concretely():
            returned = recorder.func(*plain, **named)
    return _hand_back(recorder, call, returned)


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


def _readers_of_written(call: Any) -> list[Any]:
    """Pending nodes that read memory which the operator is about to write."""
    if not call.writes:
        return []
    written = {root_of(call.tensors[index]._value) for index in call.writes}
    return [
        node
        for node in handles.tape(call.device).pending()
        if any(root_of(value) in written for value in input_values(node))
    ]


def _run_random(recorder: Recorder, call: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = kwargs.pop("generator", None)
    takes_generator = any(a.name == "generator" for a in recorder.func._schema.arguments)
    with random.generator_of(given, call.device) as generator:
        here = Draw(generator.seed, generator.offset, generator.spare, generator.offset, generator.spare)
        source = torch.Generator()
        source.set_state(engine.generator(here).get_state())
        before = source.get_state()
        with concretely():
            if takes_generator:
                returned = recorder.func(*args, **kwargs, generator=source)
            else:
                default = torch.random.default_generator
                users = default.get_state()
                try:
                    default.set_state(before)
                    returned = recorder.func(*args, **kwargs)
                    source.set_state(default.get_state())
                finally:
                    default.set_state(users)
        random.measure(generator, before, source)
    return returned


def _hand_back(recorder: Recorder, call: Any, returned: Any) -> Any:
    """Handles for what the operator returned, and up-to-date geometry for what it wrote."""
    from marid.frontend.record import retarget

    by_identity = {id(tensor._value.concrete): tensor for tensor in call.tensors}
    memory = {}
    for tensor in call.tensors:
        memory.setdefault(tensor._value.concrete.untyped_storage().data_ptr(), tensor)

    def describe(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided or item.is_quantized:
                raise unsupported(recorder.op.name, f"its result has layout {item.layout}")
            if id(item) in by_identity:
                return by_identity[id(item)]
            spec = handles.spec_of(item, call.device)
            address = item.untyped_storage().data_ptr()
            base = memory.get(address) if address else None
            if base is not None:
                value = handles.source(item, spec, root_of(base._value))
                return handles.wrap(value, spec, handles.storage_of(base))
            return handles.wrap(handles.source(item, spec), spec)
        if isinstance(item, (list, tuple)):
            return [describe(part) for part in item]
        return item

    for index in call.writes:
        tensor = call.tensors[index]
        spec = handles.spec_of(tensor._value.concrete, call.device)
        if spec is not tensor._value.spec:
            tensor._value.spec = spec
            retarget(tensor, tensor._value, tensor._storage)
    return describe(returned)
