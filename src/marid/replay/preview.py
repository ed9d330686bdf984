"""Values of recorded work, computed while it stays pending."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from marid.errors import MaterializationError
from marid.execute.executable import Executable
from marid.execute.interrupted import Interrupted
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import pending_nodes, wait_anyway
from marid.graph.analysis import analysis_of
from marid.graph.dispatch_state import concretely
from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Node, Value, root_of
from marid.graph.prepared import Prepared, Replay
from marid.graph.program import Task, bind


def is_repeatable(node: Node) -> bool:
    """Whether an operation does nothing but what it writes and returns. Those of others may do anything."""
    return node.op is None or node.op.name.startswith(("aten::", "marid::"))


class Preview:
    """Runs what values need aside: each operation once, in the order in which it was recorded, on copies of the memory
    that is written. Nothing is noted as run. It holds what it has computed: drop it before anybody asks which results
    are still needed."""

    def __init__(self) -> None:
        self._done: set[Node] = set()
        self._made: dict[Value, torch.Tensor] = {}
        self._real: dict[int, torch.UntypedStorage] = {}  # memory of values that have run, by address of the storage
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._programs: dict[tuple[Any, ...], Executable] = {}
        self._twisters = MersenneTwisters()

    def number(self, tensor: Any) -> bool | int | float | None:
        """The number in a tensor of the device that has one element. None where it has to be read to be known: what it
        needs fails, does not run in this process, or has operators that are not PyTorch's."""
        spec = tensor._value.spec
        engine = engine_of(spec.device)
        if not engine.local or engine.elsewhere or spec.dtype not in _DTYPES:
            return None
        wait_anyway()
        try:
            with engine.lock, concretely(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run that counts will warn
                asked = pending_nodes(tensor)
                nodes = handles.tape(spec.device).cut(asked) if asked else []
                nodes = [node for node in nodes if node not in self._done]
                if not all(map(is_repeatable, nodes)):
                    return None
                if nodes:
                    self._run(bind(nodes))
                return self._tensor(tensor._value).item()
        except (MaterializationError, Interrupted, _Unable):
            return None

    def _run(self, task: Task) -> None:
        executable = self._programs.get(task.key)
        if executable is None:
            executable = self._programs[task.key] = Executable(task.build(), 0)
        program = executable.program
        values = list(task.slots)
        given = [values[slot] for slot in task.input_slots]
        written = {root_of(values[slot]) for slots in analysis_of(program).writes for slot in slots}
        for value in given:
            if root_of(value) in written:
                self._copy(self._tensor(value).untyped_storage())
        replay = Replay(Prepared(program, task.specs, task.nodes, 0), [*map(self._tensor, given)], task.params)
        results = executable.specialised(replay).run(replay, self._twisters.at)
        self._made.update(zip(task.outputs, results, strict=True))
        self._done.update(task.nodes)

    def _tensor(self, value: Value) -> torch.Tensor:
        """The tensor of a value that is there, or was computed here."""
        tensor = self._made.get(value)
        if tensor is None:
            tensor = value.concrete
            if not isinstance(tensor, torch.Tensor):
                raise _Unable
            storage = tensor.untyped_storage()
            self._real[storage._cdata] = storage
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            raise _Unable
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        made.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportArgumentType]
        return made

    def _copy(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._real:
            self._copies[storage._cdata] = storage.clone()


class _Unable(Exception):
    """A value is nowhere that it could be taken from."""


_DTYPES = {
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
