"""Random programs with views, writes and repeated work, and an operator that raises when it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

__all__ = ["Writer", "armed"]

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

armed: list[BaseException] = []


@torch.library.custom_op("marid_tests::bomb", mutates_args=())
def bomb(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``, unless it is to raise."""
    if armed:
        raise armed.pop()
    return x.clone()


@bomb.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Writer:
    """A random program, run eagerly or on the device with a bomb at one place."""

    def __init__(self, seed: int, device: str, bomb_at: int = -1) -> None:
        self.random = random.Random(seed)
        self.values: list[torch.Tensor] = [t.clone().to(device) for t in (X, X.t().contiguous().t(), X.abs() + 1)]
        self.device = device
        self.bomb_at = bomb_at
        self.bombs: list[torch.Tensor] = []

    def run(self, length: int) -> list[torch.Tensor]:
        """Every tensor of the program, or half of them, so that many are only intermediate."""
        for step in range(length):
            if step == self.bomb_at:
                self.bombs.append(torch.ops.marid_tests.bomb(self._any()))
            self._step()
        kept = [value for value in self.values if self.random.random() < 0.3]
        self.values = []
        return kept

    def _any(self) -> torch.Tensor:
        values = self.values
        return values[-1 - min(int(self.random.expovariate(0.4)), len(values) - 1)]

    def _step(self) -> None:
        x = self._any()
        same = [v for v in self.values if v.shape == x.shape]
        other = self.random.choice(same)
        steps: list[Callable[[], torch.Tensor]] = [
            lambda: x * 1,
            lambda: -x,
            lambda: x.neg().neg(),
            lambda: x - 0,
            lambda: x.clone(),
            lambda: x.t(),
            lambda: x.t().t(),
            lambda: x.reshape(-1).view(x.shape),
            lambda: x.unsqueeze(0).squeeze(0),
            lambda: x + other,
            lambda: x.relu(),
            lambda: x.tanh(),
            lambda: x + torch.full(x.shape[-1:], 0.5, device=self.device),
            lambda: x * torch.ones(x.shape[-1:], device=self.device),
            lambda: torch.addmm(torch.ones(4, device=self.device), x, x.t()[:, :4]).relu().mean() + x,
            lambda: x.t().contiguous().t(),
        ]
        choice = self.random.randrange(len(steps) + 4)
        if choice < len(steps):
            self.values.append(steps[choice]())
        elif choice == len(steps):
            x.mul_(0.5)
        elif choice == len(steps) + 1:
            x[0].add_(1)
        elif choice == len(steps) + 2:
            x.copy_(other)
        else:
            x.t()[1:].clamp_(-2, 2)
