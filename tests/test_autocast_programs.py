"""Whole programs under ``torch.autocast`` on the device, against the CPU's: bitwise, with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import marid
from tests.helpers import DEVICE, assert_same, on_both, seeded

Forward = Callable[[Any, torch.Tensor], Any]


def _loop(module: Any, x: torch.Tensor) -> Any:
    state = (x, x)
    for _ in range(3):
        state = module(x, state)
    return state


def _nested(module: Any, x: torch.Tensor) -> torch.Tensor:
    device, y = x.device.type, module(x)
    with torch.autocast(device, enabled=False):
        y = module(y.to(x.dtype))
    with torch.autocast(device, dtype=torch.float16):
        y = module(y)
    return module(y)


def _first_without_gradients(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module(x)
    return module(x)


def _given_other_data(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = module(x)
    module.weight.data = module.weight.data * 2
    return y + module(x)


def _tied(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(module(torch.tensor([1, 2, 3], device=x.device)) + x, module.weight)


def _twice(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(module(x))


def _in_three_places(_module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    return torch.baddbmm(y, y, y)


def _affine(_module: Any, x: torch.Tensor) -> torch.Tensor:
    image = torch.ones(1, 1, 3, 3, device=x.device, dtype=x.dtype)
    return F.grid_sample(image, F.affine_grid(x, [1, 3, 7, 3], align_corners=False), align_corners=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def _custom(**options: Any) -> Forward:
    def run(_module: Any, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type

        class Product(_Product):
            forward = staticmethod(torch.amp.custom_fwd(_Product.forward, device_type=device, **options))
            backward = staticmethod(torch.amp.custom_bwd(_Product.backward, device_type=device))

        return Product.apply(Product.apply(x, x), x)  # pyright: ignore

    return run


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


def _layers() -> nn.Module:
    convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.ConvTranspose2d(4, 2, 2), nn.GroupNorm(2, 2))


def _encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, **options)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Forward]] = {
    "a weight twice": (_linear, (3, 4), _twice),
    "tied weights": (lambda: nn.Embedding(6, 4), (3, 4), _tied),
    "an argument in three places": (_linear, (4, 4, 4), _in_three_places),
    "nested": (_linear, (3, 4), _nested),
    "first without gradients": (_linear, (3, 4), _first_without_gradients),
    "given other data": (_linear, (3, 4), _given_other_data),
    "checkpoint": (_linear, (3, 4), lambda m, x: checkpoint(lambda x: m(m(x)), x, use_reentrant=False)),
    "checkpoint, reentrant": (_linear, (3, 4), lambda m, x: checkpoint(lambda x: m(m(x)), x, use_reentrant=True)),
    "custom_fwd": (_linear, (4, 4), _custom()),
    "custom_fwd that casts": (_linear, (4, 4), _custom(cast_inputs=torch.float32)),
    "cells": (lambda: nn.LSTMCell(4, 4), (3, 4), _loop),
    "LSTM": (lambda: nn.LSTM(4, 4), (3, 2, 4), lambda m, x: m(m(x)[0])),
    "LSTM with projections": (lambda: nn.LSTM(4, 5, proj_size=3), (3, 2, 4), lambda m, x: m(x)),
    "LSTM of two layers": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), (3, 2, 4), lambda m, x: m(x)),
    "GRU": (lambda: nn.GRU(4, 4, 2), (3, 2, 4), lambda m, x: m(m(x)[0])),
    "RNN": (lambda: nn.RNN(4, 5, bidirectional=True), (3, 2, 4), lambda m, x: m(x)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), (2, 3, 4), lambda m, x: m(x, x, x)),
    "attention without weights": (
        lambda: nn.MultiheadAttention(4, 2),
        (2, 3, 4),
        lambda m, x: m(x, x, x, need_weights=False)[0],
    ),
    "encoder layer": (_encoder_layer, (2, 3, 4), lambda m, x: m(x)),
    "encoder layer, norm first": (lambda: _encoder_layer(norm_first=True), (2, 3, 4), lambda m, x: m(x)),
    "convolutions": (_layers, (2, 2, 6, 6), lambda m, x: m(x)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (3, 4), _twice),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (3, 4), _twice),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (3, 4), lambda m, x: m(x, x)),
    "affine_grid": (_linear, (1, 2, 3), _affine),
    "einsum": (_linear, (3, 4), lambda m, x: torch.einsum("ij,kj,lj->ikl", x, m.weight, m.weight)),
    "matrix_power": (_linear, (4, 4), lambda _, x: torch.linalg.matrix_power(x, 3)),
    "multi_dot": (_linear, (4, 4), lambda m, x: torch.linalg.multi_dot([x, m.weight, x])),
    "pinv": (_linear, (4, 4), lambda _, x: torch.linalg.pinv(x).sum()),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RuntimeError as error:
        return type(error).__name__


def _train(program: str, device: str, dtype: torch.dtype, inside: bool, **options: Any) -> list[Any]:
    make, shape, forward = PROGRAMS[program]
    module = seeded(make().to(dtype), device)
    x = torch.randn(*shape).to(device, dtype).requires_grad_()

    def backward(outs: Any) -> None:
        sum(out.float().square().sum() for out in tree_leaves(outs) if out.requires_grad).backward()

    with torch.autocast(torch.device(device).type, torch.bfloat16, **options):
        outs = forward(module, x)
        if inside:
            backward(outs)
    if not inside:
        backward(outs)
    return [outs, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_cpu_autocast(program: str, dtype: torch.dtype) -> None:
    """Of parameters that are cast once and used twice, of recurrent layers, attention, nesting and checkpoints."""
    on_both(lambda device: _outcome(lambda: _train(program, device, dtype, inside=False)))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("program", ["a weight twice", "cells", "checkpoint", "encoder layer", "bilinear"])
def test_backward_under_autocast_and_without_its_cache(program: str, cached: bool) -> None:
    """Both change what is added up in lower precision."""
    on_both(lambda device: _train(program, device, torch.float32, inside=True, cache_enabled=cached))


def test_casts_are_kept_until_the_outermost_block_ends() -> None:
    """What was written to a weight meanwhile is not seen before, and is seen then."""

    def run(device: str) -> list[Any]:
        weight, x = torch.randn(4, 4, device=device, requires_grad=True), torch.randn(3, 4, device=device)
        found = []
        for _ in range(2):
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                for _ in range(2):
                    with torch.autocast(torch.device(device).type, torch.bfloat16):
                        found.append((x @ weight).detach())
                    with torch.no_grad():
                        weight.mul_(2)
        return found

    first, second, third, _ = on_both(run)
    assert_same(second, first.cpu())
    assert not torch.equal(third.cpu(), first.cpu())


INFERENCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
    "kron": lambda x: torch.kron(x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "bilinear": lambda x: F.bilinear(x, x, x[None] * 1),
    "matrix_exp": lambda x: torch.matrix_exp(x),
    "matmul into memory": lambda x: torch.matmul(x, x, out=torch.empty_like(x)),
    "LSTM": lambda x: seeded(nn.LSTM(4, 4), str(x.device))(x[None].float()),
    "GRU": lambda x: seeded(nn.GRU(4, 4), str(x.device))(x[None].float()),
    "LSTMCell": lambda x: seeded(nn.LSTMCell(4, 4), str(x.device))(x.float()),
    "encoder layer": lambda x: seeded(_encoder_layer().eval(), str(x.device))(x[None].float()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INFERENCE)
def test_composite_operators_meet_the_lists_in_inference_mode(name: str, dtype: torch.dtype) -> None:
    """There they arrive whole, and are taken apart below autocast."""

    def run(device: str) -> Any:
        x = torch.randn(4, 4).to(device, dtype)
        with torch.inference_mode(), torch.autocast(torch.device(device).type, torch.bfloat16):
            return INFERENCE[name](x)

    on_both(lambda device: _outcome(lambda: run(device)))


def test_empty_arguments_do_not_tell_what_an_operator_is_composed_of() -> None:
    """``pinv`` of an empty matrix multiplies nothing."""

    def run(device: str) -> list[torch.Tensor]:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return [torch.linalg.pinv(torch.ones(n, n, device=device) + torch.eye(n, device=device)) for n in (0, 3)]

    on_both(run)


@pytest.mark.parametrize("where", ["in the function", "around each call", "around all"])
def test_compiled_functions_under_autocast(where: str) -> None:
    """A cast that is kept from the call before is no part of the next one."""

    def run(device: str) -> list[Any]:
        model = seeded(nn.Linear(4, 4), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def autocast(place: str) -> torch.autocast:
            return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=place == where)

        def step(x: torch.Tensor) -> torch.Tensor:
            with autocast("in the function") if where == "in the function" else contextlib.nullcontext():
                loss = model(model(x)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = marid.compile(step) if device == DEVICE else step
        losses = []
        with autocast("around all"):
            for _ in range(6):
                with autocast("around each call") if where == "around each call" else contextlib.nullcontext():
                    losses.append(call(torch.randn(3, 4).to(device)))
        return [losses, *(p.detach() for p in model.parameters())]

    on_both(run)
