"""PyTorch's own module and optimizer databases on the lazy device, compared with eager CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo
from torch.testing._internal.common_optimizers import OptimizerInfo
from torch.utils._pytree import tree_flatten, tree_map

import marid
from marid.errors import UnsupportedOperationError

from .opinfo import DEVICE, exceptions, to_device

STEPS = 5


def check_module(info: ModuleInfo, dtype: torch.dtype, training: bool) -> int:
    """Forward, backward and ``state_dict`` of every sample; the number of samples. Raises ``AssertionError``."""
    checked = 0
    close = exceptions().get((info.module_cls.__name__, "module")) == "close"
    torch.manual_seed(3)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in samples:
        if sample.forward_input is None:
            continue
        made = sample.constructor_input
        torch.manual_seed(5)
        here = info.module_cls(*made.args, **made.kwargs)
        here = here.to(dtype).train(training)
        there = copy.deepcopy(here).to(DEVICE)
        results = []
        for module, move in ((here, _leaf_copy), (there, _leaf_device)):
            torch.manual_seed(9)
            inputs, kwargs = tree_map(move, (tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)))
            results.append(_run(module, inputs, kwargs))
        bounds = {} if close else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(_read(results[1]), results[0], equal_nan=True, **bounds)
        checked += 1
    return checked


def _leaf_copy(thing: Any) -> Any:
    if not isinstance(thing, torch.Tensor):
        return thing
    return thing.detach().clone().requires_grad_(thing.requires_grad)


def _leaf_device(thing: Any) -> Any:
    return to_device(thing) if isinstance(thing, torch.Tensor) else thing


def _run(module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = module(*inputs, **kwargs)
    outputs = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    leaves = [t for t in tree_flatten((inputs, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    grads: tuple[Any, ...] = ()
    if differentiable and leaves:
        total = sum((t.abs() if t.is_complex() else t).sum() for t in differentiable)
        assert isinstance(total, torch.Tensor)
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [t.detach() for t in outputs], list(grads), dict(module.state_dict())


def _read(tree: Any) -> Any:
    return tree_map(lambda t: t.detach().cpu() if isinstance(t, marid.LazyTensor) else t, tree)


def check_optimizer(info: OptimizerInfo, dtype: torch.dtype) -> int:
    """Five steps of every configuration, also foreach and fused; the number of configurations.

    Where ``exceptions.txt`` says ``unsupported``, each configuration must raise ``UnsupportedOperationError``.
    """
    unsupported = exceptions().get((info.optim_cls.__name__, "optimizer")) == "unsupported"
    checked = 0
    for given in info.optim_inputs_func(device="cpu", dtype=dtype):
        for kind in ({}, *({name: True} for name in ("foreach", "fused") if name in info.supported_impls)):
            if any(given.kwargs.get(name) for name in ("differentiable", "foreach", "fused")) and kind:
                continue
            kwargs = {**given.kwargs, **kind}
            if kind.get("fused") and kwargs.get("capturable"):
                continue
            outcomes = [_outcome(info, device, dtype, kwargs) for device in ("cpu", DEVICE)]
            expected, actual = outcomes
            if isinstance(expected, Exception):
                assert type(actual) is type(expected), f"{kwargs}: eager raises {expected!r}, the device {actual!r}"
                continue
            checked += 1
            if unsupported:
                assert isinstance(actual, UnsupportedOperationError), f"{kwargs}: {actual!r}"
                continue
            assert not isinstance(actual, Exception), f"{kwargs}: only the device raises {actual!r}"
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, k=kwargs: f"{k}: {m}"
            )
    return checked


def _outcome(info: OptimizerInfo, device: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
    try:
        return _train(info, device, dtype, kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        return error


def _train(info: OptimizerInfo, device: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    parameters = [torch.randn(shape, dtype=dtype) for shape in ((4, 3), (3,), (2, 3))]
    if getattr(info.optim_cls, "__name__", "") == "Muon":
        parameters = [p for p in parameters if p.dim() == 2]
    target = [torch.randn_like(p) for p in parameters]
    leaves = [torch.nn.Parameter(p.to(device)) for p in parameters]
    goals = [t.to(device) for t in target]
    kwargs = {
        name: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in kwargs.items()
    }
    sparse = info.optim_cls.__name__ == "SparseAdam"
    optimizer = info.optim_cls(leaves, **kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p - g).abs() ** 2).sum() for p, g in zip(leaves, goals, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        if sparse:
            for leaf in leaves:
                leaf.grad = leaf.grad.to_sparse() if leaf.grad is not None else None
        return loss

    losses = []
    for _ in range(STEPS):
        if info.step_requires_closure:
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    state = [dict(optimizer.state[p]) for p in leaves]
    gradients = [p.grad for p in leaves]  # an optimizer that writes to them does so on both devices
    return _read([[p.detach() for p in leaves], gradients, [loss.detach() for loss in losses], state])
