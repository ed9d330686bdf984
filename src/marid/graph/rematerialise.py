"""Programs that hold less at once: results are dropped before their last use, and computed again before the next one.

The rewritten program makes the same calls in the same order, and between them some of them again. A call may also be
put off until its result is needed first, which is dropping it before it was made. A block of memory is computed again
by all that made it: the call that took it, its views, and what was written to it until then. That gives the same bits
as long as nothing that those calls read has been written since; what writes two blocks, or what takes part in resizing,
is never repeated, and neither is what makes memory that outlives the run. Random numbers are positions, so they come
again too.

What is dropped is chosen as the program is gone through with so much room: where the next result does not fit, the
block that costs the least for each byte and for the time until it is needed. (M. Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021, does so while a program runs and does not know what comes; here, what comes is known.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from marid.graph.analysis import Analysis, analysis_of, forecast
from marid.graph.node import Spec
from marid.graph.program import Constant, Instruction, ListOf, Program, Result, Slot, filled
from marid.ops.facts import facts_of


@dataclass(frozen=True)
class Rewritten:
    """A program that computes some results of another one again, so that it holds ``nbytes`` at once.

    ``origins``: for each instruction the recorded one that it is or repeats. ``following``: which recorded one comes
    next or is it; one more than there are instructions. ``slots``: for each slot the recorded one whose value it has.
    """

    program: Program
    origins: list[int]
    following: list[int]
    slots: list[int]
    specs: tuple[Spec | None, ...]
    nbytes: int


class _DoesNotFit(Exception):
    """There is no room for what has to exist at once, or none without too many repetitions."""


@dataclass
class _Block:
    """Memory that one instruction of a program takes. Times are numbers of instructions."""

    root: int
    nbytes: int
    calls: list[int]
    """What makes it, its views, and what writes it."""
    uses: list[int]
    repeats_until: int = -1
    """Until when it can be computed again; -1 for never."""

    @property
    def made(self) -> int:
        return self.uses[0]

    @property
    def last(self) -> int:
        return self.uses[-1]

    @property
    def may_be_dropped(self) -> bool:
        return self.repeats_until >= self.last

    def next_use(self, time: int) -> int | None:
        """The first use at ``time`` or later."""
        at = bisect_left(self.uses, time)
        return self.uses[at] if at < len(self.uses) else None


class Blocks:
    """The memory that a program takes, and which of it can be computed again.

    ``shared`` has inputs that lie in the memory of another input, by slot.
    """

    def __init__(self, program: Program, specs: tuple[Spec | None, ...], shared: dict[int, int]) -> None:
        self.program = program
        self.analysis: Analysis = analysis_of(program)
        self.shared = shared
        count = len(program.instructions)
        self.reads = [set(map(self.root, slots)) for slots in self.analysis.reads]
        self.writes = [set(map(self.root, slots)) for slots in self.analysis.writes]
        self.repeated = [_repeated(one) for one in program.instructions]
        """What gives the same bits as each instruction, and does nothing else; None where that cannot be."""
        self.repeat_reads = [
            reads if again is one or again is None else self._arguments(again)
            for reads, one, again in zip(self.reads, program.instructions, self.repeated, strict=True)
        ]
        self.makes = [{self.root(result.slot) for result in one.results} for one in program.instructions]
        self._written: dict[int, list[int]] = {}
        self.by_root: dict[int, _Block] = {}
        for slot, index in self.analysis.made_by.items():
            if self.analysis.roots[slot] == slot:
                spec = specs[slot]
                self.by_root[slot] = _Block(slot, 0 if spec is None else spec.nbytes, [], [index])
        for index in range(count):
            for root in self.writes[index]:
                self._written.setdefault(root, []).append(index)
            for root in self.reads[index] | self.makes[index]:
                block = self.by_root.get(root)
                if block is None:
                    continue
                if block.uses[-1] != index:
                    block.uses.append(index)
                if root in self.makes[index] or root in self.writes[index]:
                    block.calls.append(index)
        self.outliving = {self.root(slot) for slot in program.output_slots}
        for root in self.outliving & set(self.by_root):
            self.by_root[root].uses.append(count)
        resized = {self.root(slot) for slot in self.analysis.unsettled}
        unknown = {self.root(slot) for slot in self.analysis.made_by if specs[slot] is None}
        for block in sorted(self.by_root.values(), key=lambda block: block.made):  # what they are made of comes first
            if block.root not in self.outliving | resized | unknown:
                block.repeats_until = self._repeats_until(block)

    def root(self, slot: int) -> int:
        """The tensor that was first in the memory that this one lies in, of all inputs that share it the first."""
        root = self.analysis.roots[slot]
        return self.shared.get(root, root)

    def _repeats_until(self, block: _Block) -> int:
        until = len(self.program.instructions)
        for index in block.calls:
            again, reads = self.repeated[index], self.repeat_reads[index]
            writes = self.writes[index] & reads
            if again is None or writes - {block.root} or (block.root in self.writes[index] and not writes):
                return -1
            for root in reads - {block.root}:
                until = min(until, self._next_write(root, index))
                argument = self.by_root.get(root)
                if argument is None or root in self.outliving:
                    continue  # it exists until the end
                if argument.made >= block.made:
                    return -1  # it may have been made of the block, as that was before
                until = min(until, max(argument.repeats_until, argument.last))
        return until

    def _arguments(self, instruction: Instruction) -> set[int]:
        return {self.root(arg.index) for arg in instruction.operands() if isinstance(arg, Slot)}

    def _next_write(self, root: int, time: int) -> int:
        written = self._written.get(root, [])
        at = bisect_left(written, time + 1)
        return written[at] if at < len(written) else len(self.program.instructions)

    def calls_for(self, roots: Iterable[int], time: int, exists: Callable[[int], bool]) -> tuple[set[int], set[int]]:
        """What has to run again before instruction ``time`` to have these blocks, where some exist; and the blocks that
        it makes."""
        pending, found, calls = list(roots), set(roots), set[int]()
        while pending:
            for index in self.by_root[pending.pop()].calls:
                if index >= time:
                    break
                calls.add(index)
                for root in self.repeat_reads[index]:
                    if root in self.by_root and root not in found and not exists(root):
                        found.add(root)
                        pending.append(root)
        return calls, found


def _repeated(instruction: Instruction) -> Instruction | None:
    """The call that gives the same bits as this one, without what it only updates; None for what does not."""
    func, facts = instruction.op.func, facts_of(instruction.op.func)
    if facts.dynamic or facts.collective or torch.Tag.nondeterministic_bitwise in func.tags:
        return None
    if not facts.only_updates:
        return instruction
    names = [formal.name for formal in func._schema.arguments]
    given = dict(zip(names, instruction.args, strict=False)) | dict(instruction.kwargs)
    if given.get("training") != Constant(True):
        return instruction
    kept = [Constant(None) if name in facts.only_updates else given[name] for name in names if name in given]
    return Instruction(instruction.op, tuple(kept), (), instruction.results)


def rematerialised(
    blocks: Blocks, specs: tuple[Spec | None, ...], seconds: Sequence[float], room: int, most: float, in_order: bool
) -> Rewritten | None:
    """The program with results computed again so that they take no more than ``room`` bytes at once; None where that
    cannot be, or would take more than ``most`` times as long. ``seconds`` says what each instruction takes. Kept
    ``in_order``, no call is put off."""
    rewriter = _Rewriter(blocks, specs, seconds, room, most, in_order)
    try:
        rewriter.run()
    except _DoesNotFit:
        return None
    found = rewriter.result()
    return found if found.nbytes <= room else None


class _Rewriter:
    """Goes through a program as if it ran with so much room, and writes down what it does."""

    def __init__(
        self,
        blocks: Blocks,
        specs: tuple[Spec | None, ...],
        seconds: Sequence[float],
        room: int,
        most: float,
        in_order: bool,
    ) -> None:
        self._blocks, self._specs, self._seconds, self._room, self._in_order = blocks, specs, seconds, room, in_order
        program = blocks.program
        self._clock = [0.0, *accumulate(seconds)]
        self._left = self._clock[-1] * (most - 1)
        self._slots = list(range(program.slot_count))
        self._names: dict[int, int] = {slot: slot for slot in program.input_slots}
        """By recorded slot of what exists, its slot now."""
        self._existing: dict[int, set[int]] = {}
        """By block that exists, the recorded slots of its tensors."""
        self._held = 0
        self._written: list[Instruction] = []
        self._origins: list[int] = []
        self._following: list[int] = []
        self._called: set[int] = set()

    def run(self) -> None:
        """Raises ``_DoesNotFit``."""
        blocks = self._blocks
        for index, instruction in enumerate(blocks.program.instructions):
            needed = {root for root in blocks.reads[index] if root in blocks.by_root}
            missing = [root for root in needed if root not in self._existing]
            if missing:
                self._restore(missing, needed, index)
            if self._make_room(index, needed, index, self._may_wait(index)):
                self._call(index, instruction.results, index)
            for root in (needed | blocks.makes[index]) & self._existing.keys():
                if blocks.by_root[root].last == index:
                    self._drop(root)
        self._following.append(len(blocks.program.instructions))

    def result(self) -> Rewritten:
        """What was written down."""
        program = self._blocks.program
        outputs = tuple([self._names[slot] for slot in program.output_slots])
        specs = tuple([self._specs[slot] for slot in self._slots])
        key = (*program.key, "rematerialised", tuple(self._origins))
        made = Program(key, tuple(self._written), program.input_slots, outputs, len(self._slots))
        analysis_of(made).die_together()  # where a run stops, what is there is found by blocks
        return Rewritten(made, self._origins, self._following, self._slots, specs, forecast(made, specs).nbytes)

    def _restore(self, missing: list[int], needed: set[int], time: int) -> None:
        """Compute blocks again before instruction ``time``, which needs them beside others."""
        blocks = self._blocks
        calls, again = blocks.calls_for(missing, time, self._existing.__contains__)
        siblings = {root for index in calls for root in blocks.makes[index] if self._is_wanted(root, time)} - again
        if siblings:  # what comes of the same calls, and is needed later
            calls, again = blocks.calls_for(again | siblings, time, self._existing.__contains__)
        order = sorted(calls)
        last: dict[int, int] = {}
        for index in order:
            last.update(dict.fromkeys(blocks.repeat_reads[index] | (blocks.makes[index] & again), index))
        for index in order:
            self._left -= self._seconds[index] if index in self._called else 0
            if self._left < 0:
                raise _DoesNotFit
            self._make_room(index, needed | {root for root, until in last.items() if until >= index}, time)
            results = []
            for result in blocks.program.instructions[index].results:
                results.append(Result(result.path, len(self._slots)))
                self._slots.append(result.slot)
            self._call(index, results, time, again)
            for root in [root for root in again & self._existing.keys() if last[root] == index and root not in needed]:
                if blocks.by_root[root].next_use(time) is None:
                    self._drop(root)

    def _is_wanted(self, root: int, time: int) -> bool:
        """Whether a block does not exist that could be computed again and will be needed."""
        block = self._blocks.by_root.get(root)
        return (
            block is not None
            and root not in self._existing
            and block.may_be_dropped
            and block.next_use(time) is not None
        )

    def _call(self, index: int, results: Sequence[Result], following: int, again: set[int] | None = None) -> None:
        """Write down a call; where it is done ``again``, it makes these blocks."""
        instruction = self._blocks.program.instructions[index] if again is None else self._blocks.repeated[index]
        assert instruction is not None
        args = tuple([self._renamed(arg) for arg in instruction.args])
        kwargs = tuple([(name, self._renamed(arg)) for name, arg in instruction.kwargs])
        self._written.append(Instruction(instruction.op, args, kwargs, tuple(results)))
        self._origins.append(index)
        self._called.add(index)
        self._following.append(following)
        for recorded, result in zip(instruction.results, results, strict=True):
            root = self._blocks.root(recorded.slot)
            if again is not None and root not in again:
                continue
            self._names[recorded.slot] = result.slot
            if root in self._blocks.by_root:
                if root == recorded.slot:
                    self._held += self._blocks.by_root[root].nbytes
                self._existing.setdefault(root, set()).add(recorded.slot)

    def _renamed(self, arg: Any) -> Any:
        rename = lambda slot: Slot(self._names[slot])  # noqa: E731
        return filled(arg, rename, lambda param: param, lambda items: ListOf(tuple(items)), Constant)

    def _drop(self, root: int) -> None:
        for slot in self._existing.pop(root):
            del self._names[slot]
        self._held -= self._blocks.by_root[root].nbytes

    def _may_wait(self, index: int) -> int | None:
        """The block that a call makes and does nothing else, so that it could be called when that is needed first."""
        blocks, made = self._blocks, self._blocks.makes[index]
        if self._in_order or len(made) != 1 or blocks.repeated[index] is not blocks.program.instructions[index]:
            return None
        block = blocks.by_root.get(*made)
        if (
            block is None
            or block.made != index
            or not block.may_be_dropped
            or (block.next_use(index + 1) or 0) <= index + 1
        ):
            return None
        return block.root

    def _make_room(self, index: int, needed: set[int], time: int, waits: int | None = None) -> bool:
        """Have room for the results of a call before instruction ``time``, without dropping what is needed. False where
        the block ``waits``, which is its result, had better be made later."""
        by_root = self._blocks.by_root
        wanted = sum(by_root[root].nbytes for root in self._blocks.makes[index] if self._is_new(root, index))
        while self._held + wanted > self._room:
            root = self._cheapest(needed, time, waits)
            if root is None:
                raise _DoesNotFit
            if root == waits:
                return False
            self._drop(root)
        return True

    def _is_new(self, root: int, index: int) -> bool:
        return root in self._blocks.by_root and self._blocks.by_root[root].made == index

    def _cheapest(self, needed: set[int], time: int, waits: int | None) -> int | None:
        """The block that costs the least to do without until it is needed, for each byte and second. To make the one
        that ``waits`` is no repetition."""
        found: list[tuple[float, int, float, int]] = []
        for root in (self._existing.keys() - needed) | ({waits} if waits is not None else set[int]()):
            block = self._blocks.by_root[root]
            use = block.next_use(time + (root == waits)) if block.may_be_dropped and block.nbytes else None
            if use is not None:
                worth = block.nbytes * (self._clock[use] - self._clock[time] + self._seconds[block.made])
                alone = sum(self._seconds[index] for index in block.calls if index < time)
                found.append((alone / worth if worth else 0.0, root, worth, use))
        best, least = None, float("inf")
        for alone, root, worth, use in sorted(found):
            if alone >= least:
                break  # what it is made of comes on top
            exists = partial(self._exists_at, use)
            first = [root] if root != waits else [one for one in self._arguments(time) if not exists(one)]
            calls, _ = self._blocks.calls_for(first, time, exists)
            cost = sum(map(self._seconds.__getitem__, calls)) / worth if worth else 0.0
            if cost < least:
                best, least = root, cost
        return best

    def _arguments(self, index: int) -> list[int]:
        return [root for root in self._blocks.repeat_reads[index] if root in self._blocks.by_root]

    def _exists_at(self, time: int, root: int) -> bool:
        """Whether a block exists, and as far as is known will exist then."""
        return root in self._existing and self._blocks.by_root[root].last >= time
