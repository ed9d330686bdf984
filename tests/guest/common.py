"""The list of uses, and what they share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["STATE", "USES", "Small", "data", "told", "use"]

STATE = sys.argv[1] if sys.argv[1:2] else "plain"
"""What of Marid the process has: ``plain``, ``imported``, or ``used`` for one tensor of the device."""

if STATE != "plain":
    import marid  # noqa: F401

    if STATE == "used":
        torch.ones(2, device="remote_accelerator").add(1).tolist()

USES: dict[str, Callable[[], Any]] = {}


def use(function: Callable[[], Any]) -> Callable[[], Any]:
    """List a use: a function whose result is compared."""
    assert function.__name__ not in USES
    USES[function.__name__] = function
    return function


def told(thing: Any) -> Any:
    """Something that can be compared, of tensors with their types and values."""
    if isinstance(thing, torch.Tensor):
        return [type(thing).__name__, str(thing.dtype), list(thing.shape), thing.detach().flatten().tolist()]
    if isinstance(thing, dict):
        return {str(name): told(value) for name, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *map(told, thing)]
    if isinstance(thing, (bool, int, float, str, type(None))):
        return thing
    return repr(thing)


class Small(nn.Module):
    """Two linear layers, of (N, 4) to (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def data(*shape: int) -> torch.Tensor:
    """Numbers 0, 0.1, 0.2, … of a shape."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 10
