"""What is known about a run that did not come to its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Interrupted(Exception):
    """Instruction ``index`` raised ``error``; ``finished`` says whether its effect has happened all the same.

    What ran are the instructions before it, or those in ``ran`` where some were put off. ``tensors`` maps slots to the
    tensors that exist: every input, and every result still needed.
    """

    index: int
    finished: bool
    tensors: dict[int, torch.Tensor]
    error: BaseException
    ran: frozenset[int] | None = None
