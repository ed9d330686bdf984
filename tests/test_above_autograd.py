"""Calls without gradients, which pass PyTorch's kernels above autograd by; all others have to be seen by these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from tests.helpers import DEVICE, assert_same

pytestmark = pytest.mark.usefixtures("either_way")

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda x, y: torch.tanh(x),
    "add": torch.add,
    "mul of a number": lambda x, y: x * 2.5,
    "mm": lambda x, y: x @ y,
    "addmm": lambda x, y: torch.addmm(y[0], x, y),
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "index": lambda x, y: x[torch.tensor([0, 2], device=x.device)],
    "gather": lambda x, y: x.gather(1, torch.zeros(3, 1, dtype=torch.int64, device=x.device)),
    "softmax": lambda x, y: F.softmax(x, -1),
    "layer_norm": lambda x, y: F.layer_norm(x, (3,), y[0], y[1]),
    "where": lambda x, y: torch.where(x > 0.5, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "sum": lambda x, y: x.sum(0),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "var": lambda x, y: x.var(0),
    "norm": lambda x, y: x.norm(),
    "prod": lambda x, y: x.prod(),
    "cumsum": lambda x, y: x.cumsum(0),
    "max": lambda x, y: x.max(1).values,
    "topk": lambda x, y: x.topk(2).values,
    "clamp": lambda x, y: x.clamp(0.2, 0.8),
    "masked_fill": lambda x, y: x.masked_fill(y > 0.5, 0.0),
    "embedding": lambda x, y: F.embedding(torch.tensor([1, 1, 0], device=x.device), x),
    "gelu": lambda x, y: F.gelu(x),
    "to another type": lambda x, y: x.double(),
    "clone": lambda x, y: x.clone(),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
}


def _operands(device: str) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.rand(3, 3, generator=made).to(device), torch.rand(3, 3, generator=made).to(device)


def _names(function: Any) -> Any:
    return function and (function.name(), [_names(one) for one, _ in function.next_functions])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_need_gradients_where_an_operand_does_and_nowhere_else(name: str) -> None:
    of = FUNCTIONS[name]
    for needed in ((False, False), (True, False), (False, True), (True, True)):
        found = []
        for device in ("cpu", DEVICE):
            x, y = (one.requires_grad_(wanted) for one, wanted in zip(_operands(device), needed, strict=True))
            with torch.no_grad():
                without = of(x, y)
            assert without.grad_fn is None
            assert not without.requires_grad
            made = of(x, y)
            grads: tuple[Tensor | None, ...] = ()
            if made.requires_grad:
                wanted = [one for one in (x, y) if one.requires_grad]
                grads = torch.autograd.grad(made.square().sum(), wanted, allow_unused=True)
            found.append((made, _names(made.grad_fn), grads, without))
        (expected, graph, expected_grads, expected_without), (made, own_graph, grads, without) = found
        assert (made.requires_grad, made.is_leaf, own_graph) == (expected.requires_grad, expected.is_leaf, graph)
        for one, other in [(made, expected), (without, expected_without), *zip(grads, expected_grads, strict=True)]:
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.detach().cpu(), other.detach())


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_forward_derivatives_go_through(name: str) -> None:
    """An operand with a tangent needs PyTorch's kernel, though it requires no gradient."""
    found = []
    for device in ("cpu", DEVICE):
        x, y = _operands(device)
        with forward.dual_level():
            made = FUNCTIONS[name](forward.make_dual(x, y), y)
            found.append(list(forward.unpack_dual(made)))
    for expected, made in zip(*found, strict=True):
        assert (expected is None) == (made is None)
        assert expected is None or torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda x: x])
def test_forward_derivatives_of_views_of_conjugated_tensors(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The tangent becomes a tensor like the other one, which need not be conjugated itself."""
    given, tangent = torch.randn(2, 3, dtype=torch.complex64), torch.randn(2, 3, dtype=torch.complex64)
    found = []
    for device in ("cpu", DEVICE):
        with forward.dual_level():
            dual = forward.make_dual(view(given.to(device)), tangent.to(device))
            parts = forward.unpack_dual(dual[1:] * dual.t()[:, :1])
            found.append([part.cpu() for part in parts])
    for expected, made in zip(*found, strict=True):
        assert torch.equal(made, expected)


def test_tensors_with_bits_are_resolved() -> None:
    """A conjugated or negated view is not what its memory holds."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    on = x.to(DEVICE)
    for of in (
        lambda x: x.conj() * x,
        lambda x: torch.tanh(x.conj()),
        lambda x: x.conj().imag + 1,
        lambda x: x.conj() @ x,
    ):
        assert torch.equal(of(on).cpu(), of(x))


def test_zeros_without_memory_are_operands() -> None:
    zeros, x = torch.ops.aten._efficientzerotensor((3,), device=DEVICE), torch.ones(3, device=DEVICE)
    assert (zeros + x).tolist() == [1, 1, 1]
    assert torch.tanh(zeros).tolist() == [0, 0, 0]


def test_modes_and_transforms_see_calls_without_gradients() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x, y = _operands(DEVICE)
    with Mode():
        torch.tanh(x)
        torch.mm(x, y)
    assert seen == ["aten.tanh.default", "aten.mm.default"]
    assert torch.allclose(
        torch.func.vmap(torch.mv, (None, 0))(x, y).cpu(), torch.func.vmap(torch.mv, (None, 0))(x.cpu(), y.cpu())
    )
    found = torch.func.grad(lambda x: torch.tanh(x).mul(y).sum())(x)
    assert torch.equal(found.cpu(), torch.func.grad(lambda x: torch.tanh(x).mul(y.cpu()).sum())(x.cpu()))


class _Halved(TorchDispatchMode):
    """Notes what it sees, and halves products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        made = func(*args, **(kwargs or {}))
        return made / 2 if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else made


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x[0], x[1]),
        lambda x: F.linear(x, x[0], x[0, :, 0]),
        lambda x: F.max_pool1d(x, 2),
        F.silu,
        F.mish,
    ],
    ids=["linear", "linear with a bias", "pool", "silu", "mish"],
)
def test_modes_see_the_operators_that_they_see_on_the_cpu(
    function: Callable[[Tensor], Tensor], gradients: bool
) -> None:
    def results(device: str) -> list[Any]:
        x = torch.linspace(-3, 3, 32).reshape(2, 4, 4).to(device).requires_grad_(gradients)
        with _Halved() as mode:
            made = function(x)
            if gradients:
                made.sum().backward()
        seen = [name for name in mode.seen if "detach" not in name]
        return [seen, made.detach(), x.grad]

    assert_same(results(DEVICE), results("cpu"))


def test_saved_tensors_are_shown_to_hooks() -> None:
    saved: list[Tensor] = []

    def pack(one: Tensor) -> Tensor:
        saved.append(one)
        return one

    x, y = _operands(DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        torch.tanh(x)
        assert not saved
        torch.tanh(x.requires_grad_()).mul(y).sum().backward()
    assert len(saved) == 2
    assert all(isinstance(one, marid.LazyTensor) for one in saved)


def test_profilers_see_each_operator_once() -> None:
    x, y = _operands(DEVICE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.tanh(x)
        torch.addcmul(x, y, y)
    names = [event.name for event in profile.events() or ()]
    assert names.count("aten::addcmul") >= 1
    assert names[0] == "aten::tanh"
