"""Operators that PyTorch's database does not have, and that have no meta kernel: recorded, with the CPU's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import marid
from tests.helpers import DEVICE, assert_same

Make = Callable[..., Tensor]


def _quantised(make: Make) -> list[Any]:
    x, scale, scales = make(4, 5), torch.tensor(0.1), torch.full((4,), 0.1)
    zero, zeros = torch.tensor(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    scale, scales, zero, zeros = (one.to(x.device) for one in (scale, scales, zero, zeros))
    return [
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127),
        torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -128, 127),
    ]


def _quantised_and_learnt(make: Make) -> list[Any]:
    x, scale, zero, scales, zeros = make(4, 5), make(1), make(1), make(4), make(4)
    return [
        torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -128, 127, 1.0),
        torch._fake_quantize_learnable_per_channel_affine(x, scales, zeros, 0, -128, 127, 1.0),
    ]


def _drawn(make: Make) -> list[Any]:
    """Derivatives by the parameters of what is drawn."""
    torch.manual_seed(5)
    shape = make(4, 5)
    return [
        torch.distributions.Gamma(shape, shape * 2).rsample(),
        torch.distributions.Dirichlet(shape).rsample(),
    ]


def _derived_twice(make: Make) -> list[Any]:
    x = make(4, 6)
    (first,) = torch.autograd.grad(torch.nn.functional.glu(x).pow(2).sum(), x, create_graph=True)
    return [first]


def _without_gradients(make: Make) -> list[Any]:
    x = make(4, 5).detach()
    return [
        *torch.aminmax(x),
        *torch.aminmax(x, dim=1),
        torch._masked_softmax(x, x > 0.6, -1),
        *torch.batch_norm_update_stats(x, None, None, 0.1),
    ]


@pytest.mark.parametrize("calls", [_quantised, _quantised_and_learnt, _drawn, _derived_twice, _without_gradients])
def test_nothing_runs_eagerly(calls: Callable[[Make], list[Any]]) -> None:
    def results(device: str) -> list[Any]:
        drawn = torch.Generator().manual_seed(2)
        made: list[Tensor] = []

        def make(*shape: int) -> Tensor:
            made.append((torch.rand(*shape, generator=drawn) + 0.1).to(device).requires_grad_())
            return made[-1]

        found = calls(make)
        for one in found:
            if one.requires_grad:
                one.pow(2).sum().backward(retain_graph=True)
        return [*found, *(one.grad for one in made)]

    expected = results("cpu")
    marid.reset_stats()
    assert_same(results(DEVICE), expected)
    assert not marid.stats().fallbacks
