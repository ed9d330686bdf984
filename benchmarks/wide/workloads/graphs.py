"""Networks on graphs: messages along edges, gathered and scattered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


class _AttentionLayer(nn.Module):
    """Each node takes the mean of its neighbours, weighted by a softmax over its edges.

    ``index_select`` and not ``x[index]``: the latter's backward adds in parallel, so that eager PyTorch itself rounds
    otherwise from run to run, and no bits could be compared.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.source, self.target = nn.Linear(outputs, 1, bias=False), nn.Linear(outputs, 1, bias=False)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.linear(x)
        scores = self.source(x).index_select(0, source) + self.target(x).index_select(0, target)
        scores = F.leaky_relu(scores, 0.2).squeeze(-1)
        largest = torch.full((x.shape[0],), float("-inf"), device=x.device)
        largest = largest.scatter_reduce(0, target, scores.detach(), "amax", include_self=True)
        weights = torch.exp(scores - largest.index_select(0, target))
        total = torch.zeros(x.shape[0], device=x.device).scatter_add(0, target, weights)
        weights = weights / (total.index_select(0, target) + 1e-9)
        return torch.zeros_like(x).index_add(0, target, x.index_select(0, source) * weights[:, None])


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _AttentionLayer(32, 64), _AttentionLayer(64, 7)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, source, target)), source, target)


def scatter_gnn(device: str) -> Program:
    nodes, edges = 1000, 5000
    model = _Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    x, labels = torch.randn(nodes, 32).to(device), torch.randint(7, (nodes,)).to(device)
    source, target = torch.randint(nodes, (2, edges)).to(device).unbind(0)

    def turn() -> Sequence[Output]:
        loss = F.cross_entropy(model(x, source, target), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: list(model.parameters()))


WORKLOADS = (Workload("gnn", "graph attention with gather, scatter and index_add, trained", scatter_gnn, TRAINING),)
