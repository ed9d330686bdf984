"""Work that is disturbed in tests of recovery: what it computes is the same wherever and however often it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["decode", "same", "train"]


def train(device: str, steps: int, at: Callable[[int], None] = lambda step: None) -> list[torch.Tensor]:
    """Losses and final parameters of a small model with dropout and AdamW; ``at`` is told each step before its read."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(32, 4),
    ).to(device)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(3)
    losses = []
    for step in range(steps):
        x, y = torch.randn(8, 16, generator=data).to(device), torch.randn(8, 4, generator=data).to(device)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        at(step)
        losses.append(loss.detach().cpu())
    return [*losses, *[p.detach().cpu() for p in model.parameters()], *[b.cpu() for b in model.buffers()]]


def decode(device: str, tokens: int, at: Callable[[int], None] = lambda step: None) -> list[torch.Tensor]:
    """Greedy decoding with a cache that is written in place, and one that grows."""
    torch.manual_seed(0)
    embed, mix, head = torch.randn(50, 16).to(device), torch.randn(16, 16).to(device), torch.randn(16, 50).to(device)
    cache, grown = torch.zeros(tokens, 16, device=device), torch.zeros(0, 16, device=device)
    token, out = torch.tensor(1, device=device), []
    for step in range(tokens):
        x = embed[token] @ mix
        cache[step] = x
        grown = torch.cat([grown, x[None]])
        weights = torch.softmax(cache[: step + 1] @ x, 0)
        token = ((weights @ grown + x) @ head).argmax()
        at(step)
        out.append(token.cpu())
    return [*out, cache.cpu(), grown.cpu()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
