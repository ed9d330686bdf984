"""Running what a program needs before it that is kept: pending work that makes what it works on, or that comes before
its writes. What else is pending stays so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marid.errors import MaterializationError, MemoryLimitError
from marid.frontend import handles
from marid.frontend.materialize import run_pending, wait_anyway
from marid.graph.node import Node, last_write, root_of
from marid.graph.tape import Tape


def run_needed(device: int, tensors: list[Any], writes: Sequence[int]) -> bool:
    """Run what a program needs that works on ``tensors`` and writes those at the positions ``writes``; whether nothing
    of that failed. It is to run next."""
    tape = handles.tape(device)
    wait_anyway()  # what cannot run before something else does is pending again
    if not tape.entries:
        return True
    values = tuple([tensor._value for tensor in tensors])
    program = Node(next(tape.sequence), None, values, None, None, None, None, None)  # stands for it behind the tape
    program.after = tuple([write for tensor in tensors if (write := last_write(tensor._storage)) is not None]) or None
    program.overwrites = tuple([root_of(tensors[index]._value) for index in writes])
    fine = _run_before(tape, program)
    wait_anyway()
    return fine


def _run_before(tape: Tape, program: Node) -> bool:
    while True:
        tape.fail_dependents()
        try:
            nodes = [node for node in tape.cut([program]) if node is not program]
        except MaterializationError:
            return False
        if not nodes:
            if wait_anyway():
                continue
            return True
        try:
            run_pending(tape, nodes)
        except MaterializationError:
            continue  # the next cut raises it if it is needed
        except MemoryLimitError:
            return False
