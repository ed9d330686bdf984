"""The flat tier: a program run operation by operation.

The first time a program runs through a loop in Python, exactly as it was recorded, because preparing it costs more
than running it once. From the second time on it runs as a table in C++ (``table.py``) where that can be, improved by
passes where specs have come before (``optimize/passes``). Both drop every tensor right after its last use, hold every
result to what was recorded of it (``geometry.py``), and can say after a failure which recorded instruction failed and
which results exist by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import starmap
from types import FrameType
from typing import Any

import torch

from marid.execute.arena import MUCH
from marid.execute.forms import Form, Forms, Frame
from marid.execute.geometry import agrees, settle
from marid.execute.interrupted import Interrupted
from marid.execute.resume import arguments
from marid.execute.source import source_of
from marid.execute.table import Table, Untranslatable, translate
from marid.graph.operators import unsettled_slots
from marid.graph.prepared import Replay
from marid.graph.program import Instruction, Program, Task
from marid.native import module
from marid.optimize.passes.lowering import last_uses
from marid.optimize.passes.registry import generation, improvable
from marid.settings import settings

__all__ = ["FlatProgram", "may_be_stopped"]

_FORMS = 16  # specs for which a program keeps a plan, or what passes made of it
_USES = 3  # runs with the same specs that make up for the plan and the passes
_WASTED = 4  # times that they did not, after which a program (whose sizes keep changing) is run as recorded
_SHARE = 20  # passes for further specs of a program take no more than this part of its runs
_SEEN = 256
_ONCE: list[tuple[()]] = [()]


class FlatProgram:
    """A program ready to run on concrete tensors. ``source`` is it as Python text.

    ``in_cpp`` says that all its operators are PyTorch's own. ``transient_bytes`` is the forecast of what its results
    take at once, with the sizes of the run it was built for.
    """

    may_improve = True
    """Whether passes are for programs of this kind."""

    def __init__(self, program: Program, transient_bytes: int) -> None:
        self.program = program
        self.dying = last_uses(program)
        self.transient_bytes = transient_bytes
        self.takes_much = transient_bytes >= MUCH
        self.runs = 0
        # Other operators may be written in Python, and call anything.
        self.in_cpp = all(instruction.op.name.startswith("aten::") for instruction in program.instructions)
        self._forms: OrderedDict[tuple[Any, ...], Forms] = OrderedDict()
        self.plain = Form(self, None)
        self._wasted = 0
        self._spent: dict[int, float] = {}  # seconds that runs took, by the hash of their specs
        self._spent_in_all = 0.0
        self.invested = 0.0
        """Seconds for which it was improved, as they are expected to be."""
        self._current = 0
        self._last_params: list[Any] | None = None
        self._prepared: Table | None = None
        self._untranslatable = module is None
        self.unsettled = unsettled_slots(program)
        self._improvable = self.may_improve and improvable(program)
        self._generation = generation()
        self.tier: Any = None
        """What decides whether it is compiled (``compiled/tier.py``)."""
        self.ran: Callable[[float], None] | None = None
        """Told the seconds of each run that came to its end."""

    def form(self, task: Task | Replay) -> Form:
        """How a run of ``task`` is done: as recorded the first time and for small programs, else planned and improved
        for its specs: planned once they have come twice (at once where much memory is taken), improved once that pays.
        To be called below all dispatch: constants are computed."""
        if self._generation != generation():
            self._generation = generation()
            self._improvable = self.may_improve and improvable(self.program)
            self._forms.clear()
            self._wasted = 0
        if self.transient_bytes < settings.plan_bytes and not (self._improvable and settings.passes):
            return self.plain
        specs = task.specs
        self._current = hash(specs)
        found = self._forms.get(specs)
        if found is not None:
            self._forms.move_to_end(specs)
        elif self._wasted >= _WASTED:
            return self.plain
        elif not self.takes_much and (not self.runs or self._current not in self._spent):
            self._last_params = task.params if self._improvable else None
            return self.plain
        else:
            found = Forms(self, specs, self._last_params if self.runs else task.params)
            self._last_params = None
            self._forms[specs] = found
            if len(self._forms) > _FORMS:
                _, oldest = self._forms.popitem(last=False)
                self._wasted += oldest.uses < _USES
        return found.pick(task.params, self._improvable and settings.passes, found.begun or self._is_worth_it())

    @property
    def pass_cost(self) -> float:
        """The seconds that the passes will take, about."""
        return settings.pass_cost * len(self.program.instructions) / 1e6

    def _is_worth_it(self) -> bool:
        """Whether runs with the current specs took as long as the passes will. Where the sizes keep changing that does
        not say that they will pay: then all runs of the program must have taken much longer than all of its passes."""
        spent, cost = self._spent.get(self._current), self.pass_cost
        if spent is None or spent < cost:
            return False
        return not self.invested or (self.invested + cost) * _SHARE <= self._spent_in_all

    def note(self, seconds: float) -> None:
        """A run has taken so long. It counts for the specs asked for last: near enough, for one that ran ahead."""
        if self._current not in self._spent and len(self._spent) >= _SEEN:
            self._spent.clear()
        self._spent[self._current] = self._spent.get(self._current, 0.0) + seconds
        self._spent_in_all += seconds
        if self.ran is not None:
            self.ran(seconds)

    @property
    def forms(self) -> list[Form]:
        """Every way of running this program that was made for certain specs."""
        return [form for forms in self._forms.values() for form in forms.made()]

    @property
    def source(self) -> str:
        return source_of(self.program, self.dying)

    def explain(self) -> str:
        """What passes made of this program, a line for each set of specs."""
        made = [form.improved.explain() for form in self.forms if form.improved is not None]
        return "\n".join(made) or f"{len(self.program.instructions)} instructions, run as recorded"

    def prepared(self) -> Table | None:
        """The recorded program as it runs from the second time on; None for the loop. In that results live a little
        longer than in a table, so programs that take much have one at once."""
        if (self.runs or self.takes_much) and self._prepared is None and not self._untranslatable:
            self._prepared = self.prepare(self.program, self.dying)
            self._untranslatable = self._prepared is None
        return self._prepared

    def prepare(self, program: Program, dying: list[list[int]]) -> Table | None:
        """The table of a form of this program; None where there is none."""
        if module is None:
            return None
        try:
            return translate(program, dying)
        except Untranslatable:
            return None

    def interpret(self, frame: Frame, start: int) -> list[torch.Tensor]:
        """Run the recorded program in a loop, from instruction ``start`` on. Raises ``Interrupted``."""
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
            instruction = self.program.instructions[index]
            args, kwargs = arguments(instruction, frame.tensors, frame.params, frame.generator)
            # An interrupt comes when a call is over: had it not been noted in C by then, the operator would run twice.
            returned.extend(starmap(partial(instruction.op.call, *args, **kwargs), _ONCE))
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
        specs, node = frame.task.specs, frame.task.nodes[index]
        settle(self.program.instructions[index], node, frame.tensors, specs, frame.params, self.unsettled)

    def drop(self, index: int, frame: Frame, kept: frozenset[int] = frozenset()) -> None:
        """Let go of what nobody needs behind an instruction."""
        for slot in self.dying[index]:
            if slot not in kept:
                frame.tensors.pop(slot, None)

    def stopped(self, index: int, frame: Frame, error: BaseException) -> Interrupted:
        """What is known when a run stops before an instruction."""
        return Interrupted(index, False, frame.tensors, error)


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


_STOPPABLE = {FlatProgram._go.__code__, Form._go.__code__}
_ENDS = {Form._recover.__code__, Form.run.__code__}
