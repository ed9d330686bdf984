"""Inference mode: the bits of eager PyTorch, where operators arrive that autograd takes apart elsewhere.

Views of parameters require gradients there too, and the CPU folds a batch into one matrix, or does not, by that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .helpers import DEVICE


class _Weight(nn.Module):
    """A module with one parameter, which the cases use as they like."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))


def _attention(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x, x.cos(), x.cos())


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Any, torch.Tensor], Any]]] = {
    "linear of transposed rows": (lambda: nn.Linear(3, 5), (2, 4, 3), lambda m, x: m(x.transpose(0, 1))),
    "one sequence": (lambda: nn.Linear(3, 5), (1, 4, 3), lambda m, x: m(x.transpose(0, 1))),
    "without bias": (lambda: nn.Linear(3, 5, bias=False), (1, 4, 3), lambda m, x: m(x.transpose(0, 1))),
    "frozen": (lambda: nn.Linear(3, 5).requires_grad_(False), (1, 4, 3), lambda m, x: m(x.transpose(0, 1))),
    "part of a weight": (
        lambda: _Weight(9, 3), (2, 4, 3), lambda m, x: F.linear(x.transpose(0, 1), m.w.split([3, 6])[1])
    ),
    "matmul": (lambda: _Weight(5, 3), (2, 4, 3), lambda m, x: x.transpose(0, 1) @ m.w.t()),
    "weight first": (lambda: _Weight(5, 3), (2, 4, 3), lambda m, x: m.w @ x.mT),
    "chunks of a weight": (lambda: _Weight(9, 3), (2, 4, 3), lambda m, x: x @ m.w.chunk(3)[1].t()),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (2, 4, 6), _attention),
    "attention of one": (lambda: nn.MultiheadAttention(3, 1, bias=False, batch_first=True), (1, 4, 3), _attention),
    "packed attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), (4, 8, 7),
        lambda m, x: m(*[x.mT] * 3, need_weights=False)[0],
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(6, 6, 5, batch_first=True), (5, 17, 6), lambda m, x: m(x, x.sin())
    ),
    "transformer": (lambda: nn.Transformer(6, 2, 1, 1, 8), (2, 4, 6), lambda m, x: m(x, x.sin())),
    "GRU": (lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True), (9, 3), lambda m, x: m(x)),
    "double": (lambda: nn.Linear(3, 12).double(), (3, 8, 3, 4), lambda m, x: m(x.double().mT)),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_eager_pytorch(case: str, mode: Callable[[], Any]) -> None:
    make, shape, call = CASES[case]
    torch.manual_seed(0)
    module = make().eval()
    lazy = copy.deepcopy(module).to(DEVICE)
    for _ in range(4):  # from the second call on, what is known of the first is used
        x = torch.randn(*shape)
        with mode():
            expected, got = call(module, x), call(lazy, x.to(DEVICE))
        several = isinstance(expected, tuple)
        for one, other in zip(expected if several else (expected,), got if several else (got,), strict=True):
            assert torch.equal(one, other.cpu())
            assert one.stride() == other.stride()
            assert one.requires_grad == other.requires_grad


def test_what_is_known_without_gradients_is_not_used_where_a_weight_has_them() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(3, 3), torch.randn(1, 4, 3)
    for required in (False, False, False, True):
        w = weight.clone().requires_grad_(required)
        lazy = weight.to(DEVICE).requires_grad_(required)
        with torch.inference_mode():
            expected, got = F.linear(x.transpose(0, 1), w), F.linear(x.to(DEVICE).transpose(0, 1), lazy)
        assert torch.equal(expected, got.cpu())
