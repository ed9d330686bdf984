"""Train a small character-level GPT on the source code of Python's standard library, then let it write some.

    python examples/train_gpt.py --steps 300

Everything happens on PyTorch's default device, random numbers included.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project_in(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention, then a feed-forward network, each around a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.feed(self.feed_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer; the output layer shares the token embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.blocks(self.tokens(x) + self.positions(positions))
        return self.norm(hidden) @ self.tokens.weight.T


class Text:
    """Characters as numbers, and random pieces of them."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        number = {character: index for index, character in enumerate(self.characters)}
        self.data = torch.tensor([number[character] for character in text])

    def batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and, one character further on, targets."""
        starts = torch.randint(len(self.data) - context, (size, 1))
        window = starts + torch.arange(context)
        return self.data[window], self.data[window + 1]


def standard_library(limit: int) -> str:
    """Sources of the running Python's standard library, in the order of their names, up to ``limit`` characters."""
    parts: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.isascii():
            parts.append(text)
            limit -= len(text)
        if limit <= 0:
            break
    return "".join(parts)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """A linear warm-up, then half a cosine."""
    warmup = max(1, options.steps // 20)
    if step < warmup:
        return options.rate * (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return options.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(model: GPT, text: Text, options: argparse.Namespace) -> None:
    """Optimise the model. Losses are read, and their mean printed, every ``options.every`` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    unread: list[Tensor] = []
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        inputs, targets = text.batch(options.batch, options.context)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        unread.append(loss.detach())
        if len(unread) == options.every or step + 1 == options.steps:
            print(f"step {step + 1}/{options.steps}  mean loss {torch.stack(unread).mean().item():.9g}", flush=True)
            unread.clear()


@torch.no_grad()
def sample(model: GPT, text: Text, options: argparse.Namespace) -> None:
    """Print ``options.characters`` characters that the model writes after a piece of the text."""
    model.eval()
    window = text.data[None, : options.context]
    for _ in range(options.characters):
        logits = model(window)[:, -1] / options.temperature
        following = torch.multinomial(logits.softmax(-1), 1)
        print(text.characters[int(following)], end="", flush=True)
        window = torch.cat((window[:, 1:], following), dim=1)
    print()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text in a step")
    parser.add_argument("--context", type=int, default=64, help="characters in a piece")
    parser.add_argument("--width", type=int, default=128, help="numbers for a character")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the losses")
    parser.add_argument("--text", type=int, default=400_000, help="characters to train on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--characters", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--temperature", type=float, default=0.8)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    text = Text(standard_library(options.text))
    model = GPT(len(text.characters), options.context, options.width, options.layers, options.heads, options.dropout)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(text.data):,} characters of Python")
    train(model, text, options)
    sample(model, text, options)


if __name__ == "__main__":
    main()
