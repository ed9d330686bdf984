"""From the graph back to a program, and from where a run of it has stopped back to the program as it was recorded.

Whoever meets an error or Ctrl-C counts in recorded instructions: everything before one has been done, nothing from
there on. Three rules make that so, whatever the passes did; ``lower`` refuses a graph that breaks one of them:

* instructions that write stay, each in its place;
* a tensor of the recorded program lives here at least as long as it lives there;
* a tensor that is not computed here any more can be, as long as anybody there would need it: by its own instruction,
  from tensors that are alive and have not been written since, or because it is another name of such a tensor.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from marid.graph.node import Spec
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Result, Slot
from marid.optimize.passes.rewriter import Guards, Rewriter, op_of, slot_of
from marid.optimize.passes.storages import Storages

__all__ = ["BrokenRule", "Improved", "last_uses", "lower", "slots_of"]


class BrokenRule(Exception):
    """A pass has left a graph that does not stand for the recorded program."""


@dataclass
class Improved:
    """A program that does what ``recorded`` does, where ``guards`` hold.

    It takes the inputs and ``constants``, the parameters and ``numbers``. ``dying`` are for each instruction the slots
    that are not needed after it. A run that has done ``k`` of its instructions has done the first ``done[k]`` of the
    recorded ones; ``indices`` are those whose places they have. ``recipes`` says for slots that are not computed any
    more by which recorded instruction they can be, or, complemented, which slot has the same value. ``needed`` is by
    slot the last recorded instruction that reads it.
    """

    recorded: Program
    program: Program
    specs: tuple[Spec | None, ...]
    guards: Guards
    constants: list[torch.Tensor]
    numbers: list[Any]
    dying: list[list[int]]
    done: list[int]
    indices: list[int]
    recipes: dict[int, int]
    needed: dict[int, int]
    changes: dict[str, int] = field(default_factory=dict)

    def explain(self) -> str:
        """What the passes did, in a line."""
        before, after = len(self.recorded.instructions), len(self.program.instructions)
        what = ", ".join(f"{name} {count}" for name, count in self.changes.items())
        return f"{before} instructions, {after} after passes ({what})"


def lower(rewriter: Rewriter, original: Storages) -> Improved:
    """The program of a graph; ``original`` are the storages before any pass. Raises ``BrokenRule``."""
    recorded = rewriter.program
    builder = _Builder(rewriter)
    instructions, indices = builder.instructions, builder.indices
    if any(a > b for a, b in itertools.pairwise(indices)):
        raise BrokenRule("operations are not in program order")
    writes = [(i, ins.op.func) for i, ins in zip(indices, instructions, strict=True) if ins.op.mutates]
    if writes != [(i, ins.op.func) for i, ins in enumerate(recorded.instructions) if ins.op.mutates]:
        raise BrokenRule("an operation that writes was added, removed or moved")
    outputs = tuple(slot_of(node) for node in rewriter.outputs())
    if len(outputs) != len(recorded.output_slots) or len(set(outputs)) != len(set(recorded.output_slots)):
        raise BrokenRule("the outputs are not one tensor each")
    if any(node.op == "placeholder" and slot_of(node) not in recorded.output_slots for node in rewriter.outputs()):
        raise BrokenRule("an input or a constant became an output")
    constants = [node for node in rewriter.graph.nodes if "constant" in node.meta]
    program = Program(
        recorded.key,
        tuple(instructions),
        (*recorded.input_slots, *(slot_of(node) for node in constants)),
        outputs,
        rewriter.slot_count,
    )
    count = len(recorded.instructions)
    done = [0, *(index + 1 for index in indices)]
    done = [min(a, b) for a, b in zip(done, [*indices, count], strict=True)]
    done[0], done[-1] = 0, count
    needed = _last_readers(recorded)
    living = dict(needed)
    produced = {*recorded.input_slots, *(slot_of(node) for node in constants)}
    produced |= {result.slot for instruction in instructions for result in instruction.results}
    recipes = _recipes(rewriter, original, produced, living)
    specs: list[Spec | None] = [None] * rewriter.slot_count
    for node in rewriter.graph.nodes:
        if "slot" in node.meta:
            specs[slot_of(node)] = node.meta["spec"]
    dying = _deaths(program, done, living)
    tensors = [node.meta["constant"] for node in constants]
    return Improved(
        recorded,
        program,
        tuple(specs),
        rewriter.guards,
        tensors,
        builder.numbers,
        dying,
        done,
        indices,
        recipes,
        needed,
    )


class _Builder:
    """The instructions of a graph, for each the recorded one whose place it has, and the numbers that are new."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.instructions: list[Instruction] = []
        self.indices: list[int] = []
        self.numbers: list[Any] = []
        self._numbers_before = len(rewriter.params)
        for node in rewriter.calls():
            types = {a.name: str(a.type) for a in op_of(node).func._schema.arguments}
            args = tuple([self._argument(arg, kind) for arg, kind in zip(node.args, types.values(), strict=False)])
            kwargs = tuple([(name, self._argument(arg, types.get(name))) for name, arg in node.kwargs.items()])
            self.instructions.append(Instruction(op_of(node), args, kwargs, _results(rewriter, node)))
            self.indices.append(node.meta["index"])

    def _argument(self, arg: Any, kind: str | None = None) -> Any:
        if isinstance(arg, fx.Node):
            if "param" in arg.meta:
                return Param(arg.meta["param"], arg.meta["draw"])
            if "slot" not in arg.meta:
                raise BrokenRule(f"{arg} is used as a tensor, but has no slot")
            return Slot(slot_of(arg))
        if isinstance(arg, (list, tuple)):
            if not any(isinstance(item, fx.Node) or item is None for item in arg):
                numbers = tuple(arg)
                fits = numbers and kind is not None and "List[int]" in kind and all(type(n) is int for n in numbers)
                return Constant(numbers) if fits else self._number(numbers)
            return ListOf(tuple([self._argument(item) for item in arg]))
        if type(arg) in (int, float, complex):
            return self._number(arg)
        return Constant(arg)

    def _number(self, number: Any) -> Param:
        self.numbers.append(number)
        return Param(self._numbers_before + len(self.numbers) - 1, False)


def _results(rewriter: Rewriter, node: fx.Node) -> tuple[Result, ...]:
    if "slot" in node.meta:
        return (Result((), slot_of(node)),)
    found: list[Result] = []
    pending: list[tuple[fx.Node, tuple[int, ...]]] = [(node, ())]
    while pending:
        call, path = pending.pop()
        for user in call.users:
            if user.target is operator.getitem:
                step = user.args[1]
                assert isinstance(step, int)
                if any(inner.target is operator.getitem for inner in user.users) and "slot" not in user.meta:
                    pending.append((user, (*path, step)))
                    continue
                if "slot" not in user.meta:
                    user.meta.update(slot=rewriter.new_slot(), spec=None, index=node.meta["index"])
                found.append(Result((*path, step), slot_of(user)))
    return tuple(sorted(found, key=lambda result: result.path))


def last_uses(program: Program) -> list[list[int]]:
    """For each instruction, the slots that nobody needs after it."""
    dying: list[list[int]] = []
    needed = set(program.output_slots)
    for instruction in reversed(program.instructions):
        touched = set(slots_of(instruction)) | {r.slot for r in instruction.results}
        dying.append(sorted(touched - needed))
        needed |= touched
    dying.reverse()
    return dying


def slots_of(instruction: Instruction) -> list[int]:
    """The tensors that an instruction is called with."""
    slots: list[int] = []
    for arg in (*instruction.args, *(value for _, value in instruction.kwargs)):
        if isinstance(arg, Slot):
            slots.append(arg.index)
        elif isinstance(arg, ListOf):
            slots += [item.index for item in arg.items if isinstance(item, Slot)]
    return slots


def _last_readers(program: Program) -> dict[int, int]:
    """By slot, the last instruction that reads it; the number of instructions for outputs."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        for slot in slots_of(instruction):
            last[slot] = index
    for slot in program.output_slots:
        last[slot] = len(program.instructions)
    return last


def _recipes(rewriter: Rewriter, original: Storages, produced: set[int], living: dict[int, int]) -> dict[int, int]:
    """How slots that are not computed any more can be, having extended the life of what that takes."""
    recipes: dict[int, int] = {}
    for index in range(len(rewriter.program.instructions) - 1, -1, -1):
        instruction = rewriter.program.instructions[index]
        for result in reversed(instruction.results):
            slot = result.slot
            if slot in produced:
                continue
            by = rewriter.aliases.get(slot)
            while by is not None and by not in produced and by >= rewriter.program.slot_count:
                by = rewriter.aliases.get(by)  # a new slot that was replaced in its turn
            recipes[slot] = index if by is None else ~by
            until = living.get(slot, -1)
            if until <= index:
                continue
            for source in slots_of(instruction) if by is None else [by]:
                living[source] = max(living.get(source, -1), until)
                if instruction.op.view:
                    continue  # a view sees what is written in any case
                if original.is_written(original.root.get(source, source), index, until - 1):
                    raise BrokenRule(f"{instruction.op.name} cannot be computed again where it is needed")
    return recipes


def _deaths(program: Program, done: list[int], living: dict[int, int]) -> list[list[int]]:
    dying: list[list[int]] = [[] for _ in program.instructions]
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        for slot in (*slots_of(instruction), *(result.slot for result in instruction.results)):
            last[slot] = index
    kept = set(program.output_slots)
    for slot, index in last.items():
        if slot in kept:
            continue
        # The first instruction after which no recorded one that reads it is left.
        free = bisect.bisect_right(done, living.get(slot, -1)) - 1
        index = max(index, free)
        if index < len(dying):
            dying[index].append(slot)
    return dying
