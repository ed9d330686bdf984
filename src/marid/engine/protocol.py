"""What runs programs: in this process, or elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from marid.graph.node import Draw, Node
from marid.graph.prepared import Prepared

__all__ = ["Engine"]


class Engine(Protocol):
    """Executes what a tape has recorded for one or more devices.

    A buffer (``Value.concrete``) is the engine's own: a recorder stores it and hands it back, and looks inside only
    through ``download``.
    """

    def run(self, nodes: list[Node], room: int | None = None) -> int:
        """Run pending nodes, given in program order and closed under the hazard rule (``Tape.cut``).

        The list must be the only one that holds them: what nobody else refers to is dropped during the run. Returns
        how many bytes the run needed at its peak beyond what was resident before; an estimate. Afterwards each has
        run and every value of theirs that outlives the run has its buffer. Raises ``MaterializationError`` when an
        operation fails: what ran before it keeps its results, it has failed (``graph.node.fail``), and what follows
        stays pending. Raises ``MemoryLimitError``, and runs nothing, when the results would take more than ``room``
        bytes at once.
        """
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

    def trim(self) -> None:
        """Give back memory that is only kept to be used again."""
        ...

    def generator(self, draw: Draw) -> torch.Generator:
        """A CPU generator positioned at ``draw``."""
        ...
