"""The flat tier: a program run operation by operation, exactly as it was recorded.

The first time a program runs through a loop in Python, because preparing it costs more than running it once. From the
second time on it runs as a table in C++ (``table.py``) where that can be. Both drop every tensor right after its last
use, hold every result to what was recorded of it (``geometry.py``), and can say after a failure which instruction
failed and which results exist by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from types import FrameType
from typing import Any, Protocol

import torch

from marid import policy
from marid.execute.arena import Placement
from marid.execute.geometry import agrees, settle
from marid.execute.interrupted import Interrupted
from marid.execute.source import source_of
from marid.execute.specialisation import Frame, Positioned, Specialisation, give_way
from marid.execute.table import Table, Untranslatable, donors, translate
from marid.graph.analysis import analysis_of, forecast
from marid.graph.node import Spec
from marid.graph.prepared import Replay
from marid.graph.program import Instruction, Param, Program, Task, filled
from marid.graph.python_operator import positions_in
from marid.recent import Recent
from marid.settings import settings

_Range: Any = torch._C._profiler._RecordFunctionFast  # pyright: ignore[reportAttributeAccessIssue]
_ONCE: list[tuple[()]] = [()]
_COMPILED = "marid::compiled"  # the operator of compiled parts (native/compiled.cpp)


class Fallback(Protocol):
    """What a program was made from, to go on in where it cannot: the same, in other instructions."""

    origins: list[int]
    """For each instruction of the program, which one of what was recorded comes next when it has not run."""

    def resume(self, frame: Frame, start: int, /) -> list[torch.Tensor]:
        """Go on where the program has stopped before instruction ``start``. Raises ``Interrupted``."""
        ...

    def recorded(self, frame: Frame, index: int, /) -> int:
        """The instruction to go on with where the program has stopped before ``index``, having done what it takes."""
        ...


class Executable:
    """A program ready to run on concrete tensors. ``source`` is it as Python text.

    ``in_cpp`` says that no operator calls Python: all are PyTorch's own or compiled parts. ``by_themselves`` are the
    positions of those whose kernels are written in Python. ``transient_bytes`` is the
    forecast of what its results take at once, with the sizes of the run it was built for. Where there is a
    ``fallback``, that is what was recorded: runs that stop go on there, and errors are told in its instructions.
    """

    def __init__(self, program: Program, transient_bytes: int, fallback: Fallback | None = None) -> None:
        self.program = program
        self._fallback = fallback
        self.analysis = analysis_of(program)
        self.dying = self.analysis.dying
        self.transient_bytes = transient_bytes
        self.takes_much = transient_bytes >= policy.MUCH_BYTES
        self.runs = 0
        # Other operators may be written in Python, and call anything.
        self.in_cpp = all(one.op.name.startswith("aten::") or one.op.name == _COMPILED for one in program.instructions)
        self.by_themselves = positions_in(one.op for one in program.instructions)
        self._plain = Specialisation(self, None)
        self._specialised: Recent[tuple[Any, ...], Specialisation] = Recent(policy.PLANS)
        self._seen: set[int] = set()
        self._wasted = 0
        self._prepared: Table | None = None
        self._untranslatable = False
        self.recorded = program
        """The program that was recorded, which this one stands for."""
        self.origins: list[int] | None = None
        """For each instruction the recorded one that it stands for, where these are others."""
        self.profiles: list[Any] = []
        """Sums of what its runs took (``report/operator_times.py``)."""
        self.fitted: dict[Any, Any] = {}
        """Programs that take less memory than this one, by specs and by inputs that share memory (``fitted.py``)."""
        self.tier: Any = None
        """What decides whether it is compiled (``compiled/tier.py``)."""
        self.ran: Callable[[float], None] | None = None
        """Told the seconds of each run that came to its end."""

    @classmethod
    def of(cls, program: Program, specs: tuple[Spec | None, ...]) -> Executable:
        """A program that comes with tensors of these specs, by slot."""
        return cls(program, forecast(program, specs).nbytes)

    def specialised(self, task: Task | Replay) -> Specialisation:
        """How a run of ``task`` is done: with planned memory once its specs have come twice, at once where much memory
        is taken, and never where little is."""
        if self.transient_bytes < settings.plan_bytes:
            return self._plain
        specs = task.specs
        found = self._specialised.used(specs)
        if found is None:
            if self._wasted >= policy.PLAN_WASTES or (not self.takes_much and self._is_new(specs)):
                return self._plain
            found = Specialisation(self, Placement(donors(self.program, specs), self.transient_bytes))
            left = self._specialised.put(specs, found)
            if left is not None:
                self._wasted += left[1].uses < policy.PLAN_USES
        found.uses += 1
        return found

    def _is_new(self, specs: tuple[Any, ...]) -> bool:
        """Whether these specs come for the first time."""
        known = hash(specs)
        if known in self._seen:
            return False
        if len(self._seen) >= policy.PLAN_SEEN:
            self._seen.clear()
        self._seen.add(known)
        return True

    @property
    def specialisations(self) -> list[Specialisation]:
        """How this program runs for the specs for which its memory is planned."""
        return list(self._specialised.values())

    @property
    def source(self) -> str:
        return source_of(self.program, self.dying)

    def prepared(self) -> Table | None:
        """The program as it runs from the second time on; None for the loop. In that results live a little longer than
        in a table, so programs that take much have one at once."""
        if (self.runs or self.takes_much) and self._prepared is None and not self._untranslatable:
            try:
                self._prepared = translate(self.program)
            except Untranslatable:
                self._untranslatable = True
        return self._prepared

    def interpret(self, frame: Frame, start: int) -> list[torch.Tensor]:
        """Run in a loop, from instruction ``start`` on. Raises ``Interrupted``."""
        if self._fallback is not None:
            return self._fallback.resume(frame, start)
        self.steps(frame, start, len(self.program.instructions))
        return [frame.tensors[slot] for slot in self.program.output_slots]

    def steps(self, frame: Frame, start: int, stop: int, kept: frozenset[int] = frozenset()) -> None:
        """Run from ``start`` to before ``stop``, in Python. What is ``kept`` stays in the frame after its last use.
        Raises ``Interrupted``."""
        at = _Place(start)
        try:
            self._go(at, stop, frame, kept)
        except BaseException as error:
            index, returned = at.now
            raise Interrupted(index, bool(returned), frame.tensors, error) from error

    def _go(self, at: _Place, stop: int, frame: Frame, kept: frozenset[int]) -> None:
        for index in range(at.now[0], stop):
            returned: list[Any] = []
            at.now = index, returned
            give_way(frame.task)
            instruction = self.program.instructions[index]
            began = 0 if frame.timing is None else time.perf_counter_ns()
            args, kwargs = _arguments(instruction, frame.tensors, frame.params, frame.generator)
            call = partial(instruction.op.call, *args, **kwargs)
            if frame.labels is not None:
                call = partial(_within, frame.labels[index], call)
            # An interrupt comes when a call is over: had it not been noted in C by then, the operator would run twice.
            returned.extend(starmap(call, _ONCE))
            if frame.timing is not None:
                frame.timing.note(index, began, time.perf_counter_ns())
            if not self._take_one(instruction, returned[0], frame, args):
                self.take(index, returned[0], frame)
            self.drop(index, frame, kept)

    def _take_one(self, instruction: Instruction, returned: Any, frame: Frame, args: list[Any]) -> bool:
        """The same as ``take`` for the usual instruction, in less time: one result, as recorded, of an operator that
        writes nothing. False for any other."""
        op, results = instruction.op, instruction.results
        if op.mutates or instruction.kwargs or len(results) != 1 or results[0].path:
            return False
        slot, viewed = results[0].slot, args[0] if op.view else None
        spec = frame.task.specs[slot]
        if spec is None or (op.view and not isinstance(viewed, torch.Tensor)):
            return False
        if not agrees(returned, spec, viewed, args):
            return False
        frame.tensors[slot] = returned
        return True

    def take(self, index: int, returned: Any, frame: Frame) -> None:
        """Put what an instruction has returned into its slots, laid out as recorded."""
        instruction = self.program.instructions[index]
        for result in instruction.results:
            value = returned
            for step in result.path:
                value = value[step]
            frame.tensors[result.slot] = value
        self.settle(index, frame)

    def settle(self, index: int, frame: Frame) -> None:
        """Have the results of an instruction laid out as recorded. Raises ``LazyTensorError``."""
        nodes = frame.task.nodes
        node = nodes[index if self._fallback is None else min(self._fallback.origins[index], len(nodes) - 1)]
        settle(self.program, index, node, frame.tensors, frame.task.specs, frame.params)

    def drop(self, index: int, frame: Frame, kept: frozenset[int] = frozenset()) -> None:
        """Let go of what nobody needs behind an instruction."""
        for slot in self.dying[index]:
            if slot not in kept:
                frame.tensors.pop(slot, None)

    def stopped(self, index: int, frame: Frame, error: BaseException) -> Interrupted:
        """What is known when a run stops before an instruction."""
        recorded = index if self._fallback is None else self._fallback.recorded(frame, index)
        return Interrupted(recorded, False, frame.tensors, error)


def _within(label: str, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, in a range that an active profiler shows."""
    with _Range(label):
        return call()


class _Place:
    """How far a run in Python has come: ``now`` are an instruction and what it returned, nothing before it did."""

    __slots__ = ("now",)

    def __init__(self, index: int) -> None:
        self.now: tuple[int, list[Any]] = index, []


def may_be_stopped(frame: FrameType | None) -> bool:
    """Whether what a signal's handler raises in ``frame`` becomes an ``Interrupted`` that knows what was done."""
    while frame is not None and frame.f_code not in _ENDS:
        if frame.f_code in _STOPPABLE:
            return True
        frame = frame.f_back
    return False


_STOPPABLE = {Executable._go.__code__, Specialisation._go.__code__}
_ENDS = {Specialisation.run.__code__}


def _arguments(
    instruction: Instruction, tensors: dict[int, Any], params: list[Any], generator: Positioned
) -> tuple[list[Any], dict[str, Any]]:
    """What an instruction is called with."""

    def number_of(param: Param) -> Any:
        return generator(params[param.index]) if param.draw else params[param.index]

    tensor_of = tensors.__getitem__
    args = [filled(arg, tensor_of, number_of, list) for arg in instruction.args]
    return args, {name: filled(arg, tensor_of, number_of, list) for name, arg in instruction.kwargs}
