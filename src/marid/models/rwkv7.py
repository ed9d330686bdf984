"""RWKV-7 as plain PyTorch modules: it runs on the CPU and on the lazy device, and can be trained.

The model is BlinkDL's "Goose" (https://github.com/BlinkDL/RWKV-LM); ``rwkv7_files.py`` reads its files. What a sequence
has been is a ``State`` of a few tensors, one row for each sequence of a batch. Sequences of different lengths go
together with ``lengths``::

    model = load("model.pth", "remote_accelerator")
    logits, state = model.prefill(tokens, lengths=lengths)  # [B, T], [B]
    while ...:
        logits, state = model(chosen.unsqueeze(1), state)  # a token for each sequence
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

ops = torch.ops.marid

CHUNK = 256
"""How many tokens of each sequence ``prefill`` takes at a time."""


@dataclass(frozen=True)
class Config:
    """The sizes of a model; ``ranks`` are those of the decay, the rate, the values' mixing and the gate."""

    layers: int
    width: int
    vocabulary: int
    hidden: int
    head_size: int = 64
    ranks: tuple[int, int, int, int] = (64, 64, 32, 128)
    norm_eps: float = 1e-5
    head_eps: float = 64e-5

    @property
    def heads(self) -> int:
        return self.width // self.head_size


class State(NamedTuple):
    """What sequences have been so far, by layer: the last token that each half of a layer saw (``[B, C]``), and the
    memory of the first half (``[B, H, N, N]``, float32)."""

    time: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]
    channel: tuple[Tensor, ...]

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self.memory[0].shape[0]

    def select(self, *indices: int) -> State:
        """The state of some of the sequences, in this order."""
        return State(*(tuple([tensor[list(indices)] for tensor in part]) for part in self))

    @staticmethod
    def together(*states: State) -> State:
        """The sequences of several states in one batch."""
        parts = (zip(*(state[part] for state in states), strict=True) for part in range(3))
        return State(*(tuple([torch.cat(tensors) for tensors in part]) for part in parts))


class LowRank(nn.Module):
    """``outer(inner(x @ downᵀ) @ upᵀ + bias)``."""

    def __init__(self, width: int, rank: int, inner: str, outer: str, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer
        self.down = nn.Parameter(torch.zeros(rank, width))
        self.up = nn.Parameter(torch.empty(width, rank).uniform_(-0.1, 0.1) / math.sqrt(rank))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.fast_linear(ops.fast_linear(x, self.down, None, self.inner), self.up, self.bias, self.outer)


class TimeMix(nn.Module):
    """The recurrent half of a layer."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        width, (decay, rate, values, gate) = config.width, config.ranks
        self.heads, self.size = config.heads, config.head_size
        self.head_eps = config.head_eps
        self.mix = nn.Parameter(torch.rand(6, width))  # of receptance, decay, key, value, rate and gate
        self.decay = LowRank(width, decay, "tanh", "none")
        self.rate = LowRank(width, rate, "none", "sigmoid")
        self.values = LowRank(width, values, "none", "sigmoid") if layer else None
        self.gate = LowRank(width, gate, "sigmoid", "none", bias=False)
        self.k_k = nn.Parameter(torch.full((width,), 0.85))
        self.k_a = nn.Parameter(torch.ones(width))
        self.r_k = nn.Parameter(torch.zeros(config.heads, config.head_size))
        scale = 0.5 / math.sqrt(width)
        self.receptance = nn.Parameter(torch.empty(width, width).uniform_(-scale, scale))
        self.key = nn.Parameter(torch.empty(width, width).uniform_(-scale, scale) * 0.1)
        self.value = nn.Parameter(torch.empty(width, width).uniform_(-scale, scale))
        self.output = nn.Parameter(torch.zeros(width, width))
        self.norm = nn.GroupNorm(config.heads, width, eps=config.head_eps)

    def forward(
        self, x: Tensor, shift: Tensor, memory: Tensor, first: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The result, the states for the next call, and the values of the first layer."""
        mixed, last = ops.token_shift(x, shift, self.mix, lengths)
        of_r, of_w, of_k, of_v, of_a, of_g = mixed.unbind()
        r, k = ops.fast_linear(of_r, self.receptance), ops.fast_linear(of_k, self.key)
        v = ops.fast_linear(of_v, self.value)
        if self.values is None:
            first = v
        else:
            v = ops.lerp(v, first, self.values(of_v))
        rate = self.rate(of_a)
        packed = ops.pack_kvakk(
            ops.control_k(k, rate, self.k_a), v, rate, ops.l2_norm(k * self.k_k, self.heads), self.heads
        )
        y, memory = ops.time_mix_v7(r, self.decay(of_w), packed, memory, lengths)
        y = self.norm(y.view(-1, y.shape[-1])).view(y.shape)
        y = ops.time_first_v7(y, r, packed, self.r_k)
        assert first is not None
        return ops.fast_linear(y * self.gate(of_g), self.output), last, memory, first


class ChannelMix(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        scale = 0.5 / math.sqrt(config.width)
        self.mix = nn.Parameter(torch.rand(config.width))
        self.key = nn.Parameter(torch.empty(config.hidden, config.width).uniform_(-scale, scale))
        self.value = nn.Parameter(torch.zeros(config.width, config.hidden))

    def forward(self, x: Tensor, shift: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        return ops.channel_mix_v7(x, shift, self.mix, self.key, self.value, lengths)


class Layer(nn.Module):
    """Both halves, each behind a norm."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.time_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.time = TimeMix(config, index)
        self.channel_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.channel = ChannelMix(config)


class RWKV7(nn.Module):
    """The language model: from tokens to logits of the next ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.uniform_(self.embedding.weight, -1e-4, 1e-4)
        self.first_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.layers)])
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def zero_state(self, batch: int) -> State:
        """The state of sequences that have no tokens yet."""
        weight, of = self.norm.weight, self.config
        wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
        layers = range(of.layers)
        token = tuple([weight.new_zeros(batch, of.width) for _ in layers])
        memory = [weight.new_zeros(batch, of.heads, of.head_size, of.head_size, dtype=wide) for _ in layers]
        return State(token, tuple(memory), tuple([weight.new_zeros(batch, of.width) for _ in layers]))

    def features(
        self, tokens: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """What the head makes logits of, ``[B, T, C]``, and the new state; arguments as for a call."""
        state = self.zero_state(tokens.shape[0]) if state is None else state
        x = self.first_norm(self.embedding(tokens))
        first: Tensor | None = None
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            y, time, memory, first = layer.time(
                layer.time_norm(x), state.time[index], state.memory[index], first, lengths
            )
            x = x + y
            y, channel = layer.channel(layer.channel_norm(x), state.channel[index], lengths)
            x = x + y
            parts.append((time, memory, channel))
        return x, State(*zip(*parts, strict=True))

    def logits(self, features: Tensor) -> Tensor:
        """The logits of features."""
        return ops.fast_linear(self.norm(features), self.head.weight)

    def forward(
        self, tokens: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The logits ``[B, T, V]`` of tokens ``[B, T]`` that come behind ``state``, and the new state.

        Of sequence ``b`` there are ``lengths[b]`` tokens, which may be none; logits behind them mean nothing.
        """
        x, state = self.features(tokens, state, lengths)
        return self.logits(x), state

    def prefill(
        self, tokens: Tensor, state: State | None = None, lengths: Tensor | None = None, chunk: int = CHUNK
    ) -> tuple[Tensor, State]:
        """The logits ``[B, V]`` behind the last token of each sequence, and the state there. Each must have a token.

        So many tokens are taken at a time: the memory that this takes does not grow with their number.
        """
        last: Tensor | None = None
        for start in range(0, tokens.shape[1], chunk):
            part = tokens[:, start : start + chunk]
            if lengths is None:
                x, state = self.features(part, state)
                last = x[:, -1]
                continue
            here = (lengths - start).clamp(0, part.shape[1])
            x, state = self.features(part, state, here)
            index = (here - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[-1])
            found = x.gather(1, index).squeeze(1)
            last = found if last is None else torch.where((here > 0)[:, None], found, last)
        if last is None or state is None:
            raise ValueError("prefill() needs a token of each sequence at least")
        return self.logits(last), state
