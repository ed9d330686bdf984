"""Rules that were wrong, made right by what was computed.

When the executor finds a result that is not what was recorded (``execute/geometry.py``), what is known of calls with
that key is corrected, so that the next one is recorded exactly, and what had predicted it is trusted less: the pattern
of calls is no longer derived, and large calls of the operator are tried as they are.
"""

from __future__ import annotations

from typing import Any

from marid.execute.geometry import Misprediction
from marid.frontend import handles, infer
from marid.frontend.calls import NOT_RECORDED, taken_from
from marid.frontend.record import recorder_of
from marid.graph.node import Node, Spec
from marid.graph.program import filled


def correct(misprediction: Misprediction) -> None:
    """Let calls like the one of ``misprediction`` be recorded as it was computed."""
    instruction = misprediction.instruction
    if instruction.op.func.namespace == "marid":  # a compiled part stands for other operators
        return
    recorder = recorder_of(instruction.op.func)

    def given(arg: Any) -> Any:
        specs, params = misprediction.specs, misprediction.params
        return filled(arg, lambda slot: _StandIn(specs[slot]), lambda param: params[param.index], list)

    args = tuple([given(arg) for arg in instruction.args])
    kwargs = {name: given(arg) for name, arg in instruction.kwargs if name not in NOT_RECORDED}
    key, values, named, _ = taken_from(_StandIn, args, kwargs, recorder.exact_floats, recorder.exact_lists)
    infer.distrust(recorder.func)
    if recorder.deriver is not None:
        recorder.deriver.distrust(len(values), key)
    known = recorder.known.get(key)
    if known is None:
        return
    rule = known.rule
    for out in rule.outs:
        if out.path == misprediction.path and out.spec is not None:
            out.spec = handles.spec_like(misprediction.seen, out.spec.device)
    if misprediction.shares:
        rule.eager = "whose memory its result lies in is not what its schema says"
    recorder.learn(key, rule, values, named, known.tape.device)


class _StandIn:
    """A tensor of a call that has run: all that is left of it is its spec."""

    __slots__ = ("_value",)

    def __init__(self, of: Spec | None) -> None:
        assert of is not None
        self._value = Node(0, None, None, None, handles.spec_like(of, of.device), None, None, None)
