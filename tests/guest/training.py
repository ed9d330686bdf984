"""Training on the CPU: optimizers, hooks, autograd, quantisation."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.guest.common import USES, Small, data, use


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    model = Small()
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data(3, 4)) - 1).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    hooks = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    return losses, list(model.parameters()), hooks


def _optimizers() -> None:
    for name in "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta ASGD RMSprop Rprop LBFGS Adafactor".split():
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            USES[f"optimizer_{name}"] = functools.partial(trained, lambda p, kind=kind: kind(p, lr=0.01))
    USES["optimizer_nesterov"] = functools.partial(
        trained, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
    )
    USES["optimizer_foreach"] = functools.partial(trained, lambda p: torch.optim.Adam(p, foreach=True))
    USES["optimizer_fused"] = functools.partial(trained, lambda p: torch.optim.AdamW(p, fused=True))


_optimizers()


@use
def averaged_models() -> Any:
    model = Small()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return list(averaged.module.parameters())


@use
def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        return encoder(data(2, 3, 8), src_key_padding_mask=padding)


@use
def hooks() -> Any:
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    counts = [
        len(hooks)
        for hooks in (
            *(nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks),
            *(optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),
        )
    ]
    seen: list[str] = []
    model = Small()
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.register_forward_pre_hook(lambda *_: seen.append("before first"))
    model.second.register_full_backward_hook(lambda *_: seen.append("backward of second"))
    x = data(2, 4).requires_grad_()
    x.register_hook(lambda _: seen.append("tensor"))
    model(x).sum().backward()
    return counts, seen, len(torch.serialization._package_registry) > 0


@use
def exceptions_in_backward() -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("in backward")

    x = data(2).requires_grad_()
    try:
        Fails.apply(x).sum().backward()  # type: ignore[attr-defined]
    except ValueError as error:
        return str(error), [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1]
    return None


@use
def anomaly_and_checkpoint() -> Any:
    from torch.utils.checkpoint import checkpoint

    x = data(2, 4).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        for reentrant in (False, True):
            checkpoint(Small(), x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    return x.grad


@use
def quantization() -> Any:
    quantized = torch.ao.quantization.quantize_dynamic(Small(), {nn.Linear}, dtype=torch.qint8)
    return quantized(data(2, 4)), type(quantized.first).__name__


@use
def autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Small()(data(2, 4)), torch.is_autocast_enabled()
