"""Fit a small network to a picture: it is given the place of a pixel, and says its colour.

    python examples/fit_image.py --steps 30

Every step is on the whole picture. What a layer returns is tens of megabytes, of which most time goes to moving them.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sine(nn.Module):
    """A linear layer and a sine, with the weights of "Implicit Neural Representations with Periodic Activations"."""

    def __init__(self, inputs: int, width: int, first: bool = False) -> None:
        super().__init__()
        self.frequency = 30.0
        self.linear = nn.Linear(inputs, width)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / self.frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def picture(size: int) -> tuple[Tensor, Tensor]:
    """Places and colours of the pixels of a square picture: rings, waves and a disc."""
    line = torch.linspace(-1, 1, size)
    places = torch.cartesian_prod(line, line)
    x, y = places.unbind(1)
    radius = torch.hypot(x, y)
    colours = torch.stack((torch.sin(20 * radius), torch.cos(9 * x * y), (radius < 0.7).float()), dim=1)
    return places, colours


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a small network to a picture.")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--size", type=int, default=400, help="pixels of a side")
    parser.add_argument("--width", type=int, default=64, help="numbers between two layers")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(1)
    places, colours = picture(options.size)
    hidden = (Sine(options.width, options.width) for _ in range(options.layers - 1))
    model = nn.Sequential(Sine(2, options.width, first=True), *hidden, nn.Linear(options.width, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step in range(1, options.steps + 1):
        loss = F.mse_loss(model(places), colours)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}/{options.steps}  loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
