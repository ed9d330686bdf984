"""Results inside of composite operators, which have no Python object where operations run at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from tests.helpers import DEVICE

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("at_once"),
]

Composite = Callable[[Tensor, Tensor], Any]


def _cell(x: Tensor, w: Tensor) -> Tensor:
    return torch.gru_cell(x, x, w.repeat(3, 1), w.repeat(3, 1))


COMPOSITES: dict[str, Composite] = {
    "gru_cell": _cell,
    "lstm_cell": lambda x, w: torch.lstm_cell(x, [x, x], w.repeat(4, 1), w.repeat(4, 1)),
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, w[0]),
    "linear of three dimensions": lambda x, w: F.linear(x[None], w, w[0]),
    "linear of a vector": lambda x, w: F.linear(x[0], w),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "cross_entropy": lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2], device=x.device)),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, w),
    "matmul of batches": lambda x, w: x.repeat(2, 1, 1) @ w.repeat(2, 1, 1),
    "matmul of batches that are broadcast": lambda x, w: x.repeat(2, 1, 1, 1) @ w.repeat(4, 1, 1).view(2, 2, 3, 3),
    "matmul of a vector": lambda x, w: x[0] @ w,
    "matmul of a batch and a matrix": lambda x, w: x.repeat(2, 1, 1).transpose(0, 1) @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (3,), w[0], w[1]),
    "group_norm": lambda x, w: F.group_norm(x, 3, w[0], w[1]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    "instance_norm": lambda x, w: F.instance_norm(torch.stack([x, w])),
    "max_pool2d": lambda x, w: F.max_pool2d((x * w)[None], 2, 1),
    "outer": lambda x, w: torch.outer(x[0], w[1]),
    "lstm": lambda x, w: torch.lstm(
        x[None], (x[None], x[None]), [w.repeat(4, 1), w.repeat(4, 1)], False, 1, 0.0, True, False, False
    ),
}


def _operands(device: str) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return tuple(torch.rand(3, 3, generator=made).to(device).requires_grad_() for _ in range(2))  # pyright: ignore


def _tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [one for one in made if isinstance(one, Tensor)]


def _functions(function: Any, found: dict[Any, None]) -> None:
    if function is None or function in found:
        return
    found[function] = None
    for one, _ in function.next_functions:
        _functions(one, found)


@pytest.mark.parametrize("name", COMPOSITES)
def test_results_and_gradients_are_the_cpus_and_of_the_devices_class(name: str) -> None:
    of = COMPOSITES[name]
    found = []
    for device in ("cpu", DEVICE):
        x, w = _operands(device)
        for _ in range(3):  # the first calls of an operator are left to Python
            made = _tensors(of(x, w))
            grads = torch.autograd.grad(
                torch.stack([one.square().sum() for one in made]).sum(), [x, w], allow_unused=True, create_graph=True
            )
            second = torch.autograd.grad(torch.stack([g.sum() for g in grads if g is not None]).sum(), x)
        found.append([*made, *(g for g in grads if g is not None), *second])
    for expected, one in zip(*found, strict=True):
        assert type(one) is marid.LazyTensor
        assert torch.equal(one.detach().cpu(), expected.detach())


@pytest.mark.parametrize("name", COMPOSITES)
def test_saved_tensors_can_be_looked_at_before_the_backward(name: str) -> None:
    """Objects that PyTorch makes for them meanwhile do not disturb it."""
    found = []
    for device in ("cpu", DEVICE):
        x, w = _operands(device)
        made = _tensors(COMPOSITES[name](x, w))
        functions: dict[Any, None] = {}
        _functions(made[0].grad_fn, functions)
        looked_at = [
            value
            for function in functions
            for attribute in dir(function)
            if attribute.startswith("_saved_") and isinstance(value := getattr(function, attribute), Tensor)
        ]
        for one in looked_at:
            assert (one + one).device.type == one.device.type
        found.append(torch.autograd.grad(made[0].square().sum(), x)[0].cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", COMPOSITES)
def test_hooks_for_saved_tensors_get_tensors_of_the_device(name: str) -> None:
    seen: list[type] = []

    def pack(one: Tensor) -> Tensor:
        seen.append(type(one))
        return one

    x, w = _operands(DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        made = _tensors(COMPOSITES[name](x, w))
    assert set(seen) == {marid.LazyTensor}
    made[0].sum().backward()
    assert type(x.grad) is marid.LazyTensor


def test_modes_get_tensors_of_the_device() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            seen.extend(type(one) for one in [*args, *_tensors(made)] if isinstance(one, Tensor))
            return made

    seen: list[type] = []
    x, w = _operands(DEVICE)
    with Mode():
        _cell(x, w)
    assert set(seen) == {marid.LazyTensor}


def test_what_the_collector_runs_meanwhile_is_python() -> None:
    """A finalizer that computes inside of a composite gets tensors of the device's class."""
    seen: list[type] = []

    class Last:
        def __del__(self) -> None:
            seen.append(type(x.detach() * 2))

    x, w = _operands(DEVICE)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            last = Last()
            last.itself = last  # pyright: ignore[reportAttributeAccessIssue]
            del last
            _cell(x, w)
    finally:
        gc.set_threshold(*threshold)
    assert seen
    assert set(seen) == {marid.LazyTensor}


def test_transforms_of_composites() -> None:
    x, w = _operands(DEVICE)
    for name in ("gru_cell", "linear", "cross_entropy"):
        of = COMPOSITES[name]
        found = torch.func.grad(lambda x, of=of: of(x, w.detach()).sum())(x.detach())
        expected = torch.func.grad(lambda x, of=of: of(x, w.detach().cpu()).sum())(x.detach().cpu())
        assert torch.allclose(found.cpu(), expected)
        assert isinstance(found, marid.LazyTensor)


def test_dropout_in_training_has_the_cpus_numbers() -> None:
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(3)
        x, _ = _operands(device)
        layer = nn.Dropout(0.4)
        total = sum((layer(x).sum() for _ in range(4)), torch.zeros((), device=device))
        total.backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    assert torch.equal(*found)


def test_gradients_of_a_tensor_that_is_used_often_add_up_alike() -> None:
    """Sums of gradients run at once, whatever their layouts."""
    for turned in (False, True):
        found = []
        for device in ("cpu", DEVICE):
            x, w = _operands(device)
            leaf = x.t() if turned else x
            total = (leaf * w).sum() + (leaf.t() * w).sum() + leaf.square().sum() + leaf[1:, :1].expand(-1, 3).sum()
            total.backward()
            assert x.grad is not None
            found.append((x.grad.cpu(), x.grad.stride()))
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
