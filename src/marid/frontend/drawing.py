"""Calls that draw random numbers: where in its generator's stream a call takes them from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marid.frontend import infer, random
from marid.frontend.calls import Call, Pairs
from marid.frontend.known import Known
from marid.frontend.observe import observer

if TYPE_CHECKING:
    from marid.frontend.record import Recorder


def take_numbers(recorder: Recorder, call: Call, rule: infer.Rule) -> bool:
    """Take the numbers that the call will need from its generator; whether that is known beforehand."""
    if not recorder.takes_generator:
        return False
    of = rule.outs[0].spec
    assert of is not None
    named = dict(call.kwargs or ())
    with random.generator_of(call.generator, call.device) as generator:
        drawn = random.draw(recorder.func.name(), generator, of, call.args, named)
    if drawn is not None:
        watching = observer()
        if watching is not None:
            watching.drew(call.generator, call.device, recorder.func.name(), of, call.args, named, drawn)
        call.kwargs = tuple({**named, "generator": drawn}.items())
    return drawn is not None


def draw_for(recorder: Recorder, known: Known, args: tuple[Any, ...], kwargs: Pairs | None) -> Pairs | None:
    """Take the numbers that a call like one that is ``known`` needs from its device's generator.

    Returns its keyword arguments with the position of these numbers; None, and nothing is taken, where that is not
    known beforehand or somebody watches.
    """
    spec, device = known.rule.outs[0].spec, known.tape.device
    if spec is None or observer() is not None:
        return None
    named = dict(kwargs or ())
    drawn = random.draw(recorder.func.name(), random.default_generator(device), spec, args, named)
    return None if drawn is None else tuple({**named, "generator": drawn}.items())
