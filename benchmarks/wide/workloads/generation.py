"""Language models that make text token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import Output, Program, Workload

__all__ = ["WORKLOADS"]

_END = -1  # no token has it, so that all turns have the same length


class _Block(nn.Module):
    """A layer of GPT-2, with keys and values of the past grown by ``cat``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = x.shape
        parts = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), (key, value)


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor, start: int, past: list[tuple[Tensor, Tensor] | None]) -> Tensor:
        x = self.words(words) + self.places(torch.arange(start, start + words.shape[1], device=words.device))
        for index, block in enumerate(self.blocks):
            x, past[index] = block(x, past[index])
        return self.head(self.norm(x[:, -1]))


@torch.no_grad()
def gpt_sampling(device: str) -> Program:
    """Temperature and top-k, as in ``generate(do_sample=True)``; each token is read, to see whether it is the end."""
    model = _Gpt().eval().to(device)
    prompt = torch.randint(1000, (1, 8)).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        past: list[tuple[Tensor, Tensor] | None] = [None] * len(model.blocks)
        words, length, tokens = prompt, 0, []
        for _ in range(16):
            logits = model(words, length, past) / 0.8
            length += words.shape[1]
            best = torch.topk(logits, 50).values[:, -1:]
            logits = logits.masked_fill(logits < best, float("-inf"))
            words = torch.multinomial(torch.softmax(logits, dim=-1), 1)
            tokens.append(int(words.item()))
            if tokens[-1] == _END:
                break
        return tokens

    return Program(turn)


# --- Llama with a static cache ----------------------------------------------------------------------------------------


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class _LlamaBlock(nn.Module):
    """Two heads of keys for four of queries; keys and values are written into a cache of a fixed size."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm_1, self.norm_2 = _RmsNorm(width), _RmsNorm(width)
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.register_buffer("keys", torch.zeros(1, groups, length, self.size))
        self.register_buffer("values", torch.zeros(1, groups, length, self.size))

    def forward(self, x: Tensor, places: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm_1(x)
        query = self.query(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.key(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        value = self.value(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        self.keys.index_copy_(2, places, _rotate(key, cosine, sine))
        self.values.index_copy_(2, places, value)
        repeat = self.heads // self.groups
        keys, values = self.keys.repeat_interleave(repeat, dim=1), self.values.repeat_interleave(repeat, dim=1)
        seen = F.scaled_dot_product_attention(_rotate(query, cosine, sine), keys, values, attn_mask=mask)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Llama(nn.Module):
    cosine: Tensor
    sine: Tensor
    all_places: Tensor

    def __init__(self, width: int = 128, layers: int = 4, vocabulary: int = 1000, length: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([_LlamaBlock(width, 4, 2, length) for _ in range(layers)])
        self.norm, self.head = _RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        size = width // 4
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        self.register_buffer("all_places", torch.arange(length))

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.words(words)
        cosine, sine = self.cosine[places], self.sine[places]
        mask = self.all_places <= places[:, None]
        for block in self.blocks:
            x = block(x, places, cosine, sine, mask)
        return self.head(self.norm(x[:, -1]))


@torch.no_grad()
def llama_greedy(device: str) -> Program:
    model = _Llama().eval().to(device)
    prompt = torch.randint(1000, (1, 8)).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        words, places, tokens = prompt, torch.arange(8, device=device), []
        for _ in range(16):
            words = model(words, places).argmax(dim=-1, keepdim=True)
            places = places[-1:] + 1
            tokens.append(int(words.item()))
            if tokens[-1] == _END:
                break
        return tokens

    return Program(turn)


WORKLOADS = (
    Workload("gpt-sampling", "decoder like GPT-2, 16 tokens sampled and read, cache grown by cat", gpt_sampling),
    Workload("llama-static", "decoder like Llama, 16 greedy tokens, each read, static cache", llama_greedy),
)
