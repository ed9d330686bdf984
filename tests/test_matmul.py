"""``matmul`` and ``linear`` of all dimensions where they run at once, beside the CPU: bits, layouts and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import marid
from tests.helpers import DEVICE

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("at_once"),
]

Function = Callable[..., Tensor]

SHAPES = [
    *((), (4,), (40,), (3, 4), (4, 3), (0, 4), (17, 40), (40, 33)),
    *((2, 3, 4), (2, 4, 3), (1, 4, 3), (2, 0, 4), (0, 3, 4), (2, 4, 0), (2, 17, 40), (2, 40, 33)),
    *((5, 2, 3, 4), (5, 2, 4, 3), (1, 2, 4, 3), (3, 2, 17, 40), (3, 2, 40, 33)),
]


def _turned(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() >= 2 else x


def _outcome(function: Function, *given: Tensor) -> Any:
    try:
        return function(*given)
    except RuntimeError as error:
        return str(error)


def _check(function: Function, *given: Tensor) -> None:
    want, found = _outcome(function, *given), _outcome(function, *(one.to(DEVICE) for one in given))
    if isinstance(want, str):
        assert found == want, [one.shape for one in given]
        return
    assert isinstance(found, marid.LazyTensor), found
    assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype)
    assert torch.equal(found.cpu(), want), [one.shape for one in given]


def _given(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-9, 9, shape) if dtype == torch.int64 else torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("flagged", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_matmul_without_gradients(dtype: torch.dtype, flagged: bool) -> None:
    if flagged and dtype == torch.int64:
        pytest.skip("whole numbers have no gradients")

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        x, y = x.detach().requires_grad_(flagged), y.detach().requires_grad_(flagged)
        with torch.no_grad():
            return x @ y

    for x, y in ((_given(a, dtype), _given(b, dtype)) for a, b in itertools.product(SHAPES, SHAPES)):
        _check(multiply, x, y)
        _check(lambda x, y: multiply(_turned(x), _turned(y)), x, y)
        if x.dim() >= 3:
            _check(lambda x, y: multiply(x.transpose(0, 1).contiguous().transpose(0, 1), y), x, y)
        if dtype.is_complex:
            _check(lambda x, y: multiply(x.conj(), y), x, y)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear(dtype: torch.dtype, mode: Callable[[], Any]) -> None:
    with mode():
        for shape, columns in itertools.product([one for one in SHAPES if one], [1, 5, 33]):
            x, weight = _given(shape, dtype), _given((columns, shape[-1]), dtype)
            _check(F.linear, x, weight)
            _check(F.linear, _turned(x), _turned(weight), _given((columns,), dtype))
            _check(F.linear, x, weight, _given((columns,), dtype))
            _check(F.linear, x, weight, _given((1,), dtype))
            _check(F.linear, x, weight, _given((1, columns), dtype))
            _check(F.linear, x, weight, _given((shape[-2] if len(shape) > 1 else 1, columns), dtype))
            _check(F.linear, x, weight, _given((columns + 1,), dtype))
    _check(lambda x, w: F.linear(x, w), torch.randn(2, 3), torch.randn(4, 5))


def test_inside_of_inference_mode_and_autocast() -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with torch.inference_mode():
        _check(torch.matmul, x, y)
        _check(torch.matmul, x[0, 0], y[0])
    for device in ("cpu", DEVICE):
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
            made = x.to(device) @ y.to(device)
            assert made.dtype == torch.bfloat16
