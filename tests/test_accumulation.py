"""Where gradients meet, autograd adds into the first of them, and the sum lies in memory as that one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from tests.helpers import DEVICE, assert_same

Tensors = list[torch.Tensor]


def _gradients(work: Callable[[str], Tensors], device: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    torch.manual_seed(0)
    found = work(device)
    return [(gradient.cpu(), gradient.stride()) for leaf in found if (gradient := leaf.grad) is not None]


def _compare(work: Callable[[str], Tensors], recorded: bool = False) -> None:
    expected, found = _gradients(work, "cpu"), _gradients(marid.compile(work) if recorded else work, DEVICE)
    assert expected
    assert [stride for _, stride in found] == [stride for _, stride in expected]
    for (a, _), (b, _) in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def _leaf(shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.empty_strided(shape, stride).copy_(torch.randn(shape)).to(device).requires_grad_()


def _one_weight_for_two_convolutions(device: str) -> Tensors:
    weight = _leaf((4, 3, 1, 1), (3, 1, 3, 3), device)
    inputs = [torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last).to(device) for _ in range(3)]
    sum(F.conv2d(x, weight).sin().sum() for x in inputs).backward()  # pyright: ignore
    return [weight]


def _spectral_norm(device: str) -> Tensors:
    conv = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
    normed = torch.nn.utils.parametrizations.spectral_norm(conv).to(device, memory_format=torch.channels_last)
    normed(torch.randn(2, 3, 6, 6).to(device)).sin().sum().backward()
    return list(normed.parameters())


def _read_by_a_hook(device: str) -> Tensors:
    kept: Tensors = []
    x = _leaf((3, 1, 4), (4, 9, 1), device)
    middle = x.tanh()
    middle.register_hook(lambda gradient: kept.append(gradient + gradient))
    ((middle * 2).sum() + (middle * middle).sum()).backward()
    x.grad = None if x.grad is None else x.grad + kept[0]
    return [x]


@pytest.mark.parametrize("work", [_one_weight_for_two_convolutions, _spectral_norm, _read_by_a_hook])
def test_strides_of_sums(work: Callable[[str], Tensors]) -> None:
    """As those of the term that came first, in dimensions of one element too."""
    _compare(work)


STEPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(torch.tanh, lambda x: x * 2, lambda x: x * x, lambda x: x.transpose(0, 1).sin().transpose(0, 1)),
    *(lambda x: x.reshape(-1).cos().view(x.shape), lambda x: x.flip(0), lambda x: x + 1, lambda x: x + x),
    *(lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0), lambda x: x.sum(1, keepdim=True) + x),
    *(lambda x: x.expand(2, *x.shape).sum(0), lambda x: torch.stack([x, x], -1).amax(-1), lambda x: x.clone()),
]


def _random_graph(seed: int) -> Callable[[str], Tensors]:
    def work(device: str) -> Tensors:
        choice = random.Random(seed)
        shape = [choice.choice((1, 1, 2, 3)) for _ in range(3)]
        order, step, stride = choice.sample(range(3), 3), 1, [0] * 3
        for dim in order:
            stride[dim] = step if shape[dim] > 1 else choice.choice((1, step, 7))
            step *= shape[dim]
        leaves = [_leaf((*shape,), (*stride,), device) for _ in range(2)]
        values = [*leaves]
        for _ in range(choice.randint(3, 9)):
            value = choice.choice(STEPS)(choice.choice(values))
            values.append(value * choice.choice(values) if choice.random() < 0.4 else value)
        sum(value.sum() * number for number, value in enumerate(values[2:], 1)).backward()  # pyright: ignore
        return leaves

    return work


@pytest.mark.parametrize("part", range(3))
def test_random_graphs(part: int) -> None:
    """Leaves with dimensions of one element and odd strides there, used several times."""
    for seed in range(part * 60, (part + 1) * 60):
        _compare(_random_graph(seed))


def test_sums_in_recordings() -> None:
    """A function is recorded under a dispatch mode, where autograd would add another way; not under that of Marid."""
    for seed in range(30):
        _compare(_random_graph(seed), recorded=True)


def test_sums_under_a_mode_of_the_users() -> None:
    """Autograd makes a new tensor for each, on the CPU too."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for seed in range(30):
        with Mode():
            _compare(_random_graph(seed))


def test_a_sum_with_zeros_that_have_no_memory_lies_as_the_other_term() -> None:
    """The derivative of `sgn`, within the second derivative of `abs`, is such: a gradient that is added to it keeps its
    layout, by which the sums behind are rounded."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        norm = torch.nn.RMSNorm([7]).to(device)
        x = torch.randn(5, 2, 7, 7).to(device).to(memory_format=torch.channels_last).requires_grad_()
        seen: list[Any] = []
        y = norm(x * 1)
        y.register_hook(lambda grad: seen.append(grad.stride()))
        z = y.abs()
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        (z.sum() + slope.mean()).backward()
        return [*seen, norm.weight.grad, x.grad]

    assert_same(run(DEVICE), run("cpu"))
    zeros = torch.ops.aten._efficientzerotensor([2], device=DEVICE)
    zeros += 1  # which the CPU refuses: these are no zeros any more
    assert (zeros + torch.ones(2, device=DEVICE)).tolist() == [2.0, 2.0]


def test_zeros_that_have_got_other_values() -> None:
    """By ways that autograd does not see: they are no zeros any more, in a backward either."""
    assigned, written = (torch.ops.aten._efficientzerotensor([2], device=DEVICE) for _ in range(2))
    assigned.data = torch.ones(2, device=DEVICE)
    written.data.add_(1)
    found: list[torch.Tensor] = []
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: found.extend([assigned + grad, grad + written]))
    y.sum().backward()
    assert [one.tolist() for one in found] == [[2.0, 2.0], [2.0, 2.0]]
