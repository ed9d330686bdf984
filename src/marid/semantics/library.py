"""Marid's own patterns: in plain PyTorch, and operators that are a pattern by themselves."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from marid.semantics.patterns import Pattern

OPERATORS: dict[str, tuple[str, str]] = {
    **{
        f"aten::{name}": ("attention", "fused")
        for name in (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
            "scaled_dot_product_attention", "_flash_attention_forward", "_efficient_attention_forward",
        )
    },
    "aten::native_layer_norm": ("norm", "layer"),
    "aten::native_group_norm": ("norm", "group"),
    "aten::_fused_rms_norm": ("norm", "rms"),
    "aten::native_batch_norm": ("norm", "batch"),
    "aten::_native_batch_norm_legit": ("norm", "batch"),
    "aten::_native_batch_norm_legit_no_training": ("norm", "batch"),
    "aten::_batch_norm_with_update": ("norm", "batch"),
    "aten::embedding": ("embedding", ""),
    "aten::_embedding_bag": ("embedding", "bag"),
    "aten::lstm": ("recurrent cell", "lstm"),
    "aten::gru": ("recurrent cell", "gru"),
    "aten::rnn_tanh": ("recurrent cell", "rnn"),
    "aten::rnn_relu": ("recurrent cell", "rnn"),
    "aten::mkldnn_rnn_layer": ("recurrent cell", "lstm"),
    "aten::_thnn_fused_lstm_cell": ("recurrent cell", "lstm"),
    "aten::_thnn_fused_gru_cell": ("recurrent cell", "gru"),
    "aten::multinomial": ("sampling", "multinomial"),
    "aten::_grouped_mm": ("mixture of experts", "grouped"),
    "aten::_fused_adam_": ("optimizer step", "Adam"),
    "aten::_fused_adamw_": ("optimizer step", "AdamW"),
    "aten::_fused_sgd_": ("optimizer step", "SGD"),
    "aten::_fused_adagrad_": ("optimizer step", "Adagrad"),
}  # fmt: skip
"""Names and variants of what single operators do."""


def _some(*shape: int) -> Tensor:
    return torch.zeros(shape, device="cpu")


def _weight(*shape: int) -> Tensor:
    return torch.nn.Parameter(_some(*shape), requires_grad=False)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _gated_in_one(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, both).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _glu(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.glu(F.linear(x, both)), down)


def _plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up)), down)


def _layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True))


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def _layer_norm_late(x: Tensor, w: Tensor) -> Tensor:
    return w * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True))


def _rms_norm_late(x: Tensor, w: Tensor) -> Tensor:
    return (w * x) * torch.rsqrt(x.square().mean(-1, keepdim=True))


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x, -1), target)


def _cross_entropy_gathered(x: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(x, -1).gather(-1, target[:, None]).mean()


def _cross_entropy_summed(x: Tensor, target: Tensor) -> Tensor:
    return (torch.logsumexp(x, -1) - x.gather(-1, target[:, None])[:, 0]).mean()


def _lstm(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(r: Tensor, z: Tensor, new: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    n = torch.tanh(new + torch.sigmoid(r) * hidden)
    update = torch.sigmoid(z)
    return (1 - update) * n + update * state


def _rnn(x: Tensor, w: Tensor, state: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w) + F.linear(state, u))


def _rwkv4(top: Tensor, other: Tensor, high: Tensor, num: Tensor, value: Tensor, den: Tensor) -> Tensor:
    past, now = torch.exp(top - high), torch.exp(other - high)
    return (past * num + now * value) / (past * den + now)


def _rwkv7(state: Tensor, decay: Tensor, a: Tensor, b: Tensor, v: Tensor, k: Tensor) -> Tensor:
    return state * decay + (state @ a) @ b + v @ k


def _scan(decay: Tensor, state: Tensor, fed: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    state = decay * state + fed
    return state @ c, state


def _lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + F.linear(F.linear(x, a), b) * 2.0


def _router(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).softmax(-1).topk(2, -1)[0]


def _router_late(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).topk(2, -1)[0].softmax(-1)


def _router_sigmoid(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).sigmoid().topk(2, -1)[0]


def _clip(gradient: Tensor, norms: Tensor) -> Tensor:
    return gradient * (1.0 / (torch.linalg.vector_norm(norms) + 1e-6))


def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    return p.addcdiv_(m, v.sqrt().add(1e-8), value=-0.1)


def _rmsprop(p: Tensor, g: Tensor, v: Tensor) -> Tensor:
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    return p.addcdiv_(g, v.sqrt().add(1e-8), value=-0.1)


@cache
def patterns() -> tuple[Pattern, ...]:
    """All of them; of one name the more specific ones first."""
    q, x, w = _some(2, 3, 4, 8), _some(2, 4, 8), _weight(8, 8)
    image, kernel, scale = _some(2, 3, 8, 8), _weight(3, 3, 3, 3), _weight(3)
    flat, target = _some(4, 8), torch.zeros(4, dtype=torch.long, device="cpu")

    def batch_norm(y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, scale, scale, training=True)

    def pattern(name: str, variant: str | None, function: object, *inputs: Tensor) -> Pattern:
        return Pattern(name, function, inputs, variant)  # pyright: ignore[reportArgumentType]

    return (
        pattern("attention", "written out", _attention, q, _some(2, 3, 4, 8), _some(2, 3, 4, 8)),
        pattern("attention", "written out", lambda q, k: _attention(q, k, k), q, _some(2, 3, 4, 8)),
        pattern("attention", "written out", lambda q, v: _attention(q, q, v), q, _some(2, 3, 4, 8)),
        pattern("attention", "written out", lambda q: _attention(q, q, q), q),
        pattern("gated mlp", None, _gated, x, w, _weight(8, 8), _weight(8, 8)),
        pattern("gated mlp", "in one", _gated_in_one, x, _weight(16, 8), w),
        pattern("gated mlp", "glu", _glu, x, _weight(16, 8), w),
        pattern("mlp", None, _plain, x, w, _weight(8, 8)),
        pattern("norm", "layer", lambda x, w: w * _layer_norm(x), x, _weight(8)),
        pattern("norm", "layer", _layer_norm_late, x, _weight(8)),
        pattern("norm", "layer", _layer_norm, x),
        pattern("norm", "rms", lambda x, w: w * _rms_norm(x), x, _weight(8)),
        pattern("norm", "rms", _rms_norm_late, x, _weight(8)),
        pattern("norm", "rms", _rms_norm, x),
        pattern("convolution", "norm and activation", lambda x, k: F.relu(batch_norm(F.conv2d(x, k))), image, kernel),
        pattern("convolution", "norm", lambda x, k: batch_norm(F.conv2d(x, k)), image, kernel),
        pattern(
            "convolution", "norm and activation", lambda x, k: F.relu(F.group_norm(F.conv2d(x, k), 1)), image, kernel
        ),
        pattern("convolution", "activation", lambda x, k: F.relu(F.conv2d(x, k)), image, kernel),
        pattern("cross entropy", None, _cross_entropy, flat, target),
        pattern("cross entropy", "gathered", _cross_entropy_gathered, flat, target),
        pattern("cross entropy", "gathered", _cross_entropy_summed, flat, target),
        pattern("recurrent cell", "lstm", _lstm, _some(2, 16), _some(2, 4)),
        pattern("recurrent cell", "gru", _gru, *[_some(2, 4) for _ in range(5)]),
        pattern("recurrent cell", "rnn", _rnn, _some(2, 4), _weight(4, 4), _some(2, 4), _weight(4, 4)),
        pattern("rwkv", "4", _rwkv4, *[_some(2, 4) for _ in range(6)]),
        pattern(
            "rwkv",
            "7",
            _rwkv7,
            _some(2, 4, 4),
            _some(2, 1, 4),
            _some(2, 4, 1),
            _some(2, 1, 4),
            _some(2, 4, 1),
            _some(2, 1, 4),
        ),
        pattern("mamba", "scan", _scan, _some(2, 4, 3), _some(2, 4, 3), _some(2, 4, 3), _some(2, 3, 1)),
        pattern("lora", None, _lora, x, w, _weight(2, 8), _weight(8, 2)),
        pattern("mixture of experts", "router", _router, x, w),
        pattern("mixture of experts", "router", _router_late, x, w),
        pattern("mixture of experts", "router", _router_sigmoid, x, w),
        pattern("gradient clipping", "norm", _clip, _some(3, 4), _some(5)),
        pattern("optimizer step", "Adam", _adam, *[_some(2, 4) for _ in range(4)]),
        pattern("optimizer step", "RMSprop", _rmsprop, *[_some(2, 4) for _ in range(3)]),
    )
