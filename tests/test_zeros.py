"""Zeros that have no memory on the CPU: the derivatives of constants, in forward mode and beside infinite numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.helpers import DEVICE, assert_same

_INF = float("inf")
Function = Callable[[Tensor], Tensor]

_FUNCTIONS: dict[str, Function] = {
    "square": lambda x: (x**2).sum(),
    "exponential": lambda x: x.exp().sum(),
    "product with itself": lambda x: (x.exp() * x).sum(),
    "quotient": lambda x: (x / (1 + x * x)).sum(),
    "difference": lambda x: (x.exp() - 3 * x).pow(2).sum(),
    "views": lambda x: (x.view(1, -1).expand(3, -1).t()[:2] * x[:2, None]).sum(),
    "product of all": lambda x: x.prod() * 2.0,
    "dot product": lambda x: torch.dot(x, x.sin()),
    "logarithm": lambda x: torch.log1p(x.abs()).sum() / x.numel(),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("values", [[_INF, 2.0, -1.0], [100.0, 2.0, 0.0], [0.5, -0.0, 3.0]])
def test_second_derivatives(either_way: None, name: str, values: list[float]) -> None:
    of = _FUNCTIONS[name]

    def run(device: str) -> list[Any]:
        x = torch.tensor(values).to(device)
        v = torch.ones_like(x)
        return [
            hessian(of)(x),
            jvp(grad(of), (x,), (v,))[1],
            jacfwd(jacfwd(of))(x),
            jacrev(jacfwd(of))(x),
            vmap(lambda t: jvp(of, (x,), (t,))[1])(torch.eye(3).to(device)),
        ]

    for _ in range(2):  # recorded for the first time, and again
        assert_same(run(DEVICE), run("cpu"))


_WITH_NUMBERS: list[Function] = [
    lambda zero: zero * 2.0,
    lambda zero: 2.0 * zero,
    lambda zero: zero + 2.0,
    lambda zero: zero - 2.0,
    lambda zero: 2.0 - zero,
    lambda zero: zero / 2.0,
    lambda zero: 2 * zero,
]


def _each_with_number(zero: Tensor) -> list[Tensor]:
    return [with_number(zero).clone() for with_number in _WITH_NUMBERS]


_WITH_ZERO: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "zero + x": lambda zero, x: zero + x,
    "x + zero": lambda zero, x: x + zero,
    "x + 3 zero": lambda zero, x: torch.add(x, zero, alpha=3),
    "zero + 3 x": lambda zero, x: torch.add(zero, x, alpha=3),
    "zero - x": lambda zero, x: zero - x,
    "x - zero": lambda zero, x: x - zero,
    "zero + zero": lambda zero, x: (zero + zero) * x,
    "zero - zero": lambda zero, x: (zero - zero) * x,
    "zero x": lambda zero, x: zero * x,
    "x zero x": lambda zero, x: x * zero * x,
    "2 zero": lambda zero, x: zero * 2 * x,
    "zero / x": lambda zero, x: zero / x * x,
    "x / zero": lambda zero, x: x / zero,
    "zero / zero": lambda zero, x: zero / zero,
    "views": lambda zero, x: zero.view(1, 3).expand(2, 3).t()[..., 0].detach() * x,
    "unbound": lambda zero, x: torch.stack([one * x[0] for one in zero.unbind()]),
    "split": lambda zero, x: zero.split(2)[0] * x[:2],
    "another dtype": lambda zero, x: zero * x.double(),
    "whole numbers": lambda zero, x: zero.new_ones(3, dtype=torch.int64) * zero,
    "broadcast": lambda zero, x: zero + x[:, None],
    "dot product": lambda zero, x: torch.dot(zero, x),
    "not a zero any more": lambda zero, x: zero.clone() * x,
    "beside numbers": lambda zero, x: _each_with_number(zero[0]),
    "a function of it": lambda zero, x: zero.cos() * x,
    "negated": lambda zero, x: -zero + x,
}


@pytest.mark.parametrize("name", _WITH_ZERO)
def test_operations(either_way: None, name: str) -> None:
    for _ in range(2):
        found = {}
        for device in (DEVICE, "cpu"):
            zero = torch.ops.aten._efficientzerotensor([3], device=device)
            result = _WITH_ZERO[name](zero, torch.tensor([_INF, -0.0, 2.0]).to(device))
            found[device] = result if isinstance(result, list) else result.clone()  # which has memory on the CPU
        assert_same(found[DEVICE], found["cpu"])


def test_written_zeros_are_ordinary(either_way: None) -> None:
    """Which the CPU refuses to write to."""
    zero, x = torch.ops.aten._efficientzerotensor([3], device=DEVICE), torch.full([3], 2.0, device=DEVICE)
    view = zero[:2]
    zero += 1
    assert (zero * x).tolist() == [2, 2, 2]
    assert (view * x[:2]).tolist() == [2, 2]
