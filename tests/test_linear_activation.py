"""The operator ``marid::linear_activation``: on the CPU, on the device, its gradients, and one node for a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import marid
from marid.frontend.linear_activation import ACTIVATIONS
from tests.helpers import DEVICE, assert_same, on_both

op = torch.ops.marid.linear_activation

PLAIN: dict[str, Any] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "squared_relu": lambda y: torch.relu(y).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}


def _tensors(device: str, shape: tuple[int, ...] = (3, 4, 6), grad: bool = False, dtype: Any = None) -> list[Any]:
    made = [torch.randn(s, dtype=dtype, device=device) for s in (shape, (5, 6), (5,))]
    return [t.requires_grad_(grad) for t in made]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 4, 6), (0, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_and_the_activation(activation: str, shape: tuple[int, ...], bias: bool) -> None:
    """Bit for bit, for every shape that ``linear`` takes, on both devices and in repeated programs."""
    x, w, b = _tensors("cpu", shape)
    b = b if bias else None
    expected = PLAIN[activation](F.linear(x, w, b))
    assert_same(op(x, w, b, activation), expected)
    given = [t if t is None else t.to(DEVICE) for t in (x, w, b)]
    for _ in range(3):
        assert_same(op(*given, activation), expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_call_is_one_node(activation: str, grad: bool) -> None:
    """Also where gradients are wanted."""
    x, w, b = _tensors(DEVICE, grad=grad)
    marid.materialize(x, w, b)
    before = marid.stats().ops_captured
    y = op(x, w, b, activation)
    assert marid.stats().ops_captured == before + 1
    assert y.operation == ("marid::_linear_activation" if grad else "marid::linear_activation")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation: str) -> None:
    """First and second derivatives are right, on the device they are the CPU's, and close to those of the two calls."""
    torch.manual_seed(3)
    inputs = _tensors("cpu", grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: op(*t, activation), inputs)
    if activation != "relu":
        assert torch.autograd.gradgradcheck(lambda *t: op(*t, activation), inputs)

    def gradients(device: str) -> Any:
        x, w, b = _tensors(device, grad=True)
        y = op(x, w, b, activation)
        return torch.autograd.grad(y.square().sum(), (x, w, b))

    for _ in range(3):
        found = on_both(gradients)
    torch.manual_seed(0)
    x, w, b = _tensors("cpu", grad=True)
    plain = torch.autograd.grad(PLAIN[activation](F.linear(x, w, b)).square().sum(), (x, w, b))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_only_what_needs_a_gradient_gets_one() -> None:
    """Constant inputs, and a missing bias, have none."""
    x, w, _ = _tensors(DEVICE)
    w.requires_grad_()
    op(x, w, None, "gelu").sum().backward()
    assert x.grad is None
    assert w.grad is not None


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_function_transforms(device: str) -> None:
    """``torch.func`` takes it apart as it takes the two calls apart."""
    x, w, b = _tensors(device, (4, 6))
    plain = torch.func.grad(lambda w: F.gelu(F.linear(x, w, b)).sum())(w)
    torch.testing.assert_close(torch.func.grad(lambda w: op(x, w, b, "gelu").sum())(w), plain)
    weights = torch.stack([w, w * 2])
    plain = torch.func.vmap(lambda w: F.silu(F.linear(x, w, b)))(weights)
    torch.testing.assert_close(torch.func.vmap(lambda w: op(x, w, b, "silu"))(weights), plain)
    plain = torch.func.vmap(lambda x: F.relu(F.linear(x, w, b)))(x)
    torch.testing.assert_close(torch.func.vmap(lambda x: op(x, w, b, "relu"))(x), plain)


def test_operands_stay_as_they_are_under_autocast() -> None:
    """The operator is on no list of autocast's."""
    for device in ("cpu", DEVICE):
        x, w, b = _tensors(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            y = op(x, w, b, "relu")
        assert_same(y, F.linear(x, w, b).relu().cpu())


def test_misuse_is_an_error_at_its_line() -> None:
    """An unknown activation, and what ``linear`` refuses."""
    for device in ("cpu", DEVICE):
        x, w, b = _tensors(device)
        with pytest.raises(ValueError, match=r"knows none, relu, .* but got 'swish'"):
            op(x, w, b, "swish")
        with pytest.raises(RuntimeError):
            op(x, w.t(), b, "relu")
