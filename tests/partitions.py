"""What a function records, as the parts that would be compiled of it, and what passes make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from marid.execute.compiled import tier
from marid.execute.compiled.compile_request import CompileRequest, request_for
from marid.execute.compiled.partition import Partition, choose
from marid.execute.compiled.passes.rewriter import Rewriter
from marid.execute.executable import Executable
from marid.execute.specialisation import Frame
from marid.execute.store import ProgramStore
from marid.graph.program import Program, Task

__all__ = ["Bound", "bound", "change", "compute", "names_of", "operators", "parts_of"]


class Bound(NamedTuple):
    """A program with specs, parameters and shared inputs of a run, and the run itself on copies of its inputs."""

    program: Program
    specs: tuple[Any, ...]
    params: list[Any]
    shared: dict[int, int]
    frame: Frame

    def parts(self) -> list[Partition]:
        return choose(self.program, self.specs, self.params, set(), self.shared)

    def inputs_of(self, part: Partition) -> list[torch.Tensor]:
        """What the part is given in this run; request_for once."""
        Executable(self.program, 0).steps(self.frame, 0, part.start, frozenset(part.inputs))
        return [self.frame.tensors[slot] for slot in part.inputs]

    def outputs_of(self, part: Partition) -> list[torch.Tensor]:
        """What it makes; request_for once, after that."""
        Executable(self.program, 0).steps(self.frame, part.start, part.stop, frozenset(part.outputs))
        return [self.frame.tensors[slot] for slot in part.outputs]


def bound(function: Callable[[], Any]) -> list[Bound]:
    """What ``function`` runs."""
    found: list[Bound] = []
    original = ProgramStore.find

    def find(self: ProgramStore, task: Task) -> Any:
        program = original(self, task)
        params = list(task.params)
        frame = Frame.of(task, params, lambda _: torch.Generator())
        frame.tensors = {slot: tensor.clone() for slot, tensor in frame.tensors.items()}
        found.append(Bound(program.program, task.specs, params, tier._shared(task), frame))
        return program

    ProgramStore.find = find
    try:
        function()
    finally:
        ProgramStore.find = original
    return found


def parts_of(function: Callable[[], Any]) -> list[tuple[Program, Partition]]:
    """Every part of what ``function`` runs, with its program."""
    return [(one.program, part) for one in bound(function) for part in one.parts()]


def change(one: Bound, part: Partition) -> CompileRequest:
    """What would be compiled of a part for the sizes of this run."""
    found = request_for(part, one.program, [(one.specs, one.params)], set())
    assert found is not None
    return found


def compute(asks: CompileRequest, one: Bound, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What would be compiled, operation by operation."""
    numbers = [number.value(one.params) for number in asks.part.numbers]
    graph = Rewriter(asks.code, numbers, set()).graph
    bases = [shape["base"] for shape in asks.code["inputs"]]
    assert all(base < 0 for base in bases), "inputs are copies here, and share no memory"
    with torch.no_grad():
        return list(torch.fx.GraphModule(torch.nn.Module(), graph)(*inputs, *numbers))


def names_of(program: Program, part: Partition) -> list[str]:
    """The operators of a part, as recorded."""
    return [i.op.name.partition("::")[2] for i in program.instructions[part.start : part.stop]]


def operators(description: dict[str, Any]) -> list[str]:
    """The operators of a part, from its description."""
    return [instruction["op"] for instruction in description["instructions"]]
