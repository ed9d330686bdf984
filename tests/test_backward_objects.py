"""Gradients that only autograd's own functions see have no Python object; all that Python sees are of Marid's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import marid
from tests.helpers import DEVICE

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("at_once"),
]


def _check(tensor: Tensor) -> float:
    """Its sum, where it is a tensor of the device in all that Python does with one."""
    if tensor.device.type == DEVICE:
        assert type(tensor) is marid.LazyTensor
        assert tensor.tolist() == tensor.cpu().tolist()
        assert tensor.numpy(force=True).shape == tuple(tensor.shape)
        assert "remote_accelerator" in repr(tensor)
    return tensor.sum().item()


class _Double(torch.autograd.Function):
    seen: list[float] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Double.seen.append(_check(grads[0]))
        return grads[0] * 2


def _model(device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    return model.to(device), torch.randn(5, 4).to(device)


def _plain(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _accumulated(model: nn.Module, x: Tensor) -> list[Tensor]:
    _plain(model, x)
    return _plain(model, x + 1)


def _of_grad(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    hidden = model[0](x)  # pyright: ignore[reportIndexIssue]
    loss = model[1:](hidden).square().sum()  # pyright: ignore[reportIndexIssue]
    return list(torch.autograd.grad(loss, [x, hidden, *model.parameters()]))


def _passed_on(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A gradient that functions hand on as it is, to one that was asked for."""
    x = x.requires_grad_()
    same = x + 0 * x.detach()
    return list(torch.autograd.grad((model(same) + same.sum()).sum(), [x, same]))


def _second(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    first.square().sum().backward()
    assert x.grad is not None
    return [first.detach(), x.grad, *_plain(model, x.detach())]


def _hooks(model: nn.Module, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    hidden = model[0](x)  # pyright: ignore[reportIndexIssue]
    hidden.register_hook(lambda grad: seen.append(grad))
    out = model[1:](hidden)  # pyright: ignore[reportIndexIssue]
    out.grad_fn.register_hook(lambda ins, outs: seen.extend(one for one in (*ins, *outs) if one is not None))
    out.grad_fn.register_prehook(lambda grads: seen.extend(grads))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    hidden.retain_grad()
    out.square().sum().backward()
    return [*seen, hidden.grad]


def _module_hooks(model: nn.Module, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    for part in model.modules():
        part.register_full_backward_hook(lambda _m, ins, outs: seen.extend(g for g in (*ins, *outs) if g is not None))
    _plain(model, x.requires_grad_())
    return seen


def _function(model: nn.Module, x: Tensor) -> list[Tensor]:
    _Double.seen = []
    hidden = _Double.apply(model[0](x))  # pyright: ignore[reportIndexIssue]
    (_Double.apply(model[1:](hidden)) + 1).square().sum().backward()  # pyright: ignore[reportIndexIssue]
    assert len(_Double.seen) == 2
    return [torch.tensor(_Double.seen), *_plain(model, x)]


class _DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Double.seen.append(_check(grads[0]))
        return grads[0] * 2


def _through_a_view(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A function in Python inside of autograd's own for a write through a view."""
    _Double.seen = []
    out = model(x)
    _DoubleInPlace.apply(out[1])
    out.square().sum().backward()
    return [torch.tensor(_Double.seen), *(p.grad for p in model.parameters() if p.grad is not None)]


def _checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], list[Tensor]]:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        out.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    return run


def _watched(model: nn.Module, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(one for one in args if isinstance(one, Tensor))
            return func(*args, **(kwargs or {}))

    loss = model(x).square().sum()
    with Watching():
        loss.backward()
    assert len(seen) > 10
    return [one.detach() for one in seen if one.is_floating_point()]


def _two_kinds(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A graph of which one branch is seen by Python, and the other is not."""
    seen: list[Tensor] = []
    one, other = model(x), model(x * 2)
    other.register_hook(lambda grad: seen.append(grad))
    (one.square().sum() + other.exp().sum()).backward()
    return [*seen, *(p.grad for p in model.parameters() if p.grad is not None)]


RUNS = {
    "plain": _plain,
    "accumulated": _accumulated,
    "autograd.grad": _of_grad,
    "handed on": _passed_on,
    "second derivatives": _second,
    "hooks of tensors and functions": _hooks,
    "hooks of modules": _module_hooks,
    "functions in Python": _function,
    "function in Python through a view": _through_a_view,
    "checkpointed": _checkpointed(False),
    "checkpointed, reentrant": _checkpointed(True),
    "watched by a mode": _watched,
    "two branches": _two_kinds,
}


@pytest.mark.parametrize("name", RUNS)
def test_all_that_python_sees(name: str) -> None:
    for _ in range(2):
        expected = [_check(one) for one in RUNS[name](*_model("cpu"))]
        assert [_check(one) for one in RUNS[name](*_model(DEVICE))] == expected


def test_gradients_of_a_batch() -> None:
    def run(device: str) -> list[float]:
        model, x = _model(device)
        out = model(x.requires_grad_())
        directions = torch.eye(3, device=device).unsqueeze(1).expand(3, 5, 3)
        (found,) = torch.autograd.grad(out, x, directions, is_grads_batched=True)
        return [_check(found), *map(_check, found)]

    assert run(DEVICE) == run("cpu")


def test_what_python_computes_in_a_backward() -> None:
    """An operator that has no kernel for the device in C++ is given tensors of Marid's class there, too."""
    model, x = _model(DEVICE)
    out = torch.linalg.lstsq(model(x).t() @ model(x) + torch.eye(3, device=DEVICE), torch.ones(3, 1, device=DEVICE))
    out.solution.sum().backward()
    assert all(type(p.grad) is marid.LazyTensor for p in model.parameters())
