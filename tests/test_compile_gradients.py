"""Gradients through ``marid.compile`` where some do not come: what is None without it is None with it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from tests.helpers import DEVICE, assert_same

CALLS = 6


class _Stop(torch.autograd.Function):
    """The identity, with no gradient at all behind it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


def _two(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x.exp(), (x * w).sin()


def _apart(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x * 2, w.square()


def _with_integers(x: torch.Tensor, w: torch.Tensor) -> Any:
    values, places = (x * w).sort()
    return values, places, x.detach() * 2, x.cos()


def _ignoring(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x.cos(), (w.detach() + 1) * x


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "no gradient comes": lambda results: _Stop.apply(results[0]).sum(),  # pyright: ignore
    "for the first only": lambda results: results[0].sum(),
    "for the last only": lambda results: results[-1].sum(),
    "none for the first": lambda results: _Stop.apply(results[0]).sum() + results[-1].sum(),  # pyright: ignore
    "for both": lambda results: results[0].sum() + 2 * results[-1].sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("function", [_two, _apart, _with_integers, _ignoring])
def test_gradients_that_do_not_come(function: Callable[..., Any], loss: str) -> None:
    """``backward`` leaves ``grad`` None where eager PyTorch does, recorded and replayed."""
    _check(function, [LOSSES[loss]] * CALLS)


@pytest.mark.parametrize("function", [_two, _apart, _with_integers, _ignoring])
def test_gradients_that_come_at_some_calls_only(function: Callable[..., Any]) -> None:
    """Each call of the same replayed function may take gradients of other results."""
    _check(function, [*LOSSES.values()] * 2)


def _check(function: Callable[..., Any], losses: list[Callable[[Any], torch.Tensor]]) -> None:
    found = []
    compiled = marid.compile(function)
    for device, run in (("cpu", function), (DEVICE, compiled)):
        of_device = []
        for call, loss in enumerate(losses):
            x = torch.linspace(-1, call, 5).to(device).requires_grad_()
            w = torch.linspace(1, 2, 5).to(device).requires_grad_()
            total = loss(run(x, w))
            total.backward()
            of_device.append((total.detach(), x.grad, w.grad))
        found.append(of_device)
    assert_same(found[1], found[0])
    assert compiled.stats().replays == len(losses) - 2


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
def test_inputs_that_a_result_does_not_depend_on(asked: tuple[int, ...]) -> None:
    """``torch.autograd.grad(..., allow_unused=True)`` gives None for them; without, PyTorch's error."""
    compiled = marid.compile(_apart)
    found: list[Any] = []
    for device, run in (("cpu", _apart), (DEVICE, compiled)):
        for _ in range(CALLS):
            inputs = [torch.ones(3, device=device, requires_grad=True) for _ in range(2)]
            first, _second = run(*inputs)
            gradients = torch.autograd.grad(
                first.sum(), [inputs[i] for i in asked], allow_unused=True, retain_graph=True
            )
            message = None
            if 1 in asked:
                with pytest.raises(RuntimeError) as caught:
                    torch.autograd.grad(first.sum(), inputs[1])
                message = str(caught.value)
            found.append((gradients, message))
    assert_same(found[CALLS:], found[:CALLS])
    assert compiled.stats().replays == CALLS - 2


def test_a_parameter_that_a_step_leaves_without_gradient() -> None:
    """In a training step inside of the function: a branch that is used in every other call only."""

    def make(device: str) -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4).to(device) for _ in range(2)]

        def step(x: torch.Tensor, both: bool) -> Any:
            for layer in layers:
                layer.zero_grad()
            out = layers[0](x)
            (layers[1](out) if both else out).square().mean().backward()

        return layers, step

    found = []
    for device in ("cpu", DEVICE):
        layers, step = make(device)
        run = marid.compile(step) if device == DEVICE else step
        gradients: list[Any] = []
        for call in range(10):
            run(torch.full((2, 4), call / 10, device=device), call % 2 == 0)
            gradients.append([None if p.grad is None else p.grad.clone() for m in layers for p in m.parameters()])
        found.append(gradients)
    assert_same(found[1], found[0])
    assert marid.stats().functions[0].replays >= 4


class _Keeping(torch.autograd.Function):
    """Saves what it computes on the way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        half = x / 2
        ctx.save_for_backward(half)
        return half.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (half,) = ctx.saved_tensors
        return grads[0] * half.cos() / 2


def _packing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor * 2,), lambda packed: packed[0] / 2):
        return (x * w).exp()


KEEPING: dict[str, Callable[..., torch.Tensor]] = {
    "saved": lambda x, w: (x * w).exp().tanh(),
    "saved by the user": lambda x, w: _Keeping.apply(x * w),  # pyright: ignore[reportReturnType]
    "packed by the user": _packing,
    "the base of a view": lambda x, w: (x * w.detach()).exp().view(-1)[1:],
    "the base of a view without gradient": lambda x, w: (x.detach() + w.detach()).exp().t()[0] * 1 + x.view(-1)[0],
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_autograd_keeps_is_found_without_a_look_at_the_heap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no result that somebody unknown keeps."""
    if name == "packed by the user" and not hasattr(torch._C._autograd.SavedTensor, "data"):
        pytest.skip("this PyTorch does not show what hooks have packed, and the function runs as Python")
    monkeypatch.setattr(gc, "get_objects", None)
    _check(KEEPING[name], [torch.sum] * CALLS)


def test_hooks_on_one_of_several_results() -> None:
    """They run where a gradient comes, and only there."""

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        for call, (x, results) in enumerate(_calls_of_several(device, 6)):
            for index, result in enumerate(results):
                result.register_hook(
                    lambda grad, index=index: found.append((index, grad.contiguous().cpu())) or grad * 3
                )
            found.append([result.output_nr for result in results])
            sum(result.sum() for result in results[call % 3 :]).backward()  # pyright: ignore[reportAttributeAccessIssue]
            found.append(x.grad.cpu() if x.grad is not None else None)
        return found

    assert_same(run(DEVICE), run("cpu"))


def _several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.exp(), x * 2, x.sin()


def _calls_of_several(device: str, count: int) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Inputs and results; on the device under ``marid.compile``."""
    function = _several if device == "cpu" else marid.compile(_several)
    for _ in range(count):
        x = torch.linspace(-1, 1, 5).to(device).requires_grad_()
        yield x, function(x)


@pytest.mark.parametrize("written", range(3))
def test_writing_to_one_of_several_results(written: int) -> None:
    """The backward of the exponential has saved it."""

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        for x, results in _calls_of_several(device, 4):
            results[written].mul_(2)
            found += [[result.detach().cpu(), result._version] for result in results]
            try:
                sum(result.sum() for result in results).backward()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
            found.append(None if x.grad is None else x.grad.cpu())
        return found

    assert_same(run(DEVICE), run("cpu"))
