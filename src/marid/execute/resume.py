"""From an improved program that has stopped back to the program as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.graph.node import Draw
from marid.graph.program import Instruction, ListOf, Param, Slot
from marid.optimize.passes.lowering import Improved, slots_of

__all__ = ["arguments", "recover"]

_PATIENCE = 8  # interrupts that are put off while values are recovered

Generator = Callable[[Draw], torch.Generator]


def recover(
    improved: Improved, tensors: dict[int, Any], before: int, params: list[Any], generator: Generator
) -> tuple[dict[int, Any], dict[int, BaseException], BaseException | None]:
    """What the recorded program would have, by slot, had it done what is before instruction ``before``.

    Returns also the slots that could not be computed, with the errors, and an interrupt that came meanwhile.
    """
    found = {slot: tensor for slot, tensor in tensors.items() if slot < improved.recorded.slot_count}
    extra, lost = dict(tensors), dict[int, BaseException]()
    interrupt: BaseException | None = None
    patience = _PATIENCE
    births = _births(improved)
    wanted = _closure(
        improved, [slot for slot, last in improved.needed.items() if births.get(slot, -1) < before <= last]
    )
    for slot in sorted(wanted, key=lambda slot: births.get(slot, -1)):
        while slot not in extra and slot not in lost:
            try:
                _compute(improved, slot, extra, lost, params, generator)
            except Exception as error:
                lost[slot] = error
            except BaseException as error:
                interrupt, patience = error, patience - 1
                if not patience:
                    lost[slot] = error
        if slot in extra:
            found[slot] = extra[slot]
    kept = {slot for slot, last in improved.needed.items() if last >= before}
    return {slot: tensor for slot, tensor in found.items() if slot in kept or slot in tensors}, lost, interrupt


def _births(improved: Improved) -> dict[int, int]:
    return {
        result.slot: index
        for index, instruction in enumerate(improved.recorded.instructions)
        for result in instruction.results
    }


def _closure(improved: Improved, slots: list[int]) -> set[int]:
    """These slots, and those that are needed to compute them."""
    found: set[int] = set()
    pending = list(slots)
    while pending:
        slot = pending.pop()
        if slot in found:
            continue
        found.add(slot)
        pending += _sources(improved, slot)
    return found & improved.recipes.keys()


def _sources(improved: Improved, slot: int) -> list[int]:
    recipe = improved.recipes.get(slot)
    if recipe is None:
        return []
    return [~recipe] if recipe < 0 else slots_of(improved.recorded.instructions[recipe])


def _compute(
    improved: Improved,
    slot: int,
    tensors: dict[int, Any],
    lost: dict[int, BaseException],
    params: list[Any],
    generator: Generator,
) -> None:
    recipe = improved.recipes[slot]
    for source in _sources(improved, slot):
        if source in lost:
            raise lost[source]
    if recipe < 0:
        tensors[slot] = tensors[~recipe]
        return
    instruction = improved.recorded.instructions[recipe]
    args, kwargs = arguments(instruction, tensors, params, generator)
    returned = instruction.op.call(*args, **kwargs)
    value = returned
    for step in next(result.path for result in instruction.results if result.slot == slot):
        value = value[step]
    tensors[slot] = value


def arguments(
    instruction: Instruction, tensors: dict[int, Any], params: list[Any], generator: Generator
) -> tuple[list[Any], dict[str, Any]]:
    """What an instruction is called with."""

    def value_of(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return tensors[arg.index]
        if isinstance(arg, Param):
            return generator(params[arg.index]) if arg.draw else params[arg.index]
        if isinstance(arg, ListOf):
            return [value_of(item) for item in arg.items]
        return arg.value

    return [value_of(a) for a in instruction.args], {name: value_of(a) for name, a in instruction.kwargs}
