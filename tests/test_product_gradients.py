"""Gradients of products that run at once: one operation each, in the graph, with the bits and strides of PyTorch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import marid
from tests.helpers import DEVICE

pytestmark = pytest.mark.in_process("operations run at once in this process alone")

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

PRODUCTS: dict[str, Product] = {
    "linear": F.linear,
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "mm": lambda x, w, b: x.reshape(-1, x.shape[-1]) @ w.t(),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t()),
    "addmm of a matrix": lambda x, w, b: torch.addmm(b.expand(x.numel() // x.shape[-1], -1), x.flatten(0, -2), w.t()),
    "addmm with factors": lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w.t(), beta=0.5, alpha=2),
    "bmm": lambda x, w, b: torch.bmm(x.reshape(2, -1, x.shape[-1]), w.t().expand(2, -1, -1)),
    "product of itself": lambda x, w, b: x.flatten(0, -2) @ x.flatten(0, -2).t(),
}


def _graph(function: Any) -> Any:
    """The names of a function of autograd and of those behind it."""
    return function and (function.name(), [_graph(one) for one, _ in function.next_functions])


def _same(found: Tensor | None, expected: Tensor | None) -> None:
    """The same bits and strides, but for the strides of dimensions of one element."""
    if found is None or expected is None:
        assert found is expected
        return
    assert torch.equal(found.detach().cpu(), expected.detach())
    steps = [[s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1] for one in (found, expected)]
    assert steps[0] == steps[1]


def _operands(device: str, dtype: torch.dtype, shape: tuple[int, ...], out: int, turned: bool) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(shape, generator=made), torch.randn(out, shape[-1], generator=made)
    if turned:
        x, w = x.transpose(0, -1).contiguous().transpose(0, -1), w.t().contiguous().t()
    b = torch.randn(out, generator=made)
    return [one.to(device, dtype) for one in (x, w, b)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients(at_once: None, name: str, dtype: torch.dtype) -> None:
    shapes = [(4, 8), (2, 8), (8, 1), (64, 32), (2, 3, 8), (4, 2, 1)]
    wanted = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
    for shape, out, turned, needs in itertools.product(shapes, (1, 5, 40), (False, True), wanted):
        results = []
        for device in ("cpu", DEVICE):
            operands = _operands(device, dtype, shape, out, turned)
            for one, needed in zip(operands, needs, strict=True):
                one.requires_grad_(needed)
            y = PRODUCTS[name](*operands)
            if not y.requires_grad:
                break
            graph = _graph(y.grad_fn)
            scale = torch.arange(y.numel(), device=device, dtype=dtype).view(y.shape) / 7
            (y * scale).sum().backward()
            results.append(([y, *(one.grad for one in operands)], graph))
        for (expected, graph), (found, other) in itertools.pairwise(results):
            assert other == graph
            for one, like in zip(found, expected, strict=True):
                _same(one, like)


@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives(at_once: None, name: str) -> None:
    """They have the graph of PyTorch's, so that the terms of a gradient are added up in its order."""
    results = []
    for device in ("cpu", DEVICE):
        x, w, b = (one.requires_grad_() for one in _operands(device, torch.float32, (6, 8), 5, turned=False))
        y = PRODUCTS[name](torch.tanh(x), w, b)
        first = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True, allow_unused=True)
        second = torch.autograd.grad(first[0].tanh().sum(), [x], create_graph=True)
        terms = [one.square().sum() for one in (*first, *second) if one is not None]
        sum(terms, torch.zeros((), device=device)).backward()
        results.append([x.grad, w.grad, b.grad, *second])
    for one, like in zip(*reversed(results), strict=True):
        _same(one, like)


def test_they_are_one_operation_each(at_once: None) -> None:
    layer = nn.Linear(8, 4).to(DEVICE)
    loss = layer(torch.randn(3, 8, device=DEVICE).requires_grad_()).sum()
    loss.backward(retain_graph=True)
    before = marid.stats().ops_immediate
    loss.backward()
    # The gradient of the sum, of the product, of the transposed weight, and three that are added up.
    assert marid.stats().ops_immediate - before <= 8


def test_a_graph_made_at_once_is_gone_through_when_recording() -> None:
    grads = []
    for device in ("cpu", DEVICE):
        x, w, b = (one.requires_grad_() for one in _operands(device, torch.float32, (6, 8), 5, turned=False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marid.settings, "immediate_after", 0)
            torch.ones(2, device=DEVICE).sum().item()
            loss = F.linear(torch.tanh(x), w, b).sin().sum()
        with marid.capture() if device == DEVICE else torch.enable_grad():
            loss.backward()
        grads.append([x.grad, w.grad, b.grad])
    for one, like in zip(*reversed(grads), strict=True):
        _same(one, like)


def test_what_pytorch_refuses(at_once: None) -> None:
    w = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    x = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    y = F.linear(x, w)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    y = F.linear(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(x, w)


def test_hooks_and_saved_tensors(at_once: None) -> None:
    """Hooks on results, on functions and on what these save are called as they are on the CPU."""
    seen: dict[str, list[Any]] = {}
    for device in ("cpu", DEVICE):
        x, w, b = (one.requires_grad_() for one in _operands(device, torch.float32, (4, 8), 3, turned=False))
        calls = seen.setdefault(device, [])

        def pack(saved: Tensor, calls: list[Any] = calls) -> Tensor:
            calls.append(("packed", saved.shape))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = F.linear(x, w, b)
        y.register_hook(lambda grad: grad * 2)
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda to, of, calls=calls: calls.append([g is not None for g in (*to, *of)]))
        y.sum().backward()
        calls.append([one.grad.cpu().tolist() for one in (x, w, b) if one.grad is not None])
    assert seen[DEVICE] == seen["cpu"]


def test_batched_gradients(at_once: None) -> None:
    found = []
    for device in ("cpu", DEVICE):
        x, w, b = (one.requires_grad_() for one in _operands(device, torch.float32, (4, 8), 3, turned=False))
        y = F.linear(x, w, b)
        seeds = torch.eye(12, device=device).view(12, 4, 3)
        found.append(torch.autograd.grad(y, [x, w, b], seeds, is_grads_batched=True))
    for one, like in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(one.cpu(), like)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_forward_mode_and_transforms(at_once: None, device: str) -> None:
    x, w, _ = _operands(device, torch.float32, (4, 8), 3, turned=False)
    both = torch.func.jvp(lambda w: F.linear(x, w).sum(), (w,), (torch.ones_like(w),))
    torch.testing.assert_close(both[1].cpu(), x.sum().cpu() * 3)
    each = torch.func.vmap(torch.func.grad(lambda w, x: F.linear(x, w).sin().sum()), (None, 0))(w, x)
    whole = torch.func.grad(lambda w: F.linear(x, w).sin().sum())(w)
    torch.testing.assert_close(each.sum(0).cpu(), whole.cpu())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint(at_once: None, reentrant: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    grads = []
    for device in ("cpu", DEVICE):
        own, given = copy.deepcopy(net).to(device), x.to(device).detach().requires_grad_()
        checkpoint(own, given, use_reentrant=reentrant).sum().backward()
        grads.append([given.grad, *(parameter.grad for parameter in own.parameters())])
    for one, like in zip(*reversed(grads), strict=True):
        _same(one, like)


def test_complex_products_are_pytorch_s(at_once: None) -> None:
    grads = []
    for device in ("cpu", DEVICE):
        made = torch.Generator().manual_seed(0)
        a, b = (torch.randn(3, 3, dtype=torch.complex64, generator=made).to(device).requires_grad_() for _ in range(2))
        (a @ b).abs().sum().backward()
        grads.append([a.grad, b.grad])
    for one, like in zip(*reversed(grads), strict=True):
        _same(one, like)


@pytest.mark.parametrize("name", PRODUCTS)
def test_compiled_autograd(at_once: None, name: str) -> None:
    """PyTorch's compiled autograd takes the gradients of graphs that were made at once, as it does those of its own."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    for needs in [(True, True, True), (True, False, False), (False, True, False)]:
        results = []
        for device in ("cpu", DEVICE):
            operands = _operands(device, torch.float32, (4, 8), 5, turned=False)
            for one, needed in zip(operands, needs, strict=True):
                one.requires_grad_(needed)
            y = PRODUCTS[name](*operands)
            if not y.requires_grad:
                break
            if device == DEVICE:
                with compiled_autograd._enable(lambda graph: graph):
                    y.sin().sum().backward()
            else:
                y.sin().sum().backward()
            results.append([one.grad for one in operands])
        for expected, found in itertools.pairwise(results):
            for one, like in zip(found, expected, strict=True):
                _same(one, like)
