"""What is recorded of group normalization and its gradients is what the CPU's kernels return."""

from __future__ import annotations

import math
import random

import torch

from .layouts import DTYPES, compare, laid_out

aten = torch.ops.aten


def _check(choice: random.Random) -> int:
    """How many rules were compared for one random call and its gradients."""
    groups = choice.choice((1, 2, 4))
    channels = groups * choice.choice((1, 2, 8))
    shape = [
        choice.choice((0, 1, 2, 5)),
        channels,
        *[choice.choice((1, 2, 5, 9)) for _ in range(choice.choice((0, 1, 2, 2, 3)))],
    ]
    dtype = choice.choice(DTYPES)
    weight, bias = (torch.zeros(channels, dtype=dtype) if choice.random() < 0.7 else None for _ in range(2))
    sizes = shape[0], channels, math.prod(shape[2:]), groups
    input, grad = laid_out(choice, shape, dtype), laid_out(choice, shape, dtype)
    forward = compare(aten.native_group_norm.default, (input, weight, bias, *sizes, 1e-5))
    mean, rstd = (torch.zeros(shape[0], groups, dtype=dtype) for _ in range(2))
    # The kernel for other memory formats writes to the gradient of the input even where it is not wanted.
    wanted = [True, *[weight is not None and choice.random() < 0.8 for _ in range(2)]]
    return forward + compare(aten.native_group_norm_backward.default, (grad, input, mean, rstd, weight, *sizes, wanted))


def test_group_norms_return_what_is_recorded() -> None:
    choice = random.Random(1)
    assert sum(_check(choice) for _ in range(500)) > 200
