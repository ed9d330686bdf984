"""Tables: preparing columns, and a small network on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def tabular_mlp(device: str) -> Program:
    """An epoch of 16 batches from a ``DataLoader``; the loss is read once, at its end."""
    layers = [nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.randn(512, 20), torch.randn(512, 1))
    loader = DataLoader(rows, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))

    def turn() -> Sequence[Output]:
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return [total.item() / len(loader)]

    return Program(turn, lambda: list(model.parameters()))


def data_preparation(device: str) -> Program:
    """Outliers cut at quantiles, gaps filled, rows dropped by masks, categories counted and encoded, means by group."""
    count = 20_000
    columns = torch.randn(count, 6)
    columns[torch.rand(count, 6) < 0.05] = float("nan")
    table = columns.to(device)
    groups = torch.randint(0, 4000, (count,)).square().remainder(97).to(device)
    prices = torch.rand(count).mul(100).to(device)

    def turn() -> Sequence[Output]:
        filled = torch.where(table.isnan(), table.nanmean(dim=0), table)
        low, high = torch.quantile(filled, torch.tensor([0.01, 0.99], device=device), dim=0).unbind(0)
        clipped = filled.clamp(low, high)
        scaled = (clipped - clipped.mean(dim=0)) / clipped.std(dim=0)
        keep = (prices > 5) & (scaled.abs().amax(dim=1) < 2.5)
        rows, kept_groups, kept_prices = scaled[keep], groups[keep], prices[keep]
        names, codes, counts = torch.unique(kept_groups, return_inverse=True, return_counts=True)
        sums = torch.zeros(len(names), device=device).index_add(0, codes, kept_prices)
        means = sums / counts
        common = codes[counts[codes] > 50]
        encoded = F.one_hot(common % 8, 8).float().mean(dim=0)
        best = torch.topk(kept_prices - means[codes], 10).indices
        return [rows.mean(dim=0), means, encoded, best, len(rows)]

    return Program(turn)


WORKLOADS = (
    Workload("tabular", "MLP on a table, 16 batches of a DataLoader, loss read once an epoch", tabular_mlp, TRAINING),
    Workload("data-preparation", "masks, quantile, unique, means by group on 20,000 rows", data_preparation),
)
