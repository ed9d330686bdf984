"""What is recorded of convolutions and their gradients is what the CPU's kernels return, whichever it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from .layouts import compare, convolution, laid_out

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    yield
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(onednn)  # pyright: ignore


def _check(choice: random.Random) -> int:
    """How many rules were compared for one random convolution and its gradients."""
    torch.set_num_threads(choice.choice((1, 2)))
    torch._C._set_mkldnn_enabled(choice.random() < 0.7)  # pyright: ignore
    of = convolution(choice)
    checked = compare(aten.convolution.default, (of.input, of.weight, of.bias, *of.options))
    if not checked:
        return 0
    output = aten.convolution.default(of.input, of.weight, of.bias, *of.options)
    wanted = [choice.random() < 0.8, choice.random() < 0.8, choice.random() < 0.8 and of.bias is not None]
    grad = laid_out(choice, output.shape, output.dtype)
    args = grad, of.input, of.weight, of.bias_sizes, *of.options, wanted
    return checked + compare(aten.convolution_backward.default, args)


def test_convolutions_return_what_is_recorded() -> None:
    choice = random.Random(1)
    assert sum(_check(choice) for _ in range(400)) > 400


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_convolutions_return_what_is_recorded(seed: int) -> None:
    choice = random.Random(seed)
    assert sum(_check(choice) for _ in range(2000)) > 2000
