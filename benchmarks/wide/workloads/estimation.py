"""Estimating: filters, chains of samples, factors, a line through points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def kalman_filter(device: str) -> Program:
    step = (torch.eye(4) + 0.1 * torch.diag(torch.ones(3), 1)).to(device)
    seen, drift, error = torch.eye(2, 4).to(device), (torch.eye(4) * 0.01).to(device), (torch.eye(2) * 0.1).to(device)
    measured = torch.randn(40, 2).to(device)

    def turn() -> Sequence[Output]:
        x, spread = torch.zeros(4, device=device), torch.eye(4, device=device)
        states: list[Tensor] = []
        for z in measured:
            x, spread = step @ x, step @ spread @ step.T + drift
            gain = spread @ seen.T @ torch.linalg.inv(seen @ spread @ seen.T + error)
            x = x + gain @ (z - seen @ x)
            spread = (torch.eye(4, device=device) - gain @ seen) @ spread
            states.append(x)
        return [torch.stack(states)]

    return Program(turn)


def metropolis(device: str) -> Program:
    """60 proposals, each of which is taken or not by a number that is read."""
    centre = torch.tensor([1.0, -1.0, 0.5]).to(device)

    def density(x: Tensor) -> Tensor:
        return -0.5 * (x - centre).square().sum() - 0.1 * torch.cos(3 * x).sum()

    def turn() -> Sequence[Output]:
        x, total, taken = torch.zeros(3, device=device), torch.zeros(3, device=device), 0
        at = density(x)
        for _ in range(60):
            y = x + 0.5 * torch.randn(3, device=device)
            proposed = density(y)
            if torch.rand((), device=device).log() < proposed - at:
                x, at, taken = y, proposed, taken + 1
            total += x
        return [total / 60, float(taken)]

    return Program(turn)


def matrix_factors(device: str) -> Program:
    """Ten batches of ratings; users, items, and a bias of each, with SGD."""
    users, items, of_user, of_item = (
        nn.Embedding(count, width).to(device) for count, width in ((200, 16), (300, 16), (200, 1), (300, 1))
    )
    parameters = [module.weight for module in (users, items, of_user, of_item)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    who, what = torch.randint(0, 200, (10, 256)).to(device), torch.randint(0, 300, (10, 256)).to(device)
    ratings = torch.rand(10, 256).to(device)

    def turn() -> Sequence[Output]:
        total = 0.0
        for user, item, rating in zip(who, what, ratings, strict=True):
            score = (users(user) * items(item)).sum(dim=-1) + of_user(user).squeeze(-1) + of_item(item).squeeze(-1)
            loss = F.mse_loss(torch.sigmoid(score), rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return [total]

    return Program(turn, lambda: parameters)


def linear_regression(device: str) -> Program:
    """20 steps of gradient descent, as in a first tutorial; the loss is read at the end."""
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y, measure = torch.randn(200, 3).to(device), torch.randn(200, 1).to(device), nn.MSELoss()

    def turn() -> Sequence[Output]:
        loss = torch.zeros(())
        for _ in range(20):
            loss = measure(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: list(model.parameters()))


WORKLOADS = (
    Workload("kalman", "Kalman filter, 40 measurements of 2 numbers", kalman_filter),
    Workload("metropolis", "60 proposals of 3 numbers, each taken or not by a read", metropolis),
    Workload(
        "matrix-factors", "factors of a matrix of ratings, ten batches, loss read at each", matrix_factors, TRAINING
    ),
    Workload("linear-regression", "one linear layer, 20 steps of SGD", linear_regression, TRAINING),
)
