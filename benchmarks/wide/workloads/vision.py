"""Convolutions: a U-Net, a small ResNet, and a VAE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


class _Residual(nn.Module):
    """Two convolutions with group norms; the time step is added between them."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv_1, self.conv_2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(width, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(y)))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.parts, self.output = (
            nn.GroupNorm(8, width),
            nn.Conv1d(width, 3 * width, 1),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(self.norm(x).flatten(2)).chunk(3, dim=1)
        weights = torch.softmax(query.transpose(1, 2) @ key / math.sqrt(query.shape[1]), dim=-1)
        return x + self.output(value @ weights.transpose(1, 2)).view_as(x)


class _UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down_1, self.down_2 = _Residual(width, width, 2 * width), _Residual(width, 2 * width, 2 * width)
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle, self.attention = _Residual(2 * width, 2 * width, 2 * width), _Attention(2 * width)
        self.up_1, self.up_2 = _Residual(4 * width, width, 2 * width), _Residual(2 * width, width, 2 * width)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = time[:, None].float() * rates
        embedded = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        high = self.down_1(self.first(x), embedded)
        low = self.down_2(self.shrink(high), embedded)
        y = self.attention(self.middle(low, embedded))
        y = self.up_1(torch.cat([y, low], dim=1), embedded)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        y = self.up_2(torch.cat([y, high], dim=1), embedded)
        return self.last(F.silu(self.norm(y)))


def diffusion(device: str) -> Program:
    """Two steps that take noise away, the image read after them; each turn starts with the same noise."""
    model = _UNet().eval().to(device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), dim=0).to(device)
    noise = torch.randn(2, 3, 16, 16).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        x = noise
        for step in (80, 40):
            guess = model(x, torch.full((2,), step, device=device))
            before, after = kept[step], kept[step - 40]
            clean = ((x - (1 - before).sqrt() * guess) / before.sqrt()).clamp(-1, 1)
            x = after.sqrt() * clean + (1 - after).sqrt() * guess
        return [x]

    return Program(turn)


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.logarithm = nn.Linear(32 * 49, 16), nn.Linear(32 * 49, 16)
        self.decoder = nn.Sequential(
            nn.Linear(16, 32 * 49),
            nn.ReLU(),
            nn.Unflatten(1, (32, 7, 7)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.encoder(x)
        mean, logarithm = self.mean(y), self.logarithm(y)
        code = mean + torch.exp(0.5 * logarithm) * torch.randn_like(mean)
        return self.decoder(code), mean, logarithm


def vae(device: str) -> Program:
    model = _Vae().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = torch.rand(16, 1, 28, 28).to(device)

    def turn() -> Sequence[Output]:
        guess, mean, logarithm = model(images)
        loss = F.binary_cross_entropy_with_logits(guess, images, reduction="sum")
        loss = loss - 0.5 * (1 + logarithm - mean.pow(2) - logarithm.exp()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item() / len(images)]

    return Program(turn, lambda: list(model.parameters()))


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        return F.relu(y + self.skip(x))


def resnet(device: str) -> Program:
    blocks = [_ResidualBlock(16, 16, 1), _ResidualBlock(16, 32, 2), _ResidualBlock(32, 64, 2)]
    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images, labels = torch.randn(8, 3, 32, 32).to(device), torch.randint(10, (8,)).to(device)

    def turn() -> Sequence[Output]:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: list(model.parameters()))


WORKLOADS = (
    Workload("unet", "two denoising steps of a small U-Net", diffusion),
    Workload("vae", "VAE with convolutions, trained with Adam", vae, TRAINING),
    Workload("resnet", "small ResNet with batch norms, trained with SGD", resnet, TRAINING),
)
