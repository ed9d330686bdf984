"""Programs that run without Python between their operations: translated to a table of dispatcher calls, once.

``native/execute.cpp`` goes through the table with the interpreter's lock released; ``native/runs.cpp`` begins runs and
hands out what they made. What cannot be translated (an argument that is neither tensor, number, text nor dtype) is said
at once, and the program runs in Python (``Executable.interpret``).
"""

from __future__ import annotations

import functools
import weakref
from array import array
from typing import Any

import torch

import marid.native.gemm  # noqa: F401 (has the kernels that it names switched as the settings say)
from marid import policy
from marid.graph.analysis import Analysis, analysis_of
from marid.graph.node import Operation, Spec
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot, Task
from marid.native import module
from marid.ops.facts import facts_of

_SLOT, _PARAM, _DRAW, _CONSTANT, _LIST, _DEFAULT = range(6)
DONE, AGAIN, DRAWS, RAISED = range(4)

_MEMORY_FORMATS = [
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
]

_free = module.run_free

Specs = tuple[Spec | None, ...] | None
Seen = tuple[int | None, int | None, tuple[str, ...] | None]
"""Where a run adds what its instructions take, and notes when they begin and end (``Timing`` of
``report/operator_times.py``), and what profilers call them."""
UNSEEN: Seen = None, None, None


class Untranslatable(Exception):
    """A program has something in it that the table cannot express."""


class Table:
    """The table of one program. A run is given specs by slot (None for what nothing is known of), and stops behind an
    operation whose result is another one than they say."""

    __slots__ = ("__weakref__", "_input_slots", "pointer", "slot_count")

    def __init__(self, program: Program) -> None:
        self.pointer: int = module.program_new(program.slot_count)
        weakref.finalize(self, module.program_free, self.pointer).atexit = False
        self.slot_count = program.slot_count
        self._input_slots = program.input_slots

    def start(
        self, inputs: list[Any], params: list[Any], donors: bytes | None, specs: Specs, seen: Seen = UNSEEN
    ) -> TableRun:
        """A run on concrete tensors, not begun; inputs that are no tensors come later. ``donors`` is what the function
        of that name gives, or None; ``seen`` says what is to be measured. Raises ``OverflowError`` for a number that
        does not fit into 64 bits."""
        pointer = module.run_begin(self.pointer, self._input_slots, donors, inputs, params, specs, *seen)
        return TableRun(self, pointer, specs)

    def run(
        self,
        inputs: list[torch.Tensor],
        params: list[Any],
        donors: bytes | None,
        specs: Specs,
        outputs: tuple[int, ...],
        task: Task | None,
        seen: Seen = UNSEEN,
        seconds: float = policy.UNHEARD_SECONDS,
    ) -> list[torch.Tensor] | tuple[int, TableRun]:
        """The same, begun: the tensors in the slots ``outputs`` after a whole run, which ``task`` has been given by
        then; else how far it came in about ``seconds`` (see ``TableRun.go``), and the run."""
        begun = self.pointer, self._input_slots, donors, inputs, params, specs
        found = module.run_once(*begun, *seen, outputs, seconds, task)
        return found if type(found) is list else (found[0], TableRun(self, found[1], specs))


class TableRun:
    """One run of a table; it holds its tensors until it is dropped."""

    __slots__ = ("__weakref__", "_specs", "_table", "pointer")

    def __init__(self, table: Table, pointer: int, specs: Specs) -> None:
        self._table = table
        self._specs = specs  # which the run reads
        self.pointer = pointer

    def __del__(self) -> None:
        if _free is not None:  # which the end of the interpreter takes away
            _free(self.pointer)

    def go(self, generator: torch.Generator | None, seconds: float = policy.UNHEARD_SECONDS) -> int:
        """Go on to the end (``DONE``), for about ``seconds`` (``AGAIN``), or up to an operation that wants a generator
        (``DRAWS``), raises, or has given something else than was recorded (``RAISED``). ``generator`` is for the first
        operation, after ``DRAWS``."""
        positioned = None if generator is None else generator._cdata
        return module.run_go(self.pointer, positioned, seconds)

    @property
    def next(self) -> int:
        """The instruction that comes next."""
        return module.run_next(self.pointer)

    @property
    def differs(self) -> bool:
        """Whether the instruction before ``next`` has given something else than was recorded; what it was called with
        exists still."""
        return module.run_differs(self.pointer)

    def tensors(self, slots: tuple[int, ...], task: Task | None = None) -> list[torch.Tensor]:
        """The tensors in these slots; they are the results of ``task``, which is given them, if there is one."""
        return module.run_tensors(self.pointer, slots, task)

    def existing(self) -> dict[int, torch.Tensor]:
        """Every tensor that exists now, by slot."""
        slots = [slot for slot in range(self._table.slot_count) if module.run_has(self.pointer, slot)]
        return dict(zip(slots, self.tensors(tuple(slots)), strict=True))


# --- translating ---------------------------------------------------------------------------------------------------


def translate(program: Program) -> Table:
    """The table of ``program``. Raises ``Untranslatable``."""
    table, analysis = Table(program), analysis_of(program)
    for index, instruction in enumerate(program.instructions):
        _add(table.pointer, instruction, index, analysis)
    return table


def _add(pointer: int, instruction: Instruction, place: int, analysis: Analysis) -> None:
    func = instruction.op.func
    target = instruction.op.target
    if instruction.op.call is not target._op:
        raise Untranslatable(f"{func} is called in a way of its own")
    schema = func._schema
    name = facts_of(target).kernel or target._schema.name
    if not module.program_operation(pointer, name, schema.overload_name):
        raise Untranslatable(f"{func} is not known to the dispatcher")
    named = dict(instruction.kwargs)
    for position, formal in enumerate(schema.arguments):
        if position < len(instruction.args):
            kind, index = _argument(pointer, instruction.args[position])
        elif formal.name in named:
            kind, index = _argument(pointer, named[formal.name])
        else:
            kind, index = _DEFAULT, 0
        if not module.program_argument(pointer, kind, index):
            raise Untranslatable(f"argument {formal.name} of {func}")
    out = _out_overload(instruction.op)
    if out is not None:
        module.program_out(pointer, schema.name, out)
    shared = analysis.shared[place]
    for result in instruction.results:
        if len(result.path) > 2:
            raise Untranslatable(f"results of {func}")
        first, second = (*result.path, 0, 0)[:2]
        settled = result.slot not in analysis.unsettled
        module.program_result(
            pointer, result.slot, len(result.path), first, second, shared.get(result.slot, -1), settled
        )
    for slot in analysis.resized[place]:
        module.program_resized(pointer, slot)
    for slot in analysis.dying[place]:
        module.program_dying(pointer, slot)


def _argument(pointer: int, arg: Any) -> tuple[int, int]:
    if isinstance(arg, Slot):
        return _SLOT, arg.index
    if isinstance(arg, Param):
        return (_DRAW if arg.draw else _PARAM), arg.index
    if isinstance(arg, ListOf):
        return _LIST, module.program_list(pointer, [_listed(item) for item in arg.items])
    assert isinstance(arg, Constant)
    return _CONSTANT, module.program_constant(pointer, *_constant(arg.value))


def _listed(item: Any) -> int:
    if isinstance(item, Slot):
        return item.index
    if isinstance(item, Constant) and item.value is None:
        return -1
    raise Untranslatable(f"{item} in a list")


def _constant(value: Any) -> tuple[str, int, str]:
    if value is None:
        return "n", 0, ""
    if isinstance(value, bool):
        return "b", int(value), ""
    if isinstance(value, str):
        return "s", 0, value
    if isinstance(value, torch.device):
        return "v", 0, str(value)
    if isinstance(value, torch.dtype):
        return "t", _sample(value)._cdata, ""
    if value is torch.strided:
        return "i", 0, ""
    if value in _MEMORY_FORMATS:
        return "i", _MEMORY_FORMATS.index(value), ""
    raise Untranslatable(repr(value))


@functools.cache
def _sample(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


# --- results in the place of arguments -----------------------------------------------------------------------------


def _out_overload(op: Operation) -> str | None:
    """The overload of a pointwise operator that takes the same arguments and the place of its result."""
    return facts_of(op.func).out_overload if op.target is op.func else None


def donors(program: Program, specs: tuple[Spec | None, ...]) -> bytes:
    """For each instruction the argument whose memory its result may take over, or -1: an array of 64 bits each.

    An argument qualifies when it dies there, was made in the program and has the very spec of the result. Whether
    anybody else sees its memory is checked when it happens.
    """
    found, inputs = [], set(program.input_slots)
    for instruction, dead in zip(program.instructions, analysis_of(program).dying, strict=True):
        donor = -1
        if dead and len(instruction.results) == 1 and _out_overload(instruction.op) is not None:
            spec = specs[instruction.results[0].slot]
            for position, arg in enumerate(instruction.args):
                if spec is None or not isinstance(arg, Slot) or arg.index not in dead or arg.index in inputs:
                    continue
                if specs[arg.index] is spec:
                    donor = position
                    break
        found.append(donor)
    return array("q", found).tobytes()
