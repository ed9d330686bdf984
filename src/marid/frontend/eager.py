"""The way out: operators that cannot be recorded run at once, on their real inputs.

Nothing is made up here: the operator's own CPU kernel computes the result, or raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from marid.engine.protocol import Called, Returned
from marid.errors import MaterializationError
from marid.frontend import handles, random
from marid.frontend.calls import Call, unsupported, writes_of
from marid.frontend.engines import engine_of
from marid.frontend.materialize import fail_dependents, materialize, run_anyway
from marid.frontend.results import set_geometry
from marid.graph.arguments import input_values, map_leaves
from marid.graph.node import root_of
from marid.report.stats import counters
from marid.semantics.scopes import current_site

if TYPE_CHECKING:
    from marid.frontend.record import Recorder

logger = logging.getLogger("marid")


def run_eagerly(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> Any:
    """Run one operator now. ``reason`` says why it fell back (warned once for each operator); None for no fallback."""
    name = recorder.op.name
    call = recorder.read(args, kwargs)
    if reason == "unsupported layout":
        raise unsupported(name, "its result has a layout other than torch.strided")
    site = current_site()
    made = run_now(recorder, call, f"{name} (data-dependent)" if reason is None else f"{name} (eager fallback)")
    counters.count_eager(name, reason or "the shape of its result depends on data", site)  # what raises is none
    if reason is None:
        counters.count_operator(counters.dynamic, name)
    elif counters.count_operator(counters.fallbacks, name) == 1:
        logger.warning(
            "%s runs eagerly: %s. Its inputs are materialised at each call (first at %s).", name, reason, site
        )
    return made


def run_now(recorder: Recorder, call: Call, reason: str) -> Any:
    """Have the engine run one operator now; ``reason`` says in the statistics why its arguments were needed."""
    writes = writes_of(recorder, call.args, call.kwargs)
    readers = _readers_of_written(call, writes)
    while True:
        materialize(call.tensors, reason, "buffer")
        if writes:  # what reads or writes the same memory comes first
            run_anyway(handles.tape(call.device), readers)
        try:
            called = _called(recorder, call)
        except MaterializationError:  # something that ran before it; the next turn raises it if it is needed here
            fail_dependents()
            continue
        except Exception:
            _note_resized(call, writes)
            raise
        return _hand_back(recorder, call, writes, called)


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


def _called(recorder: Recorder, call: Call) -> Called:
    """What the operator does now, having moved the generator on that it draws from."""
    engine, op, args, kwargs = engine_of(call.device), recorder.op, call.args, call.kwargs or ()
    if not recorder.random:
        return engine.call(op, args, kwargs, None)
    given = call.generator
    if given is not None and random.is_of_the_cpu(given):
        called = engine.call(op, args, kwargs, given.get_state())
        assert called.state is not None
        given.set_state(called.state)
        return called
    with random.generator_of(given, call.device) as generator:
        before = random.cpu_state(generator.seed, generator.offset, generator.spare)
        called = engine.call(op, args, kwargs, before)
        assert called.state is not None
        random.measure(generator, before, called.state)
    return called


def _hand_back(recorder: Recorder, call: Call, writes: list[int], called: Called) -> Any:
    """Handles for what the operator returned, and up-to-date geometry for what it wrote."""
    for index in writes:
        _set_geometry(call.tensors[index], handles.spec_like(called.geometries[index], call.device))
    return map_leaves(lambda made: _handle(recorder, call, made), called.returned)


def _note_resized(call: Call, writes: list[int]) -> None:
    """Up-to-date geometry for what an operator has given as ``out=`` another size before it raised, as PyTorch does."""
    for index in writes:
        tensor = call.tensors[index]
        if isinstance(tensor._value.concrete, torch.Tensor):
            _set_geometry(tensor, handles.spec_of(tensor._value.concrete, call.device))


def _set_geometry(tensor: Any, spec: Any) -> None:
    if spec is not tensor._value.spec:
        set_geometry(tensor, spec)


def _handle(recorder: Recorder, call: Call, made: Any) -> Any:
    """The handle for a returned tensor: an argument itself, an alias of one, or a new one. Anything else itself."""
    if not isinstance(made, Returned):
        return made
    if made.layout is not None:
        raise unsupported(recorder.op.name, f"its result has layout {made.layout}")
    if made.same_as is not None:
        return call.tensors[made.same_as]
    assert made.geometry is not None
    spec = handles.spec_like(made.geometry, call.device)
    if made.base is None:
        return handles.wrap(handles.source(made.buffer, spec), spec)
    base = call.tensors[made.base]
    return handles.wrap(handles.source(made.buffer, spec, root_of(base._value)), spec, handles.storage_of(base))
