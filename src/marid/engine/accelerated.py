"""The engine of a process whose device is an accelerator of its own machine (``MARID_ENGINE=cuda:0``).

Work is launched in the order in which it comes, on the calling thread, and only a read waits for it. What repeats is
captured (``execute/captured.py``). Programs are the CPU's, so results agree with it to rounding, and random numbers are
the same (``execute/device_operators.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from marid.engine.inprocess import InProcessEngine
from marid.engine.memory_limit import refuse_beyond
from marid.engine.protocol import Called, GiveBack, Need
from marid.errors import LazyTensorError
from marid.execute.accelerator import Accelerator, accelerator_of
from marid.execute.captured import CapturedProgram, CapturedPrograms
from marid.execute.device_operators import for_device, operator_on, takes_device
from marid.execute.specialisation import Runnable
from marid.graph.analysis import forecast
from marid.graph.dispatch_state import concretely
from marid.graph.node import Node, Operation, Spec, Value, span_of
from marid.graph.prepared import Prepared, Replay
from marid.graph.program import Program, Task
from marid.graph.python_operator import positions_in
from marid.recent import Recent

_SIZES = 256  # of the tensors of one program, those that came last


class AcceleratedEngine(InProcessEngine):
    """Runs programs on ``device``, which is made ready at the first use. Buffers are its tensors."""

    elsewhere = local = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(functools.partial(_OnDevice, self))
        self.name = f"in-process engine on {device}"
        self.device = device
        self.captured = CapturedPrograms()
        # Blocks of memory, by their address, and what the host has copied of them, until anything is written.
        self._on_host: dict[int, tuple[ref[torch.UntypedStorage], ref[torch.UntypedStorage]]] = {}
        os.register_at_fork(after_in_child=self._forked)

    @functools.cached_property
    def accelerator(self) -> Accelerator:
        """The device. Raises ``LazyTensorError`` where there is none, ``RuntimeError`` in a fork of its user."""
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise LazyTensorError(
                f"MARID_ENGINE={self.device} asks for a device that PyTorch {torch.__version__} does not see: it finds "
                f"{torch.cuda.device_count()} CUDA device(s). Leave the variable out to use the processor"
            )
        return accelerator_of(self.device)

    def run(self, nodes: list[Node], give_back: GiveBack, ahead: bool = False, room: int | None = None) -> int:
        with self.lock:
            self._begin(any(node.op is not None and node.op.mutates for node in nodes))
            return super().run(nodes, give_back, ahead, room)

    def replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> list[torch.Tensor]:
        with self.lock:
            self._begin(True)
            return super().replay(prepared, inputs, params)

    def wait(self, values: Sequence[Value] | None = None, need: Need = "run") -> bool:
        waited = super().wait(values, need)
        return ((need == "value" or values is None) and self.accelerator.wait()) or waited

    def has(self, value: Value) -> bool:
        return super().has(value) and self.accelerator.is_idle()

    def call(
        self, op: Operation, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], state: torch.Tensor | None
    ) -> Called:
        where = [("device", self.device)] if takes_device(op, self.device) else []
        with self.lock:
            self._begin(op.mutates)
            return super().call(operator_on(self.device, op, state is not None), args, [*kwargs, *where], state)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self.adopt(tensor)
        self.accelerator.wait_for_uploads()  # of pinned memory, a copy would see what is written from now on
        return buffer

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.lock, concretely():
            return _moved(tensor, self.accelerator.to_device)

    def read(self, buffer: torch.Tensor, whole: bool = False) -> torch.Tensor:
        with self.lock, concretely():
            return self._seen_on_host(buffer) if whole else _moved(buffer, _to_host)

    def download(self, buffer: torch.Tensor) -> torch.Tensor:
        return self.read(buffer)

    def trim(self) -> None:
        super().trim()
        self.accelerator.trim()

    def forget(self) -> None:
        super().forget()
        with self.lock, concretely():
            self.captured.clear()
        self.accelerator.trim()

    def _begin(self, writes: bool) -> None:
        """Something is about to run. Raises as ``accelerator``."""
        _ = self.accelerator
        if writes:
            self._on_host.clear()

    def _forked(self) -> None:
        """A child cannot use what its parent has begun to use: PyTorch says so where it is made ready again."""
        self.__dict__.pop("accelerator", None)

    def _best(self, program: _OnDevice, task: Task | Replay) -> CapturedProgram:
        return program.sized(task.specs)

    def _within(self, room: int, program: _OnDevice, task: Task) -> CapturedProgram:
        refuse_beyond(room, task, program.program)
        return program.sized(task.specs)

    def _launch(self, task: Task, runnable: Runnable, give_back: GiveBack) -> bool:  # noqa: ARG002
        return False  # launching from here is quick, and the device works meanwhile

    def _seen_on_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a copy of all the memory that it lies in."""
        block = buffer.untyped_storage()
        of, known = self._on_host.get(block.data_ptr(), (None, None))
        found = known() if of is not None and known is not None and of() is block else None
        if found is None:
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(block)
            found = _to_host(flat).untyped_storage()
            self._on_host[block.data_ptr()] = ref(block), ref(found)
        seen = torch.empty(0, dtype=buffer.dtype, device="cpu").set_(
            found, buffer.storage_offset(), buffer.shape, buffer.stride()
        )  # pyright: ignore[reportArgumentType]
        seen = torch.conj(seen) if buffer.is_conj() else seen
        return torch.ops.aten._neg_view.default(seen) if buffer.is_neg() else seen


class _OnDevice:
    """A program on the device of an engine."""

    def __init__(self, engine: AcceleratedEngine, program: Program, specs: tuple[Spec | None, ...]) -> None:  # noqa: ARG002
        self.program = for_device(program, engine.device)
        self.by_themselves = positions_in(one.op for one in program.instructions)
        self._engine = engine
        self._sized: Recent[tuple[Spec | None, ...], CapturedProgram] = Recent(_SIZES)

    def sized(self, specs: tuple[Spec | None, ...]) -> CapturedProgram:
        """It with tensors of these specs, by slot."""
        found = self._sized.used(specs)
        if found is None:
            expected, engine = forecast(self.program, specs).nbytes, self._engine
            found = CapturedProgram(self.program, expected, engine.accelerator, engine.captured)
            self._sized.put(specs, found)
        return found


def _moved(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What ``move`` makes of a tensor's memory, seen with the same shape and strides; ``move`` is given all of it side
    by side, or its elements alone where most of what lies between the first and the last is not the tensor's."""
    tensor = tensor.resolve_conj().resolve_neg()
    shape, stride = tensor.shape, tensor.stride()
    span = span_of(shape, stride)
    if span <= 2 * tensor.numel():
        return move(tensor.as_strided((span,), (1,))).as_strided(shape, stride, 0)
    elements = move(tensor.contiguous().flatten())
    block = torch.empty(span, dtype=tensor.dtype, device=elements.device).as_strided(shape, stride)
    return block.copy_(elements.view(shape))


def _to_host(elements: torch.Tensor) -> torch.Tensor:
    """They are there when this returns, in ordinary memory, as PyTorch's own copies are."""
    return torch.empty(elements.shape, dtype=elements.dtype, device="cpu").copy_(elements)
