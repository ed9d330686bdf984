"""Transformers that see their whole input at once, and ways to train them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape

        def split(part: Tensor) -> Tensor:
            return part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        y = self.norm_1(x)
        seen = F.scaled_dot_product_attention(
            split(self.query(y)), split(self.key(y)), split(self.value(y)), attn_mask=mask
        )
        x = x + self.dropout(self.output(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class _Vit(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*[_Block(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_encoder(device: str) -> Program:
    model = _Vit().eval().to(device)
    images = torch.randn(4, 3, 64, 64).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        return [torch.softmax(model(images), dim=-1)]

    return Program(turn)


class _Whisper(nn.Module):
    places: Tensor

    def __init__(self, width: int = 128, layers: int = 3, length: int = 150) -> None:
        super().__init__()
        self.conv_1 = nn.Conv1d(80, width, kernel_size=3, padding=1)
        self.conv_2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        rates = torch.exp(-torch.arange(width // 2) * (9.21 / (width // 2 - 1)))
        angles = torch.arange(length)[:, None] * rates[None]
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.blocks = nn.ModuleList([_Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = F.gelu(self.conv_2(F.gelu(self.conv_1(spectrum)))).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def whisper_encoder(device: str) -> Program:
    """From sound to states: the spectrum is computed on the device as well."""
    model = _Whisper().eval().to(device)
    sound, window = torch.randn(1, 48000).to(device), torch.hann_window(400).to(device)
    filters = torch.rand(80, 201).mul(0.01).to(device)

    @torch.no_grad()
    def turn() -> Sequence[Output]:
        power = torch.stft(sound, 400, 160, window=window, return_complex=True)[..., :-1].abs() ** 2
        spectrum = torch.clamp(filters @ power, min=1e-10).log10()
        spectrum = torch.maximum(spectrum, spectrum.max() - 8.0)
        return [model((spectrum + 4.0) / 4.0)]

    return Program(turn)


class _Bert(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2, dropout: float = 0.1, classes: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, width), nn.Embedding(64, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList([_Block(width, 4, dropout) for _ in range(layers)])
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, words: Tensor, attended: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.norm(self.words(words) + self.places(places)))
        for block in self.blocks:
            x = block(x, attended[:, None, None, :])
        return self.head(self.dropout(torch.tanh(self.pool(x[:, 0]))))


def _text(device: str, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, which of them are there, and labels."""
    lengths = torch.randint(8, 33, (batch, 1))
    attended = torch.arange(32) < lengths
    words = torch.randint(1, 1000, (batch, 32)) * attended
    return words.to(device), attended.to(device), torch.randint(2, (batch,)).to(device)


def bert_finetuning(device: str) -> Program:
    """With dropout, weight decay for some parameters, clipping and a schedule, as in the usual script."""
    model = _Bert().to(device)
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    words, attended, labels = _text(device, 8)

    def turn() -> Sequence[Output]:
        loss = F.cross_entropy(model(words, attended), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return [loss.item()]

    return Program(turn, lambda: list(model.parameters()))


def autocast_accumulation(device: str) -> Program:
    """bfloat16 autocast over four small batches, then one step."""
    model = _Bert(layers=1, dropout=0.0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = [_text(device, 4) for _ in range(4)]
    kind = torch.device(device).type

    def turn() -> Sequence[Output]:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for words, attended, labels in batches:
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(words, attended), labels) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return [total.item()]

    return Program(turn, lambda: list(model.parameters()))


def accumulation_with_clipping(device: str) -> Program:
    """Four small batches of an MLP, the norm of the gradient clipped and read, SGD with momentum."""
    layers = [nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [(torch.randn(32, 64).to(device), torch.randint(10, (32,)).to(device)) for _ in range(4)]

    def turn() -> Sequence[Output]:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / len(batches)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return [total, norm.item()]

    return Program(turn, lambda: list(model.parameters()))


WORKLOADS = (
    Workload("vit", "vision transformer, 4 images, forward", vit_encoder),
    Workload("whisper", "spectrum of 3 s of sound and an encoder like Whisper's, forward", whisper_encoder),
    Workload("bert", "fine-tuning of an encoder like BERT with AdamW, dropout and clipping", bert_finetuning, TRAINING),
    Workload("autocast", "bfloat16 autocast, 4 batches accumulated, AdamW", autocast_accumulation, TRAINING),
    Workload(
        "clipping", "MLP, 4 batches accumulated, each loss read, norm clipped", accumulation_with_clipping, TRAINING
    ),
)
