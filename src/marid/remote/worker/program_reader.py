"""Programs as a client has sent them, read by a worker: what was sent is a program only when every part of it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from marid.engine.plain import as_int, as_list, spec_from
from marid.errors import WireError
from marid.execute.device_operators import for_device
from marid.graph.node import Spec
from marid.graph.program import Program
from marid.remote.wire.codec import unpack_plain
from marid.remote.worker.instructions import SLOTS, Kinds, check_numbers, read_program


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """A program that was sent, with what the numbers of its runs must be."""

    program: Program
    kinds: Kinds

    @classmethod
    def read(cls, body: Any, device: torch.device) -> RemoteProgram:
        """The program of a body, to be run on ``device``. Raises ``WireError``."""
        data = bytes(body)
        program, kinds = read_program(unpack_plain(data, SLOTS), ("sent", str(device), data))
        return cls(for_device(program, device), kinds)

    def check(self, params: list[Any]) -> None:
        """Raise ``WireError`` unless these can be the numbers of a run."""
        check_numbers(self.kinds, params)


def geometry_from(body: Any, program: Program) -> tuple[Spec | None, ...]:
    """The specs of the slots of ``program``. Raises ``WireError``."""
    parts = as_list(unpack_plain(body, SLOTS), 2, "a geometry")
    if len(parts) != 2:
        raise WireError("a geometry has two parts")
    unique = [spec_from(one) for one in as_list(parts[0], SLOTS, "specs")]
    indices = as_list(parts[1], SLOTS, "the specs of slots")
    if len(indices) != program.slot_count:
        raise WireError(f"a geometry has {len(indices)} slots, and its program {program.slot_count}")
    for index in indices:
        as_int(index, -1, len(unique) - 1, "the spec of a slot")
    specs = tuple([None if index < 0 else unique[index] for index in indices])
    if any(specs[slot] is None for slot in program.input_slots):
        raise WireError("a geometry says nothing of an input")
    return specs
