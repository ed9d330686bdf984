"""Train a small diffusion model on pictures of discs, and let it draw some: a U-Net that is told the noise level.

    python examples/diffusion.py --steps 200

The method is that of "Denoising Diffusion Probabilistic Models", with 16 x 16 pictures.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 16
LEVELS = 40


class Block(nn.Module):
    """Two convolutions around a residual connection, and the noise level in between."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.level = nn.Embedding(LEVELS, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        inner = F.silu(self.norm(self.first(x))) + self.level(level)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(inner))


class UNet(nn.Module):
    """Down to a quarter of the pixels, and up again; it predicts the noise in a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside, self.down = Block(1, width), Block(width, 2 * width)
        self.up, self.out = Block(3 * width, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        fine = self.inside(x, level)
        coarse = self.down(F.avg_pool2d(fine, 2), level)
        both = torch.cat((fine, F.interpolate(coarse, scale_factor=2.0)), dim=1)
        return self.out(self.up(both, level))


def discs(count: int) -> Tensor:
    """White discs on black, of random places and sizes, from -1 to 1."""
    line = torch.linspace(-1, 1, SIZE)
    x, y = torch.rand(2, count, 1, 1) - 0.5
    radius = 0.3 + 0.3 * torch.rand(count, 1, 1)
    distance = torch.hypot(line.view(1, 1, -1) - x, line.view(1, -1, 1) - y)
    return (torch.sigmoid(20 * (radius - distance)) * 2 - 1).unsqueeze(1)


@torch.no_grad()
def draw(model: UNet, kept: Tensor, count: int) -> Tensor:
    """Pictures out of noise, step by step."""
    x = torch.randn(count, 1, SIZE, SIZE)
    for level in reversed(range(LEVELS)):
        noise = model(x, torch.full((count,), level))
        before = kept[level - 1] if level else torch.ones(())
        clean = ((x - (1 - kept[level]).sqrt() * noise) / kept[level].sqrt()).clamp(-1, 1)
        x = before.sqrt() * clean + (1 - before).sqrt() * torch.randn_like(x)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small diffusion model on pictures of discs.")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = UNet(options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    kept = torch.linspace(1e-3, 0.25, LEVELS).neg().log1p().cumsum(0).exp()  # of the picture, at each noise level
    for step in range(1, options.steps + 1):
        clean, level = discs(options.batch), torch.randint(LEVELS, (options.batch,))
        noise, share = torch.randn_like(clean), kept[level].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(share.sqrt() * clean + (1 - share).sqrt() * noise, level), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == options.steps:
            print(f"step {step}/{options.steps}  loss {loss.item():.6f}", flush=True)
    for row in torch.cat(draw(model, kept, 3).squeeze(1).unbind(0), dim=1).tolist():
        print("".join(" .:*#"[min(4, int(2.5 * (value + 1)))] for value in row))


if __name__ == "__main__":
    main()
