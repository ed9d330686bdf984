"""Loops over time steps, written in Python or inside of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


def gru_cell(device: str) -> Program:
    cell, head = nn.GRUCell(32, 64).to(device), nn.Linear(64, 8).to(device)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    inputs, targets = torch.randn(32, 16, 32).to(device), torch.randn(32, 16, 8).to(device)

    def turn() -> Sequence[Output]:
        optimizer.zero_grad()
        hidden = torch.zeros(16, 64, device=device)
        loss = torch.zeros((), device=device)
        for step in range(inputs.shape[0]):
            hidden = cell(inputs[step], hidden)
            loss = loss + F.mse_loss(head(hidden), targets[step])
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: parameters)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.lstm = nn.LSTM(64, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, 20)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


def lstm_model(device: str) -> Program:
    model = _Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    words, tags = torch.randint(500, (16, 24)).to(device), torch.randint(20, (16, 24)).to(device)

    def turn() -> Sequence[Output]:
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Program(turn, lambda: list(model.parameters()))


# --- a recurrent language model in the manner of RWKV-7, on bare tensors ----------------------------------------------

_WIDTH, _HEADS, _LAYERS, _VOCABULARY, _LOW = 128, 2, 4, 500, 16
_MIXES = "rwkvag"  # receptance, decay, key, value, rate and gate see their own mixture of this token and the last


def _weights(device: str) -> list[dict[str, Tensor]]:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).mul(rows**-0.5).to(device)

    layers = []
    for _ in range(_LAYERS):
        layer = {f"mix_{name}": torch.rand(_WIDTH).to(device) for name in (*_MIXES, "channel")}
        for name in ("receptance", "key", "value", "output"):
            layer[name] = matrix(_WIDTH, _WIDTH)
        for name in ("w", "a", "g"):
            layer[f"{name}_down"], layer[f"{name}_up"] = matrix(_WIDTH, _LOW), matrix(_LOW, _WIDTH)
        layer["channel_key"], layer["channel_value"] = matrix(_WIDTH, 4 * _WIDTH), matrix(4 * _WIDTH, _WIDTH)
        for name in ("decay_base", "rate_base", "key_scale", "key_rate", "bonus"):
            layer[name] = torch.randn(_WIDTH).mul(0.5).to(device)
        for name in ("norm_1", "norm_2", "norm_heads"):
            layer[f"{name}_weight"] = torch.ones(_WIDTH).to(device)
            layer[f"{name}_bias"] = torch.zeros(_WIDTH).to(device)
        layers.append(layer)
    return layers


def _time_mix(x: Tensor, last: Tensor, state: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence of one layer for one token: what it adds, and the new state, a matrix for each head."""
    size = _WIDTH // _HEADS
    difference = last - x
    mixed = {name: x + difference * layer[f"mix_{name}"] for name in _MIXES}
    receptance, key, value = mixed["r"] @ layer["receptance"], mixed["k"] @ layer["key"], mixed["v"] @ layer["value"]
    decay = layer["decay_base"] + torch.tanh(mixed["w"] @ layer["w_down"]) @ layer["w_up"]
    decay = torch.exp(-0.606531 * torch.sigmoid(decay))
    rate = torch.sigmoid(layer["rate_base"] + (mixed["a"] @ layer["a_down"]) @ layer["a_up"])
    gate = torch.sigmoid(mixed["g"] @ layer["g_down"]) @ layer["g_up"]
    direction = F.normalize((key * layer["key_scale"]).view(_HEADS, size), dim=-1).view(-1)
    key = key * (1 + (rate - 1) * layer["key_rate"])

    outer = value.view(_HEADS, size, 1) @ key.view(_HEADS, 1, size)
    removal = (-direction).view(_HEADS, size, 1) @ (direction * rate).view(_HEADS, 1, size)
    state = state * decay.view(_HEADS, 1, size) + state @ removal + outer
    out = (state @ receptance.view(_HEADS, size, 1)).view(1, _WIDTH)
    out = F.group_norm(out, _HEADS, layer["norm_heads_weight"], layer["norm_heads_bias"], eps=64e-5).view(_WIDTH)
    bonus = (receptance * key * layer["bonus"]).view(_HEADS, size).sum(dim=-1, keepdim=True)
    out = out + (bonus * value.view(_HEADS, size)).view(_WIDTH)
    return (out * gate) @ layer["output"], state


def rwkv_decode(device: str) -> Program:
    """Eight tokens, each the most likely after the one before; the state goes on from turn to turn."""
    layers = _weights(device)
    embedding = torch.randn(_VOCABULARY, _WIDTH).to(device)
    head = torch.randn(_WIDTH, _VOCABULARY).mul(_WIDTH**-0.5).to(device)
    size = _WIDTH // _HEADS
    states = [torch.zeros(_HEADS, size, size, device=device) for _ in layers]
    last_time = [torch.zeros(_WIDTH, device=device) for _ in layers]
    last_channel = [torch.zeros(_WIDTH, device=device) for _ in layers]
    token = 0

    def forward(token: int) -> Tensor:
        x = embedding[token]
        for index, layer in enumerate(layers):
            y = F.layer_norm(x, (_WIDTH,), layer["norm_1_weight"], layer["norm_1_bias"])
            change, states[index] = _time_mix(y, last_time[index], states[index], layer)
            last_time[index], x = y, x + change
            y = F.layer_norm(x, (_WIDTH,), layer["norm_2_weight"], layer["norm_2_bias"])
            mixed = y + (last_channel[index] - y) * layer["mix_channel"]
            last_channel[index] = y
            x = x + torch.relu(mixed @ layer["channel_key"]) ** 2 @ layer["channel_value"]
        return F.layer_norm(x, (_WIDTH,)) @ head

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        nonlocal token
        tokens = []
        for _ in range(8):
            token = int(forward(token).argmax().item())
            tokens.append(token)
        return tokens

    return Program(turn, lambda: states)


WORKLOADS = (
    Workload("gru-cell", "GRUCell in a Python loop of 32 steps, trained with Adam", gru_cell, TRAINING),
    Workload("lstm", "model with an embedding and a two-layer LSTM, trained with Adam", lstm_model, TRAINING),
    Workload("rwkv-decode", "recurrent model like RWKV-7 on bare tensors, 8 greedy tokens, each read", rwkv_decode),
)
