"""Numerical work without a network: linear algebra that stops when it is done, simulations, clustering."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.suite.workloads import Tolerance
from benchmarks.wide.workloads.base import Output, Program, Workload

__all__ = ["WORKLOADS"]


def power_iteration(device: str) -> Program:
    """Each turn asks four matrices for their largest eigenvalue; a test is read after every product."""
    parts = [torch.randn(300, 300) for _ in range(4)]
    matrices = [(part @ part.T / 300 + 2 * torch.outer(part[0], part[0]) / 300).to(device) for part in parts]

    def largest(matrix: Tensor) -> Tensor:
        vector = torch.ones(matrix.shape[0], device=device)
        value = torch.zeros((), device=device)
        for _ in range(50):
            product = matrix @ vector
            new = torch.linalg.vector_norm(product)
            vector = product / new
            if (new - value).abs() < 1e-4 * new:
                break
            value = new
        return value

    def turn() -> Sequence[Output]:
        return [largest(matrix).item() for matrix in matrices]

    return Program(turn)


def conjugate_gradients(device: str) -> Program:
    """A system of 400 equations; the residual is read in every iteration."""
    part = torch.randn(400, 400)
    matrix = (part @ part.T / 400 + 0.02 * torch.eye(400)).to(device)
    right = torch.randn(400).to(device)

    def turn() -> Sequence[Output]:
        x = torch.zeros_like(right)
        residual = right - matrix @ x
        direction, size = residual, residual @ residual
        for iteration in range(200):
            product = matrix @ direction
            step = size / (direction @ product)
            x = x + step * direction
            residual = residual - step * product
            new = residual @ residual
            if new.sqrt().item() < 1e-3:
                return [x, iteration]
            direction, size = residual + new / size * direction, new
        return [x, -1]

    return Program(turn)


def n_body(device: str) -> Program:
    """Ten leapfrog steps of 200 bodies, the energy read at the end."""
    start, masses = torch.randn(200, 3).to(device), torch.rand(200).to(device)

    def pull(places: Tensor) -> Tensor:
        apart = places[None, :, :] - places[:, None, :]
        near = (apart.square().sum(-1) + 0.1) ** -1.5
        return (apart * (near * masses)[:, :, None]).sum(1)

    def turn() -> Sequence[Output]:
        places, speeds = start, torch.zeros_like(start)
        force = pull(places)
        for _ in range(10):
            speeds = speeds + 0.0005 * force
            places = places + 0.001 * speeds
            force = pull(places)
            speeds = speeds + 0.0005 * force
        return [(0.5 * masses * speeds.square().sum(-1)).sum().item(), places]

    return Program(turn)


def black_scholes(device: str) -> Program:
    count = 200_000
    price, strike = (50 + 100 * torch.rand(count)).to(device), (50 + 100 * torch.rand(count)).to(device)
    years, spread = (0.1 + 2 * torch.rand(count)).to(device), (0.1 + 0.4 * torch.rand(count)).to(device)
    rate = 0.03

    def normal(x: Tensor) -> Tensor:
        return 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def turn() -> Sequence[Output]:
        root = spread * years.sqrt()
        first = (torch.log(price / strike) + (rate + 0.5 * spread**2) * years) / root
        second = first - root
        discounted = strike * torch.exp(-rate * years)
        call = price * normal(first) - discounted * normal(second)
        put = discounted * normal(-second) - price * normal(-first)
        return [call.mean().item(), put.mean().item()]

    return Program(turn)


def stencil(device: str) -> Program:
    """Thirty steps of heat on a grid of 256 by 256, by slices; the change is read every ten."""
    start = torch.rand(256, 256).to(device)

    def turn() -> Sequence[Output]:
        heat, changes = start.clone(), []
        for step in range(30):
            inner = heat[1:-1, 1:-1]
            around = heat[:-2, 1:-1] + heat[2:, 1:-1] + heat[1:-1, :-2] + heat[1:-1, 2:]
            new = inner + 0.2 * (around - 4 * inner)
            if step % 10 == 9:
                changes.append((new - inner).abs().max().item())
            heat = heat.clone()
            heat[1:-1, 1:-1] = new
        return [*changes, heat]

    return Program(turn)


def k_means(device: str) -> Program:
    """2,000 points, 16 centres, until no centre moves or ten rounds have passed."""
    points = torch.randn(2000, 16).to(device)

    def turn() -> Sequence[Output]:
        centres = points[:16].clone()
        for _ in range(10):
            nearest = torch.cdist(points, centres).argmin(dim=1)
            sums = torch.zeros_like(centres).index_add_(0, nearest, points)
            counts = torch.bincount(nearest, minlength=16).clamp(min=1)
            new = sums / counts[:, None]
            moved = (new - centres).norm(dim=1).max()
            centres = new
            if moved.item() < 1e-4:
                break
        return [centres]

    return Program(turn)


WORKLOADS = (
    Workload("power-iteration", "largest eigenvalue of 4 matrices, a stopping test read each time", power_iteration),
    Workload(
        "conjugate-gradients",
        "400 equations, a stopping test read each time",
        conjugate_gradients,
        Tolerance(1e-3, 1e-3),
    ),
    Workload("n-body", "10 steps of 200 bodies", n_body),
    Workload("black-scholes", "200,000 options", black_scholes),
    Workload("stencil", "30 steps of heat on a grid, by slices, three reads", stencil),
    Workload("k-means", "2,000 points, 16 centres, a stopping test read each time", k_means, Tolerance(1e-3, 1e-3)),
)
