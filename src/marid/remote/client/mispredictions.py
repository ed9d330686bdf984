"""Results that a worker's kernels laid out otherwise than was recorded: told to the client, whose recorder it was."""

from __future__ import annotations

from typing import Any

from marid.execute.geometry import Misprediction, report
from marid.remote.client.steps import RunWork
from marid.remote.wire.codec import as_int, as_list
from marid.remote.wire.tensors import spec_from, spec_to

__all__ = ["misprediction_to", "report_mispredictions"]


def misprediction_to(seq: int, misprediction: Misprediction) -> list[Any]:
    """A misprediction of request ``seq`` as plain data. The nodes of a worker count the instructions of a program."""
    path = list(misprediction.path)
    return [seq, misprediction.node.seq, path, spec_to(misprediction.seen), misprediction.shares]


def report_mispredictions(told: list[Any], seq: int, step: RunWork) -> None:
    """Count the mispredictions of request ``seq`` among those that a worker has ``told``, and correct what is recorded.
    Raises ``WireError`` for data that means nothing."""
    program, specs = step.sized.known.program, step.sized.specs
    nodes = step.recorded_nodes
    for data in told if nodes else ():
        parts = as_list(data, 5, "a misprediction")
        if len(parts) != 5 or parts[0] != seq:
            continue
        index = as_int(parts[1], 0, len(program.instructions) - 1, "an instruction")
        path = tuple([as_int(one, 0, 1 << 16, "a path") for one in as_list(parts[2], 2, "a path")])
        seen, instruction = spec_from(parts[3]), program.instructions[index]
        for result in instruction.results:
            recorded = specs[result.slot]
            if result.path == path and recorded is not None:
                shares = parts[4] is True
                params = list(step.params)
                report(Misprediction(nodes[index], instruction, path, recorded, seen, shares, specs, params))
