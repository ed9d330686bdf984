"""What is recorded of convolutions and their gradients is what the CPU's kernels return, whichever it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import DEVICE

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


_INPUTS = [(), (3,), (3, 3), (2, 4, 8), (0, 4, 8), (2, 0, 8), (2, 4, 0), (2, 4, 8, 8), (2, 4, 4, 4, 4), (2,) * 6]
_WEIGHTS = [(), (3,), (4, 4), (4, 2, 3), (0, 4, 3), (4, 0, 3), (4, 4, 0), (4, 4, 9, 9), (4, 4, 1, 1, 1), (2,) * 6]
_OPTIONS: list[dict[str, Any]] = [
    *({}, {"stride": 0}, {"stride": -1}, {"stride": ()}, {"stride": (1, 1)}, {"padding": -1}, {"dilation": 0}),
    *({"dilation": -1}, {"groups": 0}, {"groups": -1}, {"groups": 2}),
]


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"])
def test_sizes_that_do_not_fit_raise_what_eager_raises(name: str) -> None:
    """Whatever the number of dimensions: PyTorch's own question about the backend is not asked of any."""

    def outcome(device: str) -> Any:
        input, weight = torch.ones(shape, device=device), torch.ones(kernel, device=device)
        try:
            return getattr(F, name)(input, weight, **options).shape
        except (RuntimeError, ValueError) as error:
            return type(error)

    choice = random.Random(name)
    for shape in _INPUTS:
        for kernel in _WEIGHTS:
            options = choice.choice(_OPTIONS)
            assert outcome(DEVICE) == outcome("cpu"), (shape, kernel, options)
