"""Losses, segments and embeddings: numbers in tensors say where to read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.remote.worker.checks.requirements import Given, alike, need, shaped, within


def _nll_backward(of: Given) -> None:
    tensor, target = of["self"], of["target"]
    classes = tensor.shape[-1] if tensor.dim() <= 2 else tensor.shape[1]
    need(of["total_weight"].numel() == 1, "a weight")
    need(of["weight"] is None or of["weight"].numel() == classes, "weights")
    known = target[target != of["ignore_index"]] if not target.is_meta else target
    within(known, 0, classes, "classes")


def _margins_backward(of: Given) -> None:
    """Of ``multi_margin_loss`` and ``multilabel_margin_loss``."""
    grad, tensor, target = of["grad_output"], of["self"], of["target"]
    need(tensor.dim() <= 2 and tensor.numel() > 0 and 0 <= of["reduction"] <= 2, "scores")
    rows, classes = (1, 1, *tensor.shape)[-2:]
    need(grad.numel() == (1 if of["reduction"] else rows), "a gradient")
    alike(tensor, grad, of.get("is_target"), of.get("weight"))
    if "is_target" in of:
        shaped(target, tensor.shape, "classes")
        shaped(of["is_target"], tensor.shape, "classes")
        within(target, -1, classes, "classes")
    else:
        need(target.numel() == rows, "classes")
        need(of["weight"] is None or of["weight"].numel() == classes, "weights")
        within(target, 0, classes, "classes")


def _segments(of: Given) -> None:
    data, lengths, axis = of["data"], of["lengths"], of["axis"]
    given: list[torch.Tensor] = [one for one in (lengths, of["offsets"]) if one is not None]
    need(bool(given), "segments")
    ends = given[0]
    need(0 <= axis < data.dim() and ends.dim() == axis + 1, "segments")
    need(ends.shape[:-1] == data.shape[:axis] and ends.numel() > 0 and of.get("indices") is None, "segments")
    size = data.shape[axis]
    within(ends, 0, size + 1, "segments")
    if lengths is None:
        need(bool((ends.diff() >= 0).all() and (ends[..., 0] == 0).all() and (ends[..., -1] == size).all()), "segments")
    else:
        need(bool((ends.sum(-1) == size).all()), "segments")
    if "grad" in of:
        count = ends.shape[-1] - (lengths is None)
        for one in (of["grad"], of["output"]):
            shaped(one, (*data.shape[:axis], count, *data.shape[axis + 1 :]), "a gradient")
        alike(data, of["grad"], of["output"])


def _ctc(of: Given) -> None:
    scores, targets, blank = of["log_probs"], of["targets"], of["blank"]
    need(scores.dim() == 3 and scores.numel() > 0 and targets.dim() in (1, 2), "scores")
    steps, batch, classes = scores.shape
    given, wanted = (_numbers(of[name]) for name in ("input_lengths", "target_lengths"))
    need(0 <= blank < classes and len(given) == len(wanted) == batch, "lengths")
    need(all(0 <= n <= steps for n in given) and all(n >= 0 for n in wanted), "lengths")
    if targets.dim() == 2:
        need(targets.shape[0] == batch and all(n <= targets.shape[1] for n in wanted), "targets")
    else:
        need(sum(wanted) <= targets.shape[0], "targets")
    within(targets, 0, classes, "targets")
    if "log_alpha" in of:
        longest = max(wanted) if targets.dim() == 1 else targets.shape[1]
        alpha = of["log_alpha"]
        need(alpha.dim() == 3 and alpha.shape[0] == batch and alpha.shape[1] >= max(given), "scores")
        need(alpha.shape[2] >= 2 * max(wanted) + 1 and longest >= 0, "scores")
        need(of["neg_log_likelihood"].numel() == batch == of["grad"].numel(), "a gradient")
        need(of["neg_log_likelihood"].dim() == 1 == of["grad"].dim(), "a gradient")
        alike(scores, alpha, of["grad"], of["neg_log_likelihood"])


def _numbers(lengths: Any) -> list[int]:
    return [int(n) for n in lengths.tolist()] if isinstance(lengths, torch.Tensor) else list(lengths)


def _embedding_backward(of: Given) -> None:
    grad, indices, rows = of["grad_output"], of["indices"], of["num_weights"]
    need(grad.dim() > 0 and rows >= 0 and grad.shape[:-1] == indices.shape, "a gradient")
    known = indices if indices.is_meta else indices[indices != of["padding_idx"]]
    within(known, 0, rows, "indices")


def _bags(of: Given) -> None:
    weight, indices, offsets = of["weight"], of["indices"], of["offsets"]
    need(weight.dim() == 2 and indices.dim() == 1 == offsets.dim() and 0 <= of["mode"] <= 2, "bags")
    need(indices.is_contiguous() and offsets.is_contiguous() and indices.dtype is offsets.dtype, "bags")
    within(indices, 0, weight.shape[0], "indices")
    within(offsets, 0, indices.numel() + 1, "offsets")
    need(offsets.numel() > 0 or not indices.numel(), "offsets")  # a kernel with weights takes the first on trust
    need(not offsets.numel() or offsets.is_meta or bool((offsets.diff() >= 0).all()), "offsets")
    need(of.get("per_sample_weights") is None or of["per_sample_weights"].shape == indices.shape, "weights")


def _bags_backward(of: Given) -> None:
    grad, indices, bag = of["grad"], of["indices"], of["offset2bag"]
    rows = of["weight"].shape[0] if "weight" in of else of["num_weights"]
    need(grad.dim() == 2 and indices.dim() == 1 == bag.dim() and rows >= 0 <= of["mode"] <= 2, "bags")
    need(indices.is_contiguous() and bag.is_contiguous(), "bags")
    made_of_offsets = not bag.numel() and "offsets" in of
    need(bag.shape == indices.shape or made_of_offsets, "bags")
    within(indices, 0, rows, "indices")
    within(bag, 0, grad.shape[0], "bags")
    if "offsets" in of:
        within(of["offsets"], 0, indices.numel() + 1, "offsets")
        need(
            of["offsets"].dim() == 1 and grad.shape[0] in (of["offsets"].numel(), of["offsets"].numel() - 1), "offsets"
        )
        last = of["offsets"].numel() == grad.shape[0] + 1
        need(not (last and made_of_offsets) or int(of["offsets"][-1]) == indices.numel(), "offsets")
        need(of["offsets"].is_contiguous() and of["offsets"].dtype is indices.dtype, "offsets")
        need(not made_of_offsets or bool((of["offsets"].diff() >= 0).all()), "offsets")
    if "bag_size" in of:
        need(of["bag_size"].numel() >= grad.shape[0] or of["mode"] == 0, "bags")
    if of.get("maximum_indices") is not None and of["mode"] == 2:
        shaped(of["maximum_indices"], grad.shape, "indices")
        within(of["maximum_indices"], -1, rows, "indices")
    weights = of.get("per_sample_weights")
    need(weights is None or (weights.shape == indices.shape and weights.dtype is grad.dtype), "weights")
    if "weight" in of:
        need(of["weight"].dim() == 2 and of["weight"].shape[1] == grad.shape[1] and of["mode"] == 0, "weights")
        need(bag.numel() == indices.numel() or of["offsets"].numel() > 0, "bags")
        alike(grad, of["weight"])


CHECKS: dict[str, Callable[[Given], None]] = {
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _bags_backward,
    "nll_loss_backward": _nll_backward,
    "nll_loss2d_backward": _nll_backward,
    "multi_margin_loss_backward": _margins_backward,
    "multilabel_margin_loss_backward": _margins_backward,
    "segment_reduce": _segments,
    "_segment_reduce_backward": _segments,
    "_ctc_loss": _ctc,
    "_ctc_loss_backward": _ctc,
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
    "_embedding_bag_dense_backward": _bags_backward,
    "_embedding_bag_per_sample_weights_backward": _bags_backward,
}
"""By the name of an operator of ATen."""
