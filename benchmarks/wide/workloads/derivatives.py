"""Second derivatives, gradients of single samples, and an optimizer that searches along lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def _mlp(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for index in range(0, len(weights), 2):
        x = F.linear(x, weights[index], weights[index + 1])
        if index + 2 < len(weights):
            x = torch.tanh(x)
    return x


def _mlp_weights(widths: Sequence[int], device: str) -> list[Tensor]:
    weights = []
    for inputs, outputs in pairwise(widths):
        weights.append(torch.randn(outputs, inputs).mul(inputs**-0.5).to(device).requires_grad_())
        weights.append(torch.zeros(outputs).to(device).requires_grad_())
    return weights


def meta_learning(device: str) -> Program:
    """Four tasks, each with one step of its own inside; the outer gradient goes through these steps."""
    weights = _mlp_weights((1, 40, 40, 1), device)
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    x, y = torch.rand(4, 2, 10, 1).to(device), torch.rand(4, 2, 10, 1).to(device)

    def turn() -> Sequence[Output]:
        losses = []
        for task in range(4):
            inner = F.mse_loss(_mlp(x[task, 0], weights), y[task, 0])
            gradients = torch.autograd.grad(inner, weights, create_graph=True)
            adapted = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
            losses.append(F.mse_loss(_mlp(x[task, 1], adapted), y[task, 1]))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: weights)


def per_sample_gradients(device: str) -> Program:
    """Every sample's gradient is clipped by its own norm before they are averaged, as private training does it."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x, y = torch.randn(64, 32).to(device), torch.randint(10, (64,)).to(device)

    def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    gradients_of_all = vmap(grad(loss_of_one), in_dims=(None, 0, 0))

    def turn() -> Sequence[Output]:
        gradients = gradients_of_all(weights, x, y)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            clipped = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
            weights[name] = weights[name] - 0.05 * clipped.mean(dim=0)
        return [norms.mean().item()]

    return Program(turn, lambda: list(weights.values()))


def hessian_vector_products(device: str) -> Program:
    """The largest eigenvalue of a Hessian: eight products with it, each a backward of a backward."""
    weights = _mlp_weights((16, 32, 32, 1), device)
    x, y = torch.randn(64, 16).to(device), torch.randn(64, 1).to(device)
    start = [torch.randn(weight.shape).to(device) for weight in weights]

    def turn() -> Sequence[Output]:
        loss = F.mse_loss(_mlp(x, weights), y)
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        vector = start
        eigenvalue = torch.zeros((), device=device)
        for _ in range(8):
            norm = torch.sqrt(torch.stack([(part * part).sum() for part in vector]).sum())
            vector = [part / norm for part in vector]
            product = torch.autograd.grad(gradients, weights, grad_outputs=vector, retain_graph=True)
            eigenvalue = torch.stack([(a * b).sum() for a, b in zip(vector, product, strict=True)]).sum()
            vector = list(product)
        return [eigenvalue.item()]

    return Program(turn)


def lbfgs(device: str) -> Program:
    """Rosenbrock's valley in 20 dimensions, from the start at every turn; the optimizer reads at nearly every step."""
    start = torch.linspace(-1.2, 1.0, 20).to(device)

    def turn() -> Sequence[Output]:
        point = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([point], max_iter=15, history_size=10, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            rises = 100 * (point[1:] - point[:-1] ** 2) ** 2 + (1 - point[:-1]) ** 2
            loss = rises.sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return [closure().item(), *point.tolist()]

    return Program(turn)


WORKLOADS = (
    Workload(
        "maml", "meta-learning: 4 tasks, gradients through one inner step (double backward)", meta_learning, TRAINING
    ),
    Workload("per-sample", "gradients of 64 samples by vmap of grad, each clipped", per_sample_gradients, TRAINING),
    Workload("hessian-vector", "8 Hessian-vector products of an MLP", hessian_vector_products),
    Workload("lbfgs", "L-BFGS with line search on 20 numbers, 15 iterations", lbfgs),
)
