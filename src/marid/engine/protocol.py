"""What runs programs: in this process, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from marid.graph.node import Node, Operation, Spec, Value
from marid.graph.prepared import Prepared

Buffer = Any
"""What an engine keeps of a tensor (``Value.concrete``). Only the engine looks inside."""

GiveBack = Callable[[list[Node]], None]

Need = Literal["run", "value", "buffer"]
"""Why values are waited for: to have run, to be read by the host next, or to be handed back to the engine next."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A tensor that an operator returned.

    ``same_as`` is the tensor argument that it is, ``base`` the first one whose memory it lies in, both as indices.
    Where its ``layout`` is one that the device does not support (else None), there is no buffer.
    """

    buffer: Buffer
    geometry: Spec | None
    layout: str | None = None
    same_as: int | None = None
    base: int | None = None


def other_layout(tensor: torch.Tensor) -> str | None:
    """The layout of a tensor that is not a dense one, by name; None for a dense one, which the device has."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return None if tensor.layout is torch.strided else str(tensor.layout)


@dataclass(frozen=True, slots=True)
class Called:
    """What an operator did: what it ``returned``, with ``Returned`` in place of tensors; the ``geometries`` that its
    tensor arguments have now; and where the generator stands that it drew from."""

    returned: Any
    geometries: list[Spec]
    state: torch.Tensor | None


class Engine(Protocol):
    """Executes what a tape has recorded for one or more devices.

    A recorder stores buffers and hands them back; it looks inside only through ``read``, after ``wait``.
    """

    name: str
    """How the device is called."""
    runs_ahead: bool
    """Whether it gains from work that is handed over early, chunk by chunk."""
    elsewhere: bool
    """Whether what it runs leaves the processors of this process alone."""
    local: bool
    """Whether it runs on this machine, so that no message is needed to read a value."""
    spilled: int
    """Bytes of values that wait outside of the memory that ``settings.memory_limit`` is about."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while anything is run: inside, no other thread does."""
        ...

    def run(self, nodes: list[Node], give_back: GiveBack, ahead: bool = False, room: int | None = None) -> int:
        """Run pending nodes, given in program order and closed under the hazard rule (``Tape.cut``), after all that was
        given before; with ``ahead`` soon, else now.

        The list must be the only one that holds them: what nobody else refers to is dropped during the run. Returns
        how many bytes the run needs at its peak beyond what was resident before; an estimate. Afterwards each counts as
        run, and every value of theirs that outlives the run has a buffer, be it still in the making.

        Raises ``MaterializationError`` when an operation has failed, of these or of those given before: what ran before
        it keeps its results, it has failed (``graph.node.fail``), and what follows is pending, again if it counted as
        run, of which ``give_back`` is told. Raises ``MemoryLimitError``, and runs nothing, when the results would take
        more than ``room`` bytes at once.
        """
        ...

    def wait(self, values: Sequence[Value] | None = None, need: Need = "run") -> bool:
        """Wait until the memory of these values (of everything, for None) is as what was given to ``run`` leaves it;
        whether that took any waiting. Raises as ``run``. What is needed as a buffer may still be in the making."""
        ...

    def has(self, value: Value) -> bool:
        """Whether the value of something that counts as run can be read without any wait; waits for nothing itself."""
        ...

    def settle(self) -> None:
        """Take note of what has ended by now; waits for nothing. Raises as ``run``."""
        ...

    def replay(self, prepared: Prepared, inputs: list[Buffer], params: list[Any]) -> list[Buffer]:
        """Run a prepared program on buffers; the buffers of its outputs, in order. Nothing may be pending that writes
        the inputs, or reads what the program writes. Raises ``MaterializationError`` when an operation fails, or lets
        reading what comes out raise it; what ran before it has written what it writes. Raises ``GuardFailed`` where a
        guard is among its instructions, which engines have that are ``local`` and not ``elsewhere``.
        """
        ...

    def call(
        self, op: Operation, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], state: torch.Tensor | None
    ) -> Called:
        """Run one operator now, after all that was given to ``run``; arguments as in a node. ``state`` is where the CPU
        generator stands that it draws from, if it does. Raises what the operator raises, and as ``run`` for what came
        before it."""
        ...

    def upload(self, tensor: torch.Tensor) -> Buffer:
        """A buffer with the values, strides and dtype of a CPU tensor; a snapshot, never an alias."""
        ...

    def adopt(self, tensor: torch.Tensor) -> Buffer:
        """The same, of a CPU tensor that nobody else has, or will write: it need not be copied."""
        ...

    def take(self, source: Engine, buffer: Buffer) -> Buffer | None:
        """A buffer with the value that ``buffer`` of another engine has now, from which it comes without the host; None
        where that cannot be. The elements lie as in ``buffer``, from the beginning of new memory. Raises as ``run``,
        for either engine."""
        ...

    def load(self, tensor: torch.Tensor, path: str, offset: int) -> Buffer:
        """The same as ``upload``, of a contiguous CPU tensor whose bytes are in a file, from ``offset`` on. The file
        stays as it is."""
        ...

    def read(self, buffer: Buffer, whole: bool = False) -> torch.Tensor:
        """A CPU tensor with the values and strides of ``buffer``, to be read at once and not to be kept or written: it
        may be the buffer itself. With ``whole`` its storage has all of the memory that the buffer lies in, and buffers
        that share memory give tensors that share a storage, as long as the first of these lives."""
        ...

    def download(self, buffer: Buffer) -> torch.Tensor:
        """The same as a snapshot, never an alias."""
        ...

    def memory(self, buffer: Buffer) -> tuple[int, int] | None:
        """An identity for the block of memory that a buffer lies in, and its bytes; None while it is in the making. The
        identity is negative, and there are no bytes, where the memory is ``spilled``."""
        ...

    def resize(self, buffer: Buffer, nbytes: int) -> None:
        """Give the block of memory that a buffer lies in another size in bytes; nothing may be pending. What it has
        more than before is uninitialised. An engine may keep what it need not give back. Raises ``RuntimeError`` where
        the block cannot grow."""
        ...

    def compiling(self) -> int:
        """How many parts of programs are being compiled in the background."""
        ...

    def mark(self, buffer: Buffer, role: str) -> None:
        """Take a hint what the memory of a buffer is for."""
        ...

    def worker_stats(self) -> dict[str, Any] | None:
        """What a worker says of itself; None where there is none."""
        ...

    def trim(self) -> None:
        """Give back memory that is only kept to be used again."""
        ...

    def forget(self) -> None:
        """Forget all programs, with what was planned and compiled of them, and ``trim``; after all that was given to
        ``run``. What comes again is built again."""
        ...
