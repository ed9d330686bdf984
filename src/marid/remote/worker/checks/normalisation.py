"""Normalisation, softmax and noise: statistics, weights and gradients have the sizes of what they belong to."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from marid.remote.worker.checks.requirements import Given, alike, dimension, is_long_enough, need, shaped


def _batch_norm(of: Given) -> None:
    tensor = of["input"]
    need(tensor.dim() >= 2, "a batch")
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        if isinstance(of.get(name), torch.Tensor) and not (name.startswith("save") and "grad_out" not in of):
            optional = name.startswith("save") and not of[name].numel() and not of["train"]
            need(optional or (of[name].dim() == 1 and of[name].shape[0] == tensor.shape[1]), name)
    if "grad_out" in of:
        shaped(of["grad_out"], tensor.shape, "a gradient")
        need(of["train"] or of["running_mean"] is not None is not of["running_var"], "statistics")
        need(not of["train"] or of["save_mean"] is not None is not of["save_invstd"], "statistics")
        alike(tensor, of["grad_out"])
        _norm_types(of, tensor)
    elif not of.get("training", True):
        need(of["running_mean"] is not None is not of["running_var"], "statistics")


def _norm_types(of: Given, tensor: torch.Tensor) -> None:
    low = tensor.dtype in (torch.bfloat16, torch.float16)
    wanted = {tensor.dtype, torch.float32} if low else {tensor.dtype}
    names = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "mean", "rstd")
    in_memory = ("weight", "bias", "mean", "rstd") if "grad_out" in of or "group" in of else ()
    for name in in_memory if "normalized_shape" not in of else ("mean", "rstd"):
        need(not isinstance(of.get(name), torch.Tensor) or is_long_enough(of[name]), name)
    need(all(of[name].dtype in wanted for name in names if isinstance(of.get(name), torch.Tensor)), "types")


def _layer_norm_backward(of: Given) -> None:
    tensor, shape = of["input"], list(of["normalized_shape"])
    rows = tensor.dim() - len(shape)
    need(rows >= 0 and len(shape) > 0 and list(tensor.shape[rows:]) == shape, "a normalised shape")
    shaped(of["grad_out"], tensor.shape, "a gradient")
    for name in ("mean", "rstd"):
        need(of[name].numel() == math.prod(tensor.shape[:rows]), name)
    for name in ("weight", "bias"):
        shaped(of.get(name), shape, name)
    alike(tensor, of["grad_out"])
    _norm_types(of, tensor)


def _group_norm(of: Given) -> None:
    tensor, n, channels, inner, groups = of["input"], of["N"], of["C"], of["HxW"], of["group"]
    need(min(n, channels, inner) >= 0 and groups > 0 and channels % groups == 0, "groups")
    need(tensor.numel() == n * channels * inner, "sizes")
    need(tensor.dim() >= 2 and tuple(tensor.shape[:2]) == (n, channels), "sizes")
    for name in ("weight", "bias"):
        need(of.get(name) is None or of[name].numel() == channels, name)
    for name in ("mean", "rstd"):
        need(of.get(name) is None or of[name].numel() == n * groups, name)
    if "grad_out" in of:
        shaped(of["grad_out"], tensor.shape, "a gradient")
        alike(tensor, of["grad_out"])
        way = torch._prims_common.suggest_memory_format(tensor)
        need(tensor.is_contiguous(memory_format=way) and of["grad_out"].is_contiguous(memory_format=way), "memory")
    _norm_types(of, tensor)


def _weight_norm(of: Given) -> None:
    prefix = "saved_" if "saved_v" in of else ""
    v, g, dim = of[f"{prefix}v"], of[f"{prefix}g"], of["dim"]
    need(v.dim() > 0 and dim in (0, v.dim() - 1) and v.is_contiguous() and g.is_contiguous(), "a weight")
    need(g.numel() == v.shape[dim] and g.dim() <= v.dim(), "a weight")
    alike(v, g)
    if "grad_w" in of:
        shaped(of["grad_w"], v.shape, "a gradient")
        need(of["saved_norms"].numel() == v.shape[dim], "norms")
        alike(v, of["grad_w"])


def _softmax_backward(of: Given) -> None:
    grad, output = of["grad_output"], of["output"]
    shaped(grad, output.shape, "a gradient")
    dimension(of["dim"], output.dim())


def _gelu_backward(of: Given) -> None:
    """oneDNN's kernel goes by the shape of the result."""
    shaped(of["grad_output"], of["self"].shape, "a gradient")


def _noisy(of: Given) -> None:
    noise = of["noise"]
    shaped(noise, of["self"].shape, "noise")
    need(is_long_enough(noise), "noise")
    alike(of["self"], noise)


CHECKS: dict[str, Callable[[Given], None]] = {
    **{f"rrelu_with_noise{end}": _noisy for end in ("", "_", "_functional")},
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
    "_softmax_backward_data": _softmax_backward,
    "gelu_backward": _gelu_backward,
    "_log_softmax_backward_data": _softmax_backward,
}
"""By the name of an operator of ATen."""
