"""Strides of results are those of eager PyTorch before anything has run, whatever the sizes; so are the values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marid
from tests.helpers import on_both, seeded


def _looks_like_channels_last(device: str, *shape: int) -> torch.Tensor:
    """MemoryLayout out like that, and never declared so."""
    batch, channels, *sizes = shape
    count = torch.Size(sizes).numel()
    return torch.randn(batch, count, channels).to(device).transpose(1, 2).reshape(shape)


def _differentiated(module: nn.Module, *inputs: torch.Tensor) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = module(*leaves)
    grads = torch.autograd.grad(out.square().sum(), [*leaves, *module.parameters()])
    return out, grads


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 32), nn.InstanceNorm2d(32, affine=True), nn.BatchNorm2d(32)])
def test_norms_behind_convolutions_of_undeclared_channels_last(norm: nn.Module, batch: int) -> None:
    def run(device: str) -> Any:
        block = seeded(nn.Sequential(nn.Conv2d(32, 32, 1), norm, nn.Conv2d(32, 32, 3)), device)
        return _differentiated(block, _looks_like_channels_last(device, batch, 32, 8, 8))

    on_both(run)


_UNINTERRUPTED: list[Callable[[str], Any]] = [
    lambda device: F.channel_shuffle(torch.randn(2, 4, 3, 3, device=device), 2),
    lambda device: F.channel_shuffle(torch.randn(2, 64, 30, 30, device=device), 4),
    lambda device: _differentiated(seeded(nn.GroupNorm(2, 4), device), torch.randn(2, 4, 3, device=device)),
    lambda device: _differentiated(seeded(nn.GroupNorm(8, 64), device), torch.randn(4, 64, 30, 30, device=device)),
    lambda device: _differentiated(
        seeded(nn.GroupNorm(8, 64), device), _looks_like_channels_last(device, 4, 64, 30, 30)
    ),
]


@pytest.mark.parametrize("call", _UNINTERRUPTED, ids=range(len(_UNINTERRUPTED)))
def test_common_operators_are_recorded(call: Callable[[str], Any]) -> None:
    marid.reset_stats()
    on_both(call)
    assert not marid.stats().fallbacks


def test_group_norms_are_differentiated_twice() -> None:
    def run(device: str) -> Any:
        x = _looks_like_channels_last(device, 2, 8, 4, 4).requires_grad_()
        w = torch.randn(8).to(device).requires_grad_()
        y = F.group_norm(x, 2, w)
        first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, w))

    on_both(run)


def test_a_bias_is_trained_alone() -> None:
    """oneDNN then returns the gradient of the weight as well."""

    def run(device: str) -> Any:
        conv = seeded(nn.Conv2d(4, 8, 3), device)
        out = conv(torch.randn(2, 4, 9, 9).to(device).requires_grad_())
        return torch.autograd.grad(out.square().sum(), conv.bias)

    marid.reset_stats()
    on_both(run)
    assert not marid.stats().fallbacks


def test_a_switch_is_followed_with_one_thread() -> None:
    """What is pending runs before, whatever number the new setting is equal to."""

    def run(device: str) -> Any:
        x = torch.linspace(-3, 3, 960).to(device)
        with torch.backends.mkldnn.flags(enabled=False):
            y = F.gelu(x)
        return y

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        on_both(run)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("of", [("mkldnn", "matmul"), ("mkldnn", "all"), ("generic", "all")], ids=str)
def test_precisions_of_backends_are_followed(of: tuple[str, str]) -> None:
    """What is pending runs before they change. (A processor with AMX computes something else then.)"""

    def run(device: str) -> Any:
        x = torch.linspace(-1, 1, 128 * 128).to(device).view(128, 128)
        before = x @ x
        # As ``torch.backends.mkldnn.matmul.fp32_precision`` and the like do, which other tests may have frozen.
        private: Any = torch._C
        default = private._get_fp32_precision_getter(*of)
        private._set_fp32_precision_setter(*of, "bf16")
        try:
            assert device == "cpu" or before.materialized  # type: ignore[attr-defined]
            inside = x @ x
        finally:
            private._set_fp32_precision_setter(*of, default)
        return before, inside, x @ x

    on_both(run)


def test_switches_of_backends_are_followed() -> None:
    """Also by calls that have been recorded before, and by what is pending."""

    def run(device: str) -> Any:
        conv = nn.Conv1d(3, 8, 3)
        seeded(conv, device)
        x = torch.randn(2, 3, 9).to(device)
        outs = [conv(x)]
        threads = torch.get_num_threads()
        with torch.backends.mkldnn.flags(enabled=False):
            outs.append(_differentiated(conv, x))
        torch.set_num_threads(1)
        try:
            outs += [conv(x), F.conv1d(x[:, :, :1], conv.weight[:, :, :1])]
        finally:
            torch.set_num_threads(threads)
        return outs, _differentiated(conv, x)

    on_both(run)


def test_large_calls_that_mean_nothing_with_small_sizes() -> None:
    """Sizes of the gradient and of what was padded go together, and no longer do where each is made small."""

    def run(device: str) -> Any:
        x = torch.randn(2, 4, 17, 11, 15).contiguous(memory_format=torch.channels_last_3d).to(device)
        grad = torch.randn(2, 4, 19, 13, 17).to(device)
        return torch.ops.aten.reflection_pad3d_backward.default(grad, x, [1] * 6)

    on_both(run)


_SLICES = """
import torch, marid
views = {
    "a slice of a transposed matrix": lambda x: x.transpose(-1, -2)[..., :-1],
    "every other column": lambda x: x[..., ::2],
    "a slice with a dimension put in": lambda x: x.unsqueeze(0).transpose(0, 1)[..., :-1],
}
calls = {
    name: getattr(torch, name) for name in ("abs", "logical_not", "exp", "neg", "sgn", "isnan", "clone", "zeros_like")
}
for shape in ((1, 301, 201), (3, 1, 9001), (300, 200)):  # too large to be tried as they are
    x = torch.rand(shape)
    for view, of in views.items():
        for name, call in calls.items():
            seen = call(of(x.to("remote_accelerator"))).stride()
            if seen != call(of(x)).stride():
                print(name, "of", view, shape, seen)
"""


@pytest.mark.in_process("starts a process of its own")
def test_a_large_slice_is_laid_out_rightly_the_first_time() -> None:
    """Nothing is known of these operators yet: what they return is found out by a call with small sizes."""
    done = subprocess.run([sys.executable, "-c", _SLICES], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
