"""Models that learn to make data: adversaries, and denoising."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def gan(device: str) -> Program:
    """Three steps of each network; both losses are read at each step."""
    generator = nn.Sequential(
        *(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 32), nn.Tanh()),
    ).to(device)
    judge = nn.Sequential(
        *(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, 1),
    ).to(device)
    of_generator, of_judge = (
        torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (generator, judge)
    )
    real, measure = torch.randn(64, 32).to(device), nn.BCEWithLogitsLoss()

    def turn() -> Sequence[Output]:
        losses: list[float] = []
        for _ in range(3):
            fake = generator(torch.randn(64, 16, device=device))
            true, false = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
            judged = measure(judge(real), true) + measure(judge(fake.detach()), false)
            of_judge.zero_grad()
            judged.backward()
            of_judge.step()
            made = measure(judge(fake), true)
            of_generator.zero_grad()
            made.backward()
            of_generator.step()
            losses += [judged.item(), made.item()]
        return losses

    return Program(turn, lambda: [*generator.parameters(), *judge.parameters()])


def denoising_diffusion(device: str) -> Program:
    """A training step of a small denoiser, then ten steps of sampling."""
    model = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rates = torch.linspace(1e-4, 0.02, 100).to(device)
    kept = (1 - rates).cumprod(0)
    data = torch.randn(64, 16).to(device)

    def noise(x: Tensor, time: Tensor) -> Tensor:
        return model(torch.cat([x, time.view(-1, 1) / 100], dim=1))

    def turn() -> Sequence[Output]:
        time, drawn = torch.randint(0, 100, (64,), device=device), torch.randn_like(data)
        noisy = kept[time].sqrt()[:, None] * data + (1 - kept[time]).sqrt()[:, None] * drawn
        loss = F.mse_loss(noise(noisy, time), drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            x = torch.randn(8, 16, device=device)
            for at in reversed(range(0, 100, 10)):
                found = noise(x, torch.full((8,), at, device=device))
                x = (x - rates[at] / (1 - kept[at]).sqrt() * found) / (1 - rates[at]).sqrt()
                if at > 0:
                    x = x + rates[at].sqrt() * torch.randn_like(x)
        return [loss.item(), x]

    return Program(turn, lambda: list(model.parameters()))


WORKLOADS = (
    Workload("gan", "two small networks against each other, Adam, both losses read at each step", gan, TRAINING),
    Workload("ddpm", "a denoiser's training step and ten steps of sampling", denoising_diffusion, TRAINING),
)
