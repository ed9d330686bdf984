"""Sequences, one element at a time: sampling, searching, and labelling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def sampled_characters(device: str) -> Program:
    """30 characters of an LSTM of two layers, each drawn and read."""
    embed, lstm, head = nn.Embedding(64, 32).to(device), nn.LSTM(32, 64, 2).to(device), nn.Linear(64, 64).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        token, state = torch.tensor([[1]], device=device), None
        tokens: list[float] = []
        for _ in range(30):
            output, state = lstm(embed(token), state)
            token = torch.multinomial(torch.softmax(head(output[-1]) / 0.8, dim=-1), 1)
            tokens.append(token.item())
        return tokens

    return Program(turn)


def beam_search(device: str) -> Program:
    """15 tokens of a GRU, four hypotheses; their ends are read at each token."""
    embed, cell, head = nn.Embedding(64, 32).to(device), nn.GRUCell(32, 64).to(device), nn.Linear(64, 64).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        hidden, scores = torch.zeros(1, 64, device=device), torch.zeros(1, device=device)
        token, found = torch.tensor([0], device=device), [[0]]
        for _ in range(15):
            hidden = cell(embed(token), hidden)
            total = torch.log_softmax(head(hidden), dim=-1) + scores[:, None]
            scores, best = total.flatten().topk(4)
            source, token = best // 64, best % 64
            found = [found[at] + [end] for at, end in zip(source.tolist(), token.tolist(), strict=True)]
            hidden = hidden[source]
        return [*map(float, found[0]), scores]

    return Program(turn)


def random_field(device: str) -> Program:
    """Training step of a linear-chain conditional random field: the forward algorithm in a loop."""
    between = nn.Parameter(torch.randn(7, 7).to(device))
    head = nn.Linear(16, 7).to(device)
    optimizer = torch.optim.SGD([between, *head.parameters()], lr=0.01)
    inputs, labels = torch.randn(15, 8, 16).to(device), torch.randint(0, 7, (15, 8)).to(device)

    def turn() -> Sequence[Output]:
        emitted: Tensor = head(inputs)
        whole, score = emitted[0], emitted[0].gather(1, labels[0][:, None])[:, 0]
        for at in range(1, 15):
            whole = torch.logsumexp(whole[:, :, None] + between + emitted[at][:, None], dim=1)
            score = score + between[labels[at - 1], labels[at]] + emitted[at].gather(1, labels[at][:, None])[:, 0]
        loss = (torch.logsumexp(whole, dim=1) - score).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: [between, *head.parameters()])


WORKLOADS = (
    Workload("characters", "LSTM of two layers, 30 characters drawn and read one by one", sampled_characters),
    Workload("beam-search", "GRU cell, 15 tokens, beam of 4, read at each token", beam_search),
    Workload("crf", "conditional random field, 15 labels, trained", random_field, TRAINING),
)
