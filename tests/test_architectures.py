"""Blocks of vision models as torchvision and timm write them: two training steps give what they give on the CPU.

Outputs, gradients, parameters and buffers are equal bit for bit, with equal strides; nothing falls back, and nothing is
laid out otherwise than recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marid
from tests.helpers import DEVICE, assert_same, seeded, train_step

_CHANNELS, _SIDE = 8, 8


class _Residual(nn.Module):
    """``x + scale * drop(inner(x))``, where ``drop`` leaves out whole samples."""

    def __init__(self, *inner: nn.Module, drop: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.inner, self.drop = nn.Sequential(*inner), drop
        self.scale = None if scale is None else nn.Parameter(torch.full((_CHANNELS, 1, 1), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.scale is not None:
            y = y * self.scale
        if self.drop and self.training:
            kept = y.new_empty((y.shape[0],) + (1,) * (y.ndim - 1)).bernoulli_(1 - self.drop)
            y = y * kept.div_(1 - self.drop)
        return x + y


class _SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)), inplace=True))
        return x * F.hardsigmoid(gate)


def _inverted_residual() -> nn.Module:
    wide = _CHANNELS * 4
    spread = nn.Conv2d(_CHANNELS, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(inplace=True)
    depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(True)
    narrow = nn.Conv2d(wide, _CHANNELS, 1, bias=False), nn.BatchNorm2d(_CHANNELS)
    return _Residual(*spread, *depthwise, _SqueezeExcite(wide), *narrow, drop=0.5)


class _ChannelNorm(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _convnext() -> nn.Module:
    depthwise = nn.Conv2d(_CHANNELS, _CHANNELS, 7, padding=3, groups=_CHANNELS)
    rows = nn.Conv2d(_CHANNELS, 32, 1), nn.GELU(), _ResponseNorm(32), nn.Conv2d(32, _CHANNELS, 1)
    return _Residual(depthwise, _ChannelNorm(_CHANNELS), *rows, scale=1e-2)


class _ResponseNorm(nn.Module):
    """ConvNeXt V2's global response normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full((1, channels, 1, 1), value)) for value in (0.5, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        return x + torch.addcmul(self.bias, self.weight, x * (size / (size.mean(1, keepdim=True) + 1e-6)))


class _Windows(nn.Module):
    """Swin's attention in shifted windows, with a relative position bias and a mask, and the merging of patches."""

    def __init__(self, window: int = 4, shift: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.qkv, self.out = nn.Linear(_CHANNELS, 3 * _CHANNELS), nn.Linear(_CHANNELS, _CHANNELS)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        self.norm, self.merge = nn.LayerNorm(4 * _CHANNELS), nn.Linear(4 * _CHANNELS, 2 * _CHANNELS, bias=False)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = (at[:, :, None] - at[:, None, :]) + window - 1
        self.register_buffer("index", offset[0] * (2 * window - 1) + offset[1])
        self.register_buffer("mask", self._mask())

    def _mask(self) -> torch.Tensor:
        regions = torch.zeros(1, _SIDE, _SIDE, 1)
        slices = slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None)
        for number, (rows, columns) in enumerate(itertools.product(slices, slices)):
            regions[:, rows, columns] = number
        of = self._parted(regions).squeeze(-1)
        return (of[:, None, :] - of[:, :, None]).ne(0).float().mul(-100.0)

    def _parted(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        x = x.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        parts = self._parted(torch.roll(x, (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(parts).reshape(*parts.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * 4.0
        bias = self.table[self.index.view(-1)].view(*self.index.shape, -1).permute(2, 0, 1).contiguous()
        scores = (scores + bias).view(x.shape[0], -1, *scores.shape[1:]) + self.mask.unsqueeze(1).unsqueeze(0)
        made = self.out((scores.view(-1, *scores.shape[2:]).softmax(-1) @ v).transpose(1, 2).reshape(parts.shape))
        side = _SIDE // self.window
        made = made.view(-1, side, side, self.window, self.window, _CHANNELS).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(made.reshape(x.shape), (self.shift, self.shift), (1, 2))
        quarters = [x[:, i::2, j::2] for j, i in itertools.product((0, 1), (0, 1))]
        return self.merge(self.norm(torch.cat(quarters, -1))).permute(0, 3, 1, 2)


class _Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = _CHANNELS // 2
        self.primary = nn.Sequential(nn.Conv2d(_CHANNELS, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(True))
        self.cheap = nn.Sequential(nn.Conv2d(half, half, 3, 1, 1, groups=half), nn.BatchNorm2d(half), nn.ReLU(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        primary = self.primary(x)
        return torch.cat([primary, self.cheap(primary)], 1)[:, : _CHANNELS - 1]


class _Halo(nn.Module):
    """Attention of blocks to what lies around them, as HaloNet cuts it out: by ``unfold`` of a padded image."""

    def __init__(self, block: int = 4, halo: int = 1) -> None:
        super().__init__()
        self.block, self.halo = block, halo
        self.q, self.kv = nn.Conv2d(_CHANNELS, _CHANNELS, 1), nn.Conv2d(_CHANNELS, 2 * _CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block, wide, count = self.block, self.block + 2 * self.halo, x.shape[-1] // self.block
        q = self.q(x).reshape(-1, _CHANNELS, count, block, count, block).permute(0, 2, 4, 3, 5, 1)
        q = q.reshape(-1, count * count, block * block, _CHANNELS)
        around = F.pad(self.kv(x), [self.halo] * 4).unfold(2, wide, block).unfold(3, wide, block)
        around = around.reshape(-1, 2 * _CHANNELS, count * count, wide * wide).permute(0, 2, 3, 1)
        k, v = around.split(_CHANNELS, -1)
        made = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        made = made.reshape(-1, count, count, block, block, _CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return made.reshape(x.shape)


class _Involution(nn.Module):
    """A kernel of its own for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(_CHANNELS, 9 * 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel(x).view(-1, 2, 1, 9, *x.shape[2:])
        patches = F.unfold(x, 3, padding=1).view(-1, 2, _CHANNELS // 2, 9, *x.shape[2:])
        return (kernel * patches).sum(3).view(x.shape)


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tokens = _SIDE * _SIDE
        self.norms = nn.ModuleList(nn.LayerNorm(_CHANNELS) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, tokens))
        self.gate, self.out = nn.Linear(_CHANNELS, 4 * _CHANNELS), nn.Linear(2 * _CHANNELS, _CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        left, right = self.gate(self.norms[1](x)).chunk(2, -1)
        return x + self.out(left * F.gelu(right, approximate="tanh"))


class _Dense(nn.Module):
    """DenseNet's block, with checkpoints, and its transition."""

    def __init__(self, growth: int = 4, layers: int = 3) -> None:
        super().__init__()
        widths = [_CHANNELS + index * growth for index in range(layers + 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, growth, 3, padding=1)) for w in widths[:-1]
        )
        self.transition = nn.Sequential(
            nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.Conv2d(widths[-1], 6, 1), nn.AvgPool2d(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            both = lambda *given, layer=layer: layer(torch.cat(given, 1))  # noqa: E731
            features.append(torch.utils.checkpoint.checkpoint(both, *features, use_reentrant=False))
        return self.transition(torch.cat(features, 1))


class _Fusion(nn.Module):
    """HRNet's exchange between resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(_CHANNELS, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16))
        self.up = nn.Sequential(
            nn.Conv2d(16, _CHANNELS, 1, bias=False), nn.BatchNorm2d(_CHANNELS), nn.Upsample(scale_factor=2)
        )
        self.high, self.low = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        high, low = self.high(x), self.low(self.down(x))
        return [F.relu(high + self.up(low), inplace=True), F.relu(low + self.down(high), inplace=True)]


class _Pyramid(nn.Module):
    """A feature pyramid: lateral convolutions, and sums on the way up by interpolation to odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(_CHANNELS, 12, 3, 2), nn.Conv2d(12, 16, 3, 2)])
        self.lateral = nn.ModuleList(nn.Conv2d(channels, 4, 1) for channels in (_CHANNELS, 12, 16))
        self.smooth = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        stages = [x]
        for stage in self.stages:
            stages.append(F.leaky_relu(stage(stages[-1]), 0.1))
        levels = [lateral(stage) for lateral, stage in zip(self.lateral, stages, strict=True)]
        for index in (1, 0):
            levels[index] = levels[index] + F.interpolate(levels[index + 1], size=levels[index].shape[-2:])
        found = {f"level{index}": self.smooth(level) for index, level in enumerate(levels)}
        found["pool"] = F.max_pool2d(found["level2"], 1, 2)
        return found


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(_CHANNELS, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.middle = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.InstanceNorm2d(16, affine=True), nn.ELU()
        )
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        inner = self.up(self.middle(F.max_pool2d(skip, 2)))
        inner = inner + F.interpolate(inner[..., ::2, ::2], scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([skip, inner], 1))


class _Standardised(nn.Conv2d):
    """A convolution whose weights are standardised, with a gain, as in NFNet."""

    def __init__(self) -> None:
        super().__init__(_CHANNELS, 8, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale, rows = (self.gain * 27**-0.5).view(-1), self.weight.reshape(1, 8, -1)
        weight = F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(F.gelu(input) * 1.7, weight.reshape_as(self.weight), self.bias, padding=1)


class _Blur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("taps", (taps[:, None] * taps)[None, None].repeat(_CHANNELS, 1, 1, 1))
        self.mix = nn.Conv2d(_CHANNELS, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blurred = F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.taps, stride=2, groups=_CHANNELS)
        return self.mix(blurred) + F.adaptive_max_pool2d(x, _SIDE // 2) * F.softplus(x).mean()


class _SplitAttention(nn.Module):
    """ResNeSt's radix softmax over groups; and Res2Net's cascade of splits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(_CHANNELS, 16, 3, padding=1, groups=2)
        self.fc = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 16, 1))
        self.scales = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = self.conv(x).view(-1, 2, 8, *x.shape[2:])
        weights = self.fc(splits.sum(1).mean((2, 3), keepdim=True)).view(-1, 1, 2, 8).transpose(1, 2).softmax(1)
        x = (splits * weights.reshape(-1, 2, 8, 1, 1)).sum(1)
        made = [torch.zeros_like(x[:, :4])]
        for scale, part in zip(self.scales, x.split(4, 1), strict=True):
            made.append(scale(made[-1] + part))
        return torch.cat(made[1:], 1)


class _Shuffle(nn.Module):
    """ShuffleNet's channel shuffle, and pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.PReLU(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, taken = x.chunk(2, 1)
        x = torch.cat((kept, self.branch(taken)), 1).view(-1, 2, 4, *x.shape[2:]).transpose(1, 2).contiguous()
        return F.channel_shuffle(F.pixel_unshuffle(F.pixel_shuffle(x.flatten(1, 2), 2), 2), 2)


class _Transformer(nn.Module):
    """A vision transformer: patches, a class token, positions resampled to another grid, attention, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(_CHANNELS, 16, 2, 2), nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 1 + 9, 16))
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.bias, self.norm = nn.Parameter(torch.zeros(16)), nn.LayerNorm(16, eps=1e-6)
        self.scale, self.head = nn.Parameter(torch.full((16,), 0.1)), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        grid = self.position[:, 1:].reshape(1, 3, 3, 16).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, (_SIDE // 2, _SIDE // 2), mode="bicubic", antialias=True, align_corners=False)
        position = torch.cat([self.position[:, :1], grid.permute(0, 2, 3, 1).reshape(1, -1, 16)], 1)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + position
        bias = torch.cat([self.bias, torch.zeros_like(self.bias, requires_grad=False), self.bias])
        qkv = F.linear(self.norm(x), self.qkv.weight, bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2)
        x = x + self.scale * self.out(made)
        return self.head(self.norm(x)[:, 0])


class _LinearAttention(nn.Module):
    """XCiT's attention over channels, EfficientViT's with ReLU, and PoolFormer's pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.temperature = nn.Conv2d(_CHANNELS, 3 * _CHANNELS, 1), nn.Parameter(torch.ones(2, 1, 1))
        self.pool, self.norm = nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.GroupNorm(1, _CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pool(self.norm(x)) - x
        q, k, v = self.qkv(x).reshape(x.shape[0], 3, 2, _CHANNELS // 2, -1).unbind(1)
        channels = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature).softmax(-1) @ v
        rows = F.pad(v.mT, (0, 1), value=1.0)
        linear = F.relu(q).mT @ (F.relu(k) @ rows)
        linear = linear[..., :-1] / (linear[..., -1:] + 1e-6)
        return channels.reshape(x.shape) + linear.mT.reshape(x.shape)


class _Reparametrised(nn.Module):
    """RepVGG's branches; and StarNet's product of two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(_CHANNELS, _CHANNELS, k, padding=k // 2, bias=False), nn.BatchNorm2d(_CHANNELS))
            for k in (3, 1)
        )
        self.identity = nn.BatchNorm2d(_CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (branch(x) for branch in self.branches)
        return F.relu6(a) * b + F.mish(a + b + self.identity(x))


class _Recurrent(nn.Module):
    """Sequencer's LSTMs over rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (nn.LSTM(_CHANNELS, 4, batch_first=True, bidirectional=True) for _ in range(2))
        self.out = nn.Linear(16, _CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        rows = self.rows(x.reshape(-1, _SIDE, _CHANNELS))[0].view(*x.shape[:3], -1)
        columns = self.columns(x.transpose(1, 2).reshape(-1, _SIDE, _CHANNELS))[0].view(*x.shape[:3], -1)
        return self.out(torch.cat([rows, columns.transpose(1, 2)], -1)).permute(0, 3, 1, 2)


_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "inverted residual": _inverted_residual,
    "convnext": _convnext,
    "shifted windows": _Windows,
    "ghost": _Ghost,
    "halo": _Halo,
    "involution": _Involution,
    "mixer": _Mixer,
    "dense": _Dense,
    "fusion of resolutions": _Fusion,
    "feature pyramid": _Pyramid,
    "u-net": _UNet,
    "standardised weights": _Standardised,
    "blur pool": _Blur,
    "split attention": _SplitAttention,
    "shuffle": _Shuffle,
    "vision transformer": _Transformer,
    "linear attention": _LinearAttention,
    "reparametrised": _Reparametrised,
    "recurrent": _Recurrent,
}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "contiguous": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "channels last": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05),
}


def _outputs(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return list(made.values() if isinstance(made, dict) else made)


def _trained(block: str, layout: str, device: str) -> dict[str, Any]:
    """Everything that two training steps, and a look at the model behind them, make."""
    torch.manual_seed(0)
    model, made = nn.Sequential(nn.Conv2d(3, _CHANNELS, 3, padding=1), _BLOCKS[block]()), {}
    images = torch.randn(3, 2, 3, _SIDE, _SIDE)
    model = seeded(model, device)
    memory_format = torch.channels_last if layout == "channels last" else torch.contiguous_format
    model.to(memory_format=memory_format)
    optimizer = _OPTIMIZERS[layout](model.parameters())
    for step in range(2):
        outputs = _outputs(model(images[step].to(device).to(memory_format=memory_format)))
        train_step(optimizer, sum(output.square().mean() for output in outputs))  # pyright: ignore[reportArgumentType]
        made[f"outputs {step}"] = [output.detach() for output in outputs]
        made[f"gradients {step}"] = [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        made["evaluated"] = _outputs(model.eval()(images[2].to(device).to(memory_format=memory_format)))
    return {**made, "parameters": list(model.parameters()), "buffers": list(model.buffers())}


@pytest.mark.parametrize("layout", _OPTIMIZERS)
@pytest.mark.parametrize("block", _BLOCKS)
def test_training_equals_the_cpu(block: str, layout: str) -> None:
    assert_same(_trained(block, layout, DEVICE), _trained(block, layout, "cpu"))
    assert marid.stats().fallbacks == {}
