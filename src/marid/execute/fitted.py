"""Running a program within a limit on memory: as it is where it fits, else with results computed again.

What ``graph/rematerialise.py`` has written is a program like any other: it has a table, planned memory and times of
operators of its own. It is not compiled: a compiled part holds its inputs until its end, and rounds elsewhere. What is
said of a run that stops is said in the recorded instructions; and what was dropped by then, and is needed behind, is
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marid import policy
from marid.execute.arena import Placement
from marid.execute.compiled.tier import best
from marid.execute.executable import Executable
from marid.execute.interrupted import Interrupted
from marid.execute.specialisation import Frame, Positioned, Runnable
from marid.graph.node import Spec
from marid.graph.prepared import Prepared, Replay
from marid.graph.program import Program, Task
from marid.graph.rematerialise import Blocks, Rewritten, rematerialised
from marid.report.operator_times import bytes_of
from marid.report.stats import counters


def fitted(flat: Executable, task: Task | Replay, room: int, expected: int, in_order: bool = False) -> Runnable | None:
    """How to run ``task`` so that its results take no more than ``room`` bytes at once, where as recorded they take
    ``expected``; None where no way is known. A run that is ``in_order`` stops behind what comes first in the program.
    To be called below all dispatch, when the inputs are there."""
    if expected <= room:
        return best(flat, task, room)
    kept = _variants(flat, task, expected, in_order)
    variant = kept.within(room, task)
    return None if variant is None else _Run(variant, kept.blocks, flat, task)


class _Variant:
    """A program that holds less at once than the one that was recorded."""

    def __init__(self, rewritten: Rewritten) -> None:
        self.rewritten = rewritten
        self.executable = Executable(rewritten.program, rewritten.nbytes)

    @property
    def nbytes(self) -> int:
        """What a run holds at once: as was seen of its kernels, where that is more than its results."""
        seen = [one.planned.plan.held for one in self.executable.specialisations if one.planned and one.planned.plan]
        return max([self.rewritten.nbytes, *seen])


class Variants:
    """What was made of one program with tensors of certain specs, for several limits."""

    def __init__(
        self, flat: Executable, specs: tuple[Spec | None, ...], shared: dict[int, int], expected: int, in_order: bool
    ) -> None:
        self.blocks = Blocks(flat.program, specs, shared)
        self._specs, self._in_order = specs, in_order
        self._step = -(-expected // policy.FIT_STEPS)
        self._seconds: list[float] | None = None
        self._made: dict[int, _Variant | None] = {}

    @property
    def known(self) -> list[_Variant]:
        """Those that were made."""
        return [one for one in self._made.values() if one is not None]

    def within(self, room: int, task: Task | Replay) -> _Variant | None:
        """One that fits into ``room`` bytes; None where none is found.

        Rooms are rounded down to steps, so that a loop whose room varies keeps its programs. A part is left to what
        kernels use beside results, until that has been seen. Where there is not so much, results alone have to fit.
        """
        target = (room - room // policy.FIT_HEADROOM) // self._step * self._step
        while target > 0:
            found = self._for(target, task)
            if found is None:
                break
            if found.nbytes <= room:
                return found
            target = min(target - 1, room - (found.nbytes - found.rewritten.nbytes)) // self._step * self._step
        fitting = [one for one in self.known if one.rewritten.nbytes <= room]
        return min(fitting, key=lambda one: one.nbytes) if fitting else self._for(room, task)

    def _for(self, target: int, task: Task | Replay) -> _Variant | None:
        if target not in self._made:
            if len(self._made) >= policy.FIT_VARIANTS:
                del self._made[next(iter(self._made))]
            if self._seconds is None:
                self._seconds = seconds_of(self.blocks.program, self._specs, task.params)
            slower = policy.FIT_SLOWER
            found = rematerialised(self.blocks, self._specs, self._seconds, target, slower, self._in_order)
            counters.programs_fitted += found is not None
            self._made[target] = None if found is None else _Variant(found)
        return self._made[target]


def _variants(flat: Executable, task: Task | Replay, expected: int, in_order: bool) -> Variants:
    shared = shared_inputs(task.input_slots, task.inputs)
    key = task.specs, tuple(shared.items())
    if key not in flat.fitted:
        if len(flat.fitted) >= policy.PLANS:
            del flat.fitted[next(iter(flat.fitted))]
        flat.fitted[key] = Variants(flat, task.specs, shared, expected, in_order)
    return flat.fitted[key]


def shared_inputs(slots: Sequence[int], inputs: Sequence[Any]) -> dict[int, int]:
    """For each input that lies in the memory of an earlier one, that one."""
    first: dict[Any, int] = {}
    found = {}
    for slot, tensor in zip(slots, inputs, strict=True):
        if tensor.layout is not torch.strided:
            continue
        earlier = first.setdefault(tensor.untyped_storage()._cdata, slot)
        if earlier != slot:
            found[slot] = earlier
    return found


def seconds_of(program: Program, specs: tuple[Spec | None, ...], params: list[Any]) -> list[float]:
    """The least time that each instruction takes on this machine."""
    from marid.semantics.costs import flops_of_instruction  # late, as PyTorch's formulas are not needed to import marid
    from marid.semantics.roofline import machine

    found, fast = [], machine()
    for instruction in program.instructions:
        flops = flops_of_instruction(instruction, specs, params)
        spec = specs[instruction.results[0].slot] if instruction.results else None
        found.append(fast.seconds(flops, bytes_of(instruction, specs), torch.float32 if spec is None else spec.dtype))
    return found


class _Run:
    """A run of a variant, and what is known when it stops."""

    compiled = False

    def __init__(self, variant: _Variant, blocks: Blocks, flat: Executable, task: Task | Replay) -> None:
        self._rewritten, self._blocks, self._flat = variant.rewritten, blocks, flat
        nodes = [task.nodes[origin] for origin in self._rewritten.origins]
        prepared = Prepared(self._rewritten.program, self._rewritten.specs, nodes, variant.nbytes)
        self._replay = Replay(prepared, task.inputs, task.params)
        self._specialisation = variant.executable.specialised(self._replay)
        self.transient_bytes = variant.nbytes

    @property
    def placement(self) -> Placement | None:
        return self._specialisation.placement

    def run(self, task: Task | Replay, generator: Positioned) -> list[torch.Tensor]:
        try:
            return self._specialisation.run(self._replay, generator)
        except Interrupted as stop:
            raise self._recorded(stop, task, generator) from stop.error
        finally:
            task.timing = self._replay.timing

    def _recorded(self, stop: Interrupted, task: Task | Replay, generator: Positioned) -> Interrupted:
        """The same in recorded instructions, with all that they need from there on."""
        rewritten, blocks = self._rewritten, self._blocks
        following, ran = rewritten.following[stop.index], frozenset(rewritten.origins[: stop.index])
        stopped = rewritten.origins[stop.index] if stop.index < len(rewritten.origins) else following
        index = following if stopped in ran else stopped
        found: dict[int, Any] = {}
        half_made = self._half_made(stop.index)
        for slot in sorted(stop.tensors.keys() - half_made):  # what was recorded comes before what repeats it
            found.setdefault(rewritten.slots[slot], stop.tensors[slot])
        reads = blocks.analysis.reads
        wanted = {slot for one in range(len(reads)) if one not in ran for slot in reads[one]}
        wanted.update(blocks.program.output_slots)
        needed = {slot for slot in wanted if blocks.analysis.made_by.get(slot) in ran}
        there = {blocks.root(slot) for slot in found}
        missing = {root for slot in needed - found.keys() if (root := blocks.root(slot)) in blocks.by_root}
        calls, _ = blocks.calls_for(missing - there, following, there.__contains__)
        while calls:
            frame = Frame(task, dict(found), task.params, generator)
            try:
                for call in sorted(calls):
                    frame.tensors.update(self._stand_ins(call, task))
                    self._flat.steps(frame, call, call + 1, frozenset(frame.tensors) | needed | self._slots_of(calls))
            except Interrupted as another:
                if isinstance(another.error, Exception):
                    raise another.error from None
                continue  # Ctrl-C, in the midst of handling another
            found = {**frame.tensors, **found}
            break
        first = ran == frozenset(range(index))
        return Interrupted(index, stop.finished and index == stopped, found, stop.error, None if first else ran)

    def _half_made(self, index: int) -> set[int]:
        """The slots of what is being made again where a run stops before or in an instruction: some of its calls may be
        still to come."""
        program, origins, following = self._rewritten.program, self._rewritten.origins, self._rewritten.following
        found: set[int] = set()
        if index == len(origins) or origins[index] == following[index]:
            return found
        for at in range(index, -1, -1):
            if following[at] != following[index]:
                break
            found.update(result.slot for result in program.instructions[at].results)
        return found

    def _stand_ins(self, call: int, task: Task | Replay) -> dict[int, torch.Tensor]:
        """Tensors in place of what a call would update that is made again."""
        blocks = self._blocks
        updated = [one for one in blocks.analysis.writes[call] if blocks.root(one) not in blocks.repeat_reads[call]]
        specs = [(slot, spec) for slot in updated if (spec := task.specs[slot]) is not None]
        return {slot: torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for slot, spec in specs}

    def _slots_of(self, calls: set[int]) -> frozenset[int]:
        results = [self._blocks.program.instructions[call].results for call in calls]
        return frozenset([result.slot for made in results for result in made])
