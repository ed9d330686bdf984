"""What is known about a run that did not come to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Interrupted"]


@dataclass
class Interrupted(Exception):
    """Instruction ``index`` raised ``error``; ``finished`` says whether its effect has happened all the same.

    ``tensors`` maps slots to the tensors that exist: every input, and every result still needed. ``lost`` are slots
    that should exist and could not be computed again (out of memory), with the errors.
    """

    index: int
    finished: bool
    tensors: dict[int, torch.Tensor]
    error: BaseException
    lost: dict[int, BaseException] = field(default_factory=dict)
