"""Running a program with compiled parts, and the first such run, which is compared with the flat tier."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from marid.errors import LazyTensorError
from marid.execute.arena import Placement
from marid.execute.compiled.partition import Partition
from marid.execute.compiled.rounding import Disturb, beyond_rounding, copies, is_close
from marid.execute.compiled.variant import Variant, assemble
from marid.execute.executable import Executable
from marid.execute.interrupted import Interrupted
from marid.execute.specialisation import Frame, Positioned, Specialisation
from marid.execute.table import TableRun
from marid.graph.node import Draw, Operation
from marid.graph.prepared import Replay
from marid.graph.program import Task
from marid.native import module
from marid.report.operator_times import operator_times
from marid.report.stats import counters

logger = logging.getLogger("marid")

# What a kernel raises on other inputs than the user's, and where there is no memory for copies of these.
_TRIAL_FAILURES = (RuntimeError, ValueError, IndexError, MemoryError)


@functools.cache
def _operation() -> Operation:
    return Operation(torch.ops.marid.compiled.default, mutates=True, view=False)


class CompiledProgram:
    """A program in which calls of compiled parts stand for stretches of ``flat``, the fallback of its ``executable``.

    Slots are those of ``flat``, and what is said of a failure is said in instructions of ``flat``.
    """

    def __init__(self, flat: Executable, variant: Variant) -> None:
        program, self.origins = assemble(flat.program, [part.part for part in variant.parts], _operation())
        self.executable = Executable(program, flat.transient_bytes, self)
        self.executable.runs = 1  # not to be interpreted first
        self.executable.recorded, self.executable.origins = flat.program, self.origins
        self.flat = flat
        self.compiled = variant
        self.left = False
        """Whether the latest run went on without the parts."""

    def resume(self, frame: Frame, start: int) -> list[torch.Tensor]:
        """Go on in the flat program."""
        self.left = True
        origin = self.recorded(frame, start)
        names = frame.params[len(frame.params) - 2 * len(self.compiled.parts) + 1 :: 2]
        if any(map(module.compiled_failed_writing, names)):
            error = LazyTensorError("a compiled part failed after it may have written to its inputs")
            raise Interrupted(origin, False, frame.tensors, error)
        return self.flat.interpret(frame, origin)

    def recorded(self, frame: Frame, index: int) -> int:
        """The instruction of ``flat`` to go on with. Behind a part, its views come first."""
        while index < len(self.origins) and self._is_again(index):
            try:
                self.executable.steps(frame, index, index + 1)
            except Interrupted as stop:
                if isinstance(stop.error, Exception):
                    raise stop.error from None
                continue  # Ctrl-C, in the midst of handling another
            index += 1
        return self._after(index)

    def _is_again(self, index: int) -> bool:
        """Whether an instruction is one that is made again behind a part."""
        return self._after(index + 1) == self.origins[index]

    def _after(self, index: int) -> int:
        return self.origins[index] if index < len(self.origins) else len(self.flat.program.instructions)


class Bound:
    """A run with the compiled parts, ``Launchable``."""

    compiled = True

    __slots__ = ("_params", "_program", "_refused", "_specialisation", "output_slots", "transient_bytes")

    def __init__(
        self, program: CompiledProgram, specialisation: Specialisation, params: list[Any], refused: Callable[[], None]
    ) -> None:
        self._program, self._specialisation, self._params, self._refused = program, specialisation, params, refused
        self.transient_bytes = program.flat.transient_bytes
        self.output_slots = specialisation.output_slots

    @property
    def placement(self) -> Placement | None:
        return self._specialisation.placement

    @property
    def in_cpp(self) -> bool:
        return self._specialisation.in_cpp

    def run(self, task: Task | Replay, generator: Positioned) -> list[torch.Tensor]:
        return self._noticing(self._specialisation.run, task, generator, self._given(task))

    def start(self, task: Task | Replay) -> TableRun | None:
        return self._specialisation.start(task, self._given(task))

    def resume(self, run: TableRun, task: Task | Replay, generator: Positioned) -> list[torch.Tensor]:
        return self._noticing(self._specialisation.resume, run, task, generator, self._given(task))

    def draw(self, index: int, params: list[Any]) -> Draw:
        return self._specialisation.draw(index, params)

    def ran(self, seconds: float) -> None:
        self._specialisation.ran(seconds)

    def _given(self, task: Task | Replay) -> list[Any]:
        """The task's parameters, and those of the parts."""
        return [*task.params, *self._params[len(task.params) :]]

    def _noticing(self, run: Callable[..., list[torch.Tensor]], *args: Any) -> list[torch.Tensor]:
        """What ``run`` returns; runs like one that left the parts are not bound again."""
        self._program.left = False
        try:
            return run(*args)
        finally:
            if self._program.left:
                self._refused()


class Checked:
    """A flat run beside which parts run once, on copies of what they write; results are compared.

    Each part is compared on its own inputs: what an earlier one does to the last digits is not held against it. A user
    waits for this, so when it has taken ``seconds`` the parts that are left are for the next run. ``done`` is told
    which are wrong, and how many were seen to by now.
    """

    __slots__ = (
        "_done",
        "_extended",
        "_flat",
        "_seconds",
        "_variant",
        "output_slots",
        "placement",
        "transient_bytes",
    )
    compiled = False

    def __init__(
        self,
        flat: Executable,
        variant: Variant,
        extended: list[Any],
        seconds: float,
        done: Callable[[set[int], int], None],
    ) -> None:
        self._flat, self._variant, self._extended, self._done = flat, variant, extended, done
        self._seconds = seconds
        self.transient_bytes = flat.transient_bytes
        self.placement: Placement | None = None
        self.output_slots = flat.program.output_slots

    def run(self, task: Task | Replay, generator: Positioned) -> list[torch.Tensor]:
        flat, position = self._flat, 0
        frame = Frame.of(task, task.params, generator)
        frame.timing = task.timing = operator_times.timing(flat, task)
        tensors = frame.tensors
        bad: set[int] = set()
        number, left = self._variant.checked, self._seconds
        while number < len(self._variant.parts) and left > 0:
            part = self._variant.parts[number].part
            flat.steps(frame, position, part.start)
            started = time.perf_counter()
            real = [tensors[slot] for slot in part.inputs]
            given, before = copies(real, part.bases, part.written), copies(real, part.bases, part.written)
            made = self._call(given, number, len(task.params))
            left -= time.perf_counter() - started
            # What is written now could be what the copies were made of: the flat tier comes second.
            outputs = frozenset(part.outputs)  # some only for views that are made again behind the part
            flat.steps(frame, part.start, part.stop, outputs)
            position, started = part.stop, time.perf_counter()
            pairs = [(tensors[slot], slot) for slot in part.outputs]
            written = [i for i, w in enumerate(part.written) if w]
            if made is None:
                bad.add(number)
            else:
                pairs += [(real[i], part.inputs[i]) for i in written]
                seen = made + [given[i] for i in written]
                results = list(zip(seen, [right for right, _ in pairs], strict=True))
                wrong = self._wrong(frame, part, results, before)
                if wrong is None:
                    bad.add(number)
                elif wrong or _share(made, given):
                    bad.add(number)
                    counters.compile_mismatches += 1
                    self._report(task, part.start, part.stop, [pairs[index][1] for index in wrong])
                del seen, results
            del real, given, before, made, pairs
            for index in range(part.start, part.stop):
                for slot in outputs.intersection(flat.dying[index]):
                    del tensors[slot]
            left -= time.perf_counter() - started
            number += 1
        flat.steps(frame, position, len(flat.program.instructions))
        self._done(bad, number)
        return [tensors[slot] for slot in flat.program.output_slots]

    def _wrong(
        self,
        frame: Frame,
        part: Partition,
        results: list[tuple[torch.Tensor, torch.Tensor]],
        inputs: list[torch.Tensor],
    ) -> list[int] | None:
        """Which of a part's results, pairs of what was computed and what is right, are wrong; None if a trial fails."""
        try:
            if all(is_close(got, right) for got, right in results):
                return []
            return beyond_rounding(results, inputs, part.bases, partial(self._again, frame, part))
        except BaseException as raised:
            # Of an interruption the error alone counts: the tensors in it are those of a trial.
            error = raised.error if isinstance(raised, Interrupted) else raised
            if not isinstance(error, _TRIAL_FAILURES):  # Ctrl-C, or what a signal's handler raises: the part has run
                raise Interrupted(part.stop, False, frame.tensors, error) from error
            logger.info("a compiled part is not used: what rounding does to it cannot be found out: %s", error)
            return None

    def _again(self, frame: Frame, part: Partition, inputs: list[torch.Tensor], disturb: Disturb) -> list[torch.Tensor]:
        """What the flat tier makes of a part of other inputs, with each operation's results disturbed: its outputs, and
        what it has written."""
        flat, outputs = self._flat, frozenset(part.outputs)
        tensors = dict(zip(part.inputs, inputs, strict=True))
        other = Frame(frame.task, tensors, frame.params, frame.generator)
        for index in range(part.start, part.stop):
            results = [result.slot for result in flat.program.instructions[index].results]
            made = [slot for slot in results if flat.analysis.roots[slot] == slot]
            made += flat.analysis.writes[index]
            flat.steps(other, index, index + 1, outputs.union(made))
            disturb([tensors[slot] for slot in made])
            flat.drop(index, other, outputs)
        return [tensors[slot] for slot in part.outputs] + [
            one for one, written in zip(inputs, part.written, strict=True) if written
        ]

    def _call(self, given: list[torch.Tensor], number: int, own: int) -> list[torch.Tensor] | None:
        numbers, name = self._extended[own + 2 * number : own + 2 * number + 2]
        try:
            return list(_operation().call(given, numbers, name))
        except RuntimeError as error:
            logger.info("a compiled part is not used: %s", error)
            return None

    def _report(self, task: Task | Replay, start: int, stop: int, wrong: list[int]) -> None:
        """Warn where the first wrong result was written: the last operation of the part that made or wrote it."""
        instructions = self._flat.program.instructions
        index = stop - 1
        for at in range(start, stop):
            instruction = instructions[at]
            if any(result.slot in wrong for result in instruction.results):
                index = at
                break
            if instruction.op.mutates and set(self._flat.analysis.reads[at]) & set(wrong):
                index = at
        node = task.nodes[index]
        name = instructions[index].op.name
        place = (node.site.file, node.site.line) if node.site is not None else ("<unknown>", 0)
        warnings.warn_explicit(
            f"compiled {name} (and what was fused with it) differs from the flat tier by more than rounding; "
            "this part of the program is not compiled",
            UserWarning,
            *place,
        )


def _share(made: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
    """Whether results share memory with each other or with inputs."""
    own = [tensor.untyped_storage()._cdata for tensor in made]
    return len(set(own)) < len(own) or bool(set(own) & {tensor.untyped_storage()._cdata for tensor in given})
