"""What runs programs: in this process, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from marid.graph.node import Draw, Node, Value
from marid.graph.prepared import Prepared

__all__ = ["Engine", "GiveBack"]

GiveBack = Callable[[list[Node]], None]


class Engine(Protocol):
    """Executes what a tape has recorded for one or more devices.

    A buffer (``Value.concrete``) is the engine's own: a recorder stores it and hands it back, and looks inside only
    through ``download``, after ``wait``.
    """

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

    def wait(self, values: Sequence[Value] | None = None) -> bool:
        """Wait until the memory of these values (of everything, for None) is as what was given to ``run`` leaves it;
        whether that took any waiting. Raises as ``run``."""
        ...

    def settle(self) -> None:
        """Take note of what has ended by now; waits for nothing. Raises as ``run``."""
        ...

    def replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> list[torch.Tensor]:
        """Run a prepared program on buffers; the buffers of its outputs, in order. Nothing may be pending that writes
        the inputs, or reads what the program writes. Raises ``MaterializationError`` when an operation fails; what
        ran before it has written what it writes.
        """
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer with the values, strides and dtype of a CPU tensor; a snapshot, never an alias."""
        ...

    def download(self, buffer: torch.Tensor) -> torch.Tensor:
        """A CPU tensor with the values and strides of ``buffer``; a snapshot, never an alias."""
        ...

    def compiling(self) -> int:
        """How many parts of programs are being compiled in the background."""
        ...

    def trim(self) -> None:
        """Give back memory that is only kept to be used again."""
        ...

    def generator(self, draw: Draw) -> torch.Generator:
        """A CPU generator positioned at ``draw``."""
        ...
