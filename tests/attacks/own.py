"""Valid calls of Marid's own operators, for ``forge.py`` to alter."""

from __future__ import annotations

from typing import Any

import torch

from tests.attacks.record import described

__all__ = ["own_calls"]


def own_calls() -> dict[str, list[Any]]:
    """Calls by the names of operators, as plain data."""
    x, row, layer = torch.randn(2, 3, 8), torch.randn(8), torch.randn(4, 8)
    packed, state = torch.randn(2, 3, 2, 4, 4), torch.randn(2, 2, 4, 4)
    lengths, bonus = torch.tensor([3, 1]), torch.randn(2, 4)
    blocks = torch.randint(0, 256, (3, 34), dtype=torch.uint8)
    large = torch.randint(0, 256, (2, 210), dtype=torch.uint8)
    calls: dict[str, list[tuple[Any, ...]]] = {
        "lerp": [(x, x, row), (x, row, x, True)],
        "blend": [(x, x, row)],
        "l2_norm": [(x,), (x, 2)],
        "squared_relu": [(x,)],
        "add_activate": [(x, row, "none", "none", "sigmoid"), (x, x, "tanh", "silu", "exp")],
        "control_k": [(x, x, row)],
        "fast_linear": [(x[:1, :1], layer), (x, layer, layer[:, 0].clone(), "tanh"), (x.repeat(4, 1, 1), layer)],
        "linear_activation": [(x, layer, None, "gelu")],
        "token_shift": [(x, x[:, 0], layer), (x, x[:, 0], layer, lengths)],
        "pack_kvakk": [(x, x, x, x, 2)],
        "time_first_v7": [(x, x, packed, bonus)],
        "time_mix_v7": [(x, x, packed, state), (x, x, packed, state, lengths)],
        "channel_mix_v7": [(x, x[:, 0], row, layer, layer.t(), lengths)],
        "dequantize": [(blocks, "Q8_0"), (large, "Q6_K")],
        "quantized_linear": [
            (torch.randn(1, 32), blocks, None, "Q8_0"),
            (torch.randn(3, 256), large, torch.randn(2), "Q6_K", "relu"),
            (torch.randn(20, 32), blocks, None, "Q8_0"),
        ],
    }
    return {f"marid.{name}.default": [[_plain(call), {}] for call in several] for name, several in calls.items()}


def _plain(call: tuple[Any, ...]) -> list[Any]:
    large = [isinstance(arg, torch.Tensor) and arg.numel() > 256 for arg in call]
    return [_shape_of(arg) if is_large else described(arg) for arg, is_large in zip(call, large, strict=True)]


def _shape_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"T": str(tensor.dtype).removeprefix("torch."), "s": list(tensor.shape), "d": list(tensor.stride())}
