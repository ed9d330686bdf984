"""What is asked of the compiler for a part, for the sizes that it came with: as recorded, or as passes changed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marid.execute.compiled.describe import Description, describe, generalize, solve
from marid.execute.compiled.partition import Partition, Specs
from marid.execute.compiled.passes.registry import Improved, PassFailed, improve, wanted
from marid.execute.kernel_warnings import report
from marid.graph.program import Program
from marid.report.stats import counters

Example = tuple[Specs, list[Any]]

_complaints: set[str] = set()  # passes that failed, each told once


@dataclass(frozen=True)
class CompileRequest:
    """A part to compile: ``code``, for runs whose description is that of ``fits`` with other ``values`` of the
    ``symbols`` that the two have in common; if not ``for_any_size`` there are none."""

    part: Partition
    fits: Description
    code: Description
    symbols: int
    values: tuple[int, ...]
    for_any_size: bool = True


def request_for(
    part: Partition, program: Program, examples: list[Example], changing: set[int]
) -> CompileRequest | None:
    """What to ask for, given the sizes and numbers that came, the latest last; ``changing`` are parameters that came
    with several values. None where one code cannot serve all of them."""
    if wanted():
        try:
            found = _improved(part, program, examples, changing)
        except PassFailed as failure:
            if failure.name not in _complaints:
                _complaints.add(failure.name)
                report(f"{failure}; what it was given is compiled as it was recorded")
        else:
            if found is not None:
                return found
    runs = [describe(part, program, specs, params) for specs, params in examples]
    general, count = generalize(runs) or (None, 0)
    values = None if general is None else solve(general, runs[-1], count)
    return None if general is None or values is None else CompileRequest(part, general, general, count, values)


def _improved(part: Partition, program: Program, examples: list[Example], changing: set[int]) -> CompileRequest | None:
    """The same with what passes make of the part; None where they change nothing, or not the same for all sizes."""
    while True:
        runs = [describe(part, program, specs, params) for specs, params in examples]
        made = _pass_over(part, runs[-1], examples[-1], changing)
        if made is None:
            return None
        if not made.relied:
            break
        part = part.baking(made.relied)  # each of these numbers is known from now on
    codes = [made.description]
    if made.for_any_size:
        others = [_pass_over(part, *one, changing) for one in zip(runs[:-1], examples[:-1], strict=True)]
        codes = [other.description for other in others if other is not None and not other.relied] + codes
        if len(codes) < len(runs):
            return None
    # Together, so that a size is the same symbol in both.
    both = [{"fits": run, "code": code} for run, code in zip(runs[-len(codes) :], codes, strict=True)]
    general, count = generalize(both) or (None, 0)
    values = None if general is None else solve(general["fits"], runs[-1], count)
    if general is None or values is None:
        return None
    counters.count_passes(made.changes)
    return CompileRequest(part, general["fits"], general["code"], count, values, made.for_any_size)


def _pass_over(part: Partition, description: Description, example: Example, changing: set[int]) -> Improved | None:
    numbers = [number.value(example[1]) for number in part.numbers]
    varying = {position for position, number in enumerate(part.numbers) if number.param in changing}
    return improve(description, numbers, varying)
