"""What is looked at before an operator runs whose kernel takes its arguments on trust.

PyTorch calls these operators itself, from operators that have checked everything, so their kernels read and write where
they are told to. A client may call them with anything. A check says whether the sizes agree, and whether the numbers in
index tensors lie within what they index; it raises ``ValueError`` where they do not. Each is given the arguments of
its operator by their names in the schema, and serves all overloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["CHECKS"]

Given = dict[str, Any]


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: the arguments do not belong together")


def _within(index: Any, low: int, high: int, what: str) -> None:
    """All numbers of an index tensor are in ``range(low, high)``."""
    if index is None or not index.numel() or index.is_meta:
        return
    _need(not index.is_floating_point() and not index.is_complex() and index.dtype is not torch.bool, what)
    least, most = torch.aminmax(index)
    _need(low <= int(least) and int(most) < high, what)


def _shaped(tensor: Any, shape: Sequence[int], what: str) -> None:
    """A tensor, if there is one, has that shape."""
    _need(tensor is None or tuple(tensor.shape) == tuple(shape), what)


def _alike(first: torch.Tensor, *others: Any) -> None:
    """Tensors, those that there are, have one dtype."""
    _need(all(one is None or one.dtype is first.dtype for one in others), "types")


def _is_long_enough(tensor: torch.Tensor) -> bool:
    """Whether as many elements as it has, one behind the other, lie in its memory, for kernels that ignore strides."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() <= span


def _dimension(dim: int, rank: int) -> None:
    _need(-max(rank, 1) <= dim < max(rank, 1), "a dimension")


# --- views -----------------------------------------------------------------------------------------------------------


def _reshape_alias(of: Given) -> None:
    tensor, size, stride, offset = of["self"], of["size"], of["stride"], of.get("storage_offset")
    _need(len(size) == len(stride) and min([*size, *stride], default=0) >= 0, "a view")
    if math.prod(size):
        last = int(tensor.storage_offset()) if offset is None else offset
        _need(last >= 0, "a view")
        last += sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        _need((last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes(), "a view")


def _unfold_backward(of: Given) -> None:
    grad, sizes, dim, size, step = of["grad_in"], list(of["input_sizes"]), of["dim"], of["size"], of["step"]
    _dimension(dim, len(sizes))
    _need(bool(sizes) and min(sizes) >= 0 and step > 0 and 0 <= size <= sizes[dim], "a view")
    wanted = [*sizes, size]
    wanted[dim % len(sizes)] = (sizes[dim] - size) // step + 1
    _shaped(grad, wanted, "a gradient")


# --- pooling and padding ---------------------------------------------------------------------------------------------


def _pooled_average(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor = of["grad_output"], of["self"]
        _need(grad.dim() == tensor.dim() and spatial < tensor.dim() <= spatial + 2, "a gradient")
        _need(grad.shape[:-spatial] == tensor.shape[:-spatial], "a gradient")
        _need(min((*grad.shape[-spatial:], *tensor.shape[-spatial:])) > 0, "a gradient")
        _alike(grad, tensor)

    return check


def _pooled_maximum(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor, indices = of["grad_output"], of["self"], of["indices"]
        _need(grad.dim() == tensor.dim() and spatial < tensor.dim() <= spatial + 2, "a gradient")
        _need(grad.shape[:-spatial] == tensor.shape[:-spatial] and indices.dtype is torch.int64, "a gradient")
        _shaped(indices, grad.shape, "indices")
        _need(torch.ops.aten.is_non_overlapping_and_dense.default(indices), "indices")  # read as they lie in memory
        _alike(grad, tensor)
        _within(indices, 0, math.prod(tensor.shape[-spatial:]), "indices")

    return check


def _fractional(spatial: int) -> Callable[[Given], None]:
    maximum = _pooled_maximum(spatial)

    def check(of: Given) -> None:
        maximum(of)
        _need(len(of["kernel_size"]) == spatial == len(of["output_size"]), "sizes")
        _shaped(of["grad_output"], [*of["self"].shape[:-spatial], *of["output_size"]], "a gradient")

    return check


def _output_size(of: Given) -> None:
    _need(min(of["output_size"], default=0) >= 0, "a size")


def _scaled(of: Given) -> None:
    """Kernels find the place in the input by a scale that need not be that of the sizes, as a whole number that may be
    beyond what that type holds."""
    names = ("scales",) if "scales" in of else ("scales_d", "scales_h", "scales_w")
    scales = [of[name] for name in names if name in of]
    _need(not scales or len(scales) == len(of["output_size"]), "sizes")
    for scale, size in zip(scales, of["output_size"] if scales else (), strict=True):
        _need(scale is None or not scale > 0 or size <= scale * (1 << 24), "a scale")


def _sampled_backward(of: Given) -> None:
    grad, tensor, grid = of["grad_output"], of["input"], of["grid"]
    spatial = tensor.dim() - 2
    _need(spatial in (2, 3) and grid.dim() == grad.dim() == tensor.dim() and tensor.numel() > 0, "a grid")
    _shaped(grid, [tensor.shape[0], *grid.shape[1:-1], spatial], "a grid")
    _shaped(grad, [*tensor.shape[:2], *grid.shape[1:-1]], "a gradient")
    _need(0 <= of["interpolation_mode"] <= 2 and 0 <= of["padding_mode"] <= 2, "a way to sample")
    _need(len(of["output_mask"]) == 2, "a mask")
    _alike(tensor, grad, grid)
    if of["padding_mode"] and not grid.is_meta:  # places outside are moved inside, but for those that are no numbers
        _need(not bool(grid.isnan().any()), "a grid")


def _padded(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor, padding = of["grad_output"], of["self"], of["padding"]
        _need(len(padding) == 2 * spatial and spatial < tensor.dim() <= spatial + 2, "padding")
        wanted = list(tensor.shape)
        for index in range(spatial):
            _need(all(abs(amount) < 1 << 31 for amount in padding), "padding")
            wanted[-1 - index] += padding[2 * index] + padding[2 * index + 1]
        _shaped(grad, wanted, "a gradient")
        _need(min((*wanted[-spatial:], *tensor.shape[-spatial:])) > 0, "a gradient")
        _alike(grad, tensor)

    return check


def _reflected(spatial: int) -> Callable[[Given], None]:
    padded = _padded(spatial)

    def check(of: Given) -> None:
        padded(of)
        for index in range(spatial):
            size = of["self"].shape[-1 - index]
            _need(all(abs(amount) < size for amount in of["padding"][2 * index : 2 * index + 2]), "padding")

    return check


def _convolution_backward(of: Given) -> None:
    """The gradient has the shape of the result; not all kernels that may be chosen look."""
    grad, tensor, weight, groups = of["grad_output"], of["input"], of["weight"], of["groups"]
    spatial = tensor.dim() - 2
    _need(spatial > 0 and weight.dim() == tensor.dim() and groups > 0 and len(of["output_mask"]) == 3, "a convolution")
    names = ("stride", "padding", "dilation", "output_padding")
    lists = [of[name] * spatial if len(of[name]) == 1 else of[name] for name in names]
    _need(all(len(amounts) == spatial for amounts in lists) and min(lists[0]) > 0 < min(lists[2]), "a convolution")
    _need(weight.shape[0] % groups == 0 and weight.shape[0] > 0, "a convolution")
    ins, outs = (weight.shape[1] * groups, weight.shape[0])[:: -1 if of["transposed"] else 1]
    _need(tensor.shape[1] == ins, "channels")
    wanted = [tensor.shape[0], outs]
    for size, kernel, step, pad, dilation, more in zip(tensor.shape[2:], weight.shape[2:], *lists, strict=True):
        reach = dilation * (kernel - 1) + 1
        _need(kernel > 0 and pad >= 0 <= more, "a convolution")
        wanted.append(
            (size - 1) * step - 2 * pad + reach + more if of["transposed"] else (size + 2 * pad - reach) // step + 1
        )
    _shaped(grad, wanted, "a gradient")


# --- normalisation ---------------------------------------------------------------------------------------------------


def _batch_norm(of: Given) -> None:
    tensor = of["input"]
    _need(tensor.dim() >= 2, "a batch")
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        if isinstance(of.get(name), torch.Tensor) and not (name.startswith("save") and "grad_out" not in of):
            optional = name.startswith("save") and not of[name].numel() and not of["train"]
            _need(optional or (of[name].dim() == 1 and of[name].shape[0] == tensor.shape[1]), name)
    if "grad_out" in of:
        _shaped(of["grad_out"], tensor.shape, "a gradient")
        _need(of["train"] or of["running_mean"] is not None is not of["running_var"], "statistics")
        _need(not of["train"] or of["save_mean"] is not None is not of["save_invstd"], "statistics")
        _alike(tensor, of["grad_out"])
        _norm_types(of, tensor)
    elif not of.get("training", True):
        _need(of["running_mean"] is not None is not of["running_var"], "statistics")


def _norm_types(of: Given, tensor: torch.Tensor) -> None:
    low = tensor.dtype in (torch.bfloat16, torch.float16)
    wanted = {tensor.dtype, torch.float32} if low else {tensor.dtype}
    names = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "mean", "rstd")
    in_memory = ("weight", "bias", "mean", "rstd") if "grad_out" in of or "group" in of else ()
    for name in in_memory if "normalized_shape" not in of else ("mean", "rstd"):
        _need(not isinstance(of.get(name), torch.Tensor) or _is_long_enough(of[name]), name)
    _need(all(of[name].dtype in wanted for name in names if isinstance(of.get(name), torch.Tensor)), "types")


def _layer_norm_backward(of: Given) -> None:
    tensor, shape = of["input"], list(of["normalized_shape"])
    rows = tensor.dim() - len(shape)
    _need(rows >= 0 and len(shape) > 0 and list(tensor.shape[rows:]) == shape, "a normalised shape")
    _shaped(of["grad_out"], tensor.shape, "a gradient")
    for name in ("mean", "rstd"):
        _need(of[name].numel() == math.prod(tensor.shape[:rows]), name)
    for name in ("weight", "bias"):
        _shaped(of.get(name), shape, name)
    _alike(tensor, of["grad_out"])
    _norm_types(of, tensor)


def _group_norm(of: Given) -> None:
    tensor, n, channels, inner, groups = of["input"], of["N"], of["C"], of["HxW"], of["group"]
    _need(min(n, channels, inner) >= 0 and groups > 0 and channels % groups == 0, "groups")
    _need(tensor.numel() == n * channels * inner, "sizes")
    _need(tensor.dim() >= 2 and tuple(tensor.shape[:2]) == (n, channels), "sizes")
    for name in ("weight", "bias"):
        _need(of.get(name) is None or of[name].numel() == channels, name)
    for name in ("mean", "rstd"):
        _need(of.get(name) is None or of[name].numel() == n * groups, name)
    if "grad_out" in of:
        _shaped(of["grad_out"], tensor.shape, "a gradient")
        _alike(tensor, of["grad_out"])
        way = torch._prims_common.suggest_memory_format(tensor)
        _need(tensor.is_contiguous(memory_format=way) and of["grad_out"].is_contiguous(memory_format=way), "memory")
    _norm_types(of, tensor)


def _weight_norm(of: Given) -> None:
    prefix = "saved_" if "saved_v" in of else ""
    v, g, dim = of[f"{prefix}v"], of[f"{prefix}g"], of["dim"]
    _need(v.dim() > 0 and dim in (0, v.dim() - 1) and v.is_contiguous() and g.is_contiguous(), "a weight")
    _need(g.numel() == v.shape[dim] and g.dim() <= v.dim(), "a weight")
    _alike(v, g)
    if "grad_w" in of:
        _shaped(of["grad_w"], v.shape, "a gradient")
        _need(of["saved_norms"].numel() == v.shape[dim], "norms")
        _alike(v, of["grad_w"])


def _softmax_backward(of: Given) -> None:
    grad, output = of["grad_output"], of["output"]
    _shaped(grad, output.shape, "a gradient")
    _dimension(of["dim"], output.dim())


def _gelu_backward(of: Given) -> None:
    """oneDNN's kernel goes by the shape of the result."""
    _shaped(of["grad_output"], of["self"].shape, "a gradient")


def _noisy(of: Given) -> None:
    noise = of["noise"]
    _shaped(noise, of["self"].shape, "noise")
    _need(_is_long_enough(noise), "noise")
    _alike(of["self"], noise)


# --- losses and embeddings -------------------------------------------------------------------------------------------


def _nll_backward(of: Given) -> None:
    tensor, target = of["self"], of["target"]
    classes = tensor.shape[-1] if tensor.dim() <= 2 else tensor.shape[1]
    _need(of["total_weight"].numel() == 1, "a weight")
    _need(of["weight"] is None or of["weight"].numel() == classes, "weights")
    known = target[target != of["ignore_index"]] if not target.is_meta else target
    _within(known, 0, classes, "classes")


def _margins_backward(of: Given) -> None:
    """Of ``multi_margin_loss`` and ``multilabel_margin_loss``."""
    grad, tensor, target = of["grad_output"], of["self"], of["target"]
    _need(tensor.dim() <= 2 and tensor.numel() > 0 and 0 <= of["reduction"] <= 2, "scores")
    rows, classes = (1, 1, *tensor.shape)[-2:]
    _need(grad.numel() == (1 if of["reduction"] else rows), "a gradient")
    _alike(tensor, grad, of.get("is_target"), of.get("weight"))
    if "is_target" in of:
        _shaped(target, tensor.shape, "classes")
        _shaped(of["is_target"], tensor.shape, "classes")
        _within(target, -1, classes, "classes")
    else:
        _need(target.numel() == rows, "classes")
        _need(of["weight"] is None or of["weight"].numel() == classes, "weights")
        _within(target, 0, classes, "classes")


def _segments(of: Given) -> None:
    data, lengths, axis = of["data"], of["lengths"], of["axis"]
    given: list[torch.Tensor] = [one for one in (lengths, of["offsets"]) if one is not None]
    _need(bool(given), "segments")
    ends = given[0]
    _need(0 <= axis < data.dim() and ends.dim() == axis + 1, "segments")
    _need(ends.shape[:-1] == data.shape[:axis] and ends.numel() > 0 and of.get("indices") is None, "segments")
    size = data.shape[axis]
    _within(ends, 0, size + 1, "segments")
    if lengths is None:
        _need(
            bool((ends.diff() >= 0).all() and (ends[..., 0] == 0).all() and (ends[..., -1] == size).all()), "segments"
        )
    else:
        _need(bool((ends.sum(-1) == size).all()), "segments")
    if "grad" in of:
        count = ends.shape[-1] - (lengths is None)
        for one in (of["grad"], of["output"]):
            _shaped(one, (*data.shape[:axis], count, *data.shape[axis + 1 :]), "a gradient")
        _alike(data, of["grad"], of["output"])


def _ctc(of: Given) -> None:
    scores, targets, blank = of["log_probs"], of["targets"], of["blank"]
    _need(scores.dim() == 3 and scores.numel() > 0 and targets.dim() in (1, 2), "scores")
    steps, batch, classes = scores.shape
    given, wanted = (_numbers(of[name]) for name in ("input_lengths", "target_lengths"))
    _need(0 <= blank < classes and len(given) == len(wanted) == batch, "lengths")
    _need(all(0 <= n <= steps for n in given) and all(n >= 0 for n in wanted), "lengths")
    if targets.dim() == 2:
        _need(targets.shape[0] == batch and all(n <= targets.shape[1] for n in wanted), "targets")
    else:
        _need(sum(wanted) <= targets.shape[0], "targets")
    _within(targets, 0, classes, "targets")
    if "log_alpha" in of:
        longest = max(wanted) if targets.dim() == 1 else targets.shape[1]
        alpha = of["log_alpha"]
        _need(alpha.dim() == 3 and alpha.shape[0] == batch and alpha.shape[1] >= max(given), "scores")
        _need(alpha.shape[2] >= 2 * max(wanted) + 1 and longest >= 0, "scores")
        _need(of["neg_log_likelihood"].numel() == batch == of["grad"].numel(), "a gradient")
        _need(of["neg_log_likelihood"].dim() == 1 == of["grad"].dim(), "a gradient")
        _alike(scores, alpha, of["grad"], of["neg_log_likelihood"])


def _numbers(lengths: Any) -> list[int]:
    return [int(n) for n in lengths.tolist()] if isinstance(lengths, torch.Tensor) else list(lengths)


def _embedding_backward(of: Given) -> None:
    grad, indices, rows = of["grad_output"], of["indices"], of["num_weights"]
    _need(grad.dim() > 0 and rows >= 0 and grad.shape[:-1] == indices.shape, "a gradient")
    known = indices if indices.is_meta else indices[indices != of["padding_idx"]]
    _within(known, 0, rows, "indices")


def _bags(of: Given) -> None:
    weight, indices, offsets = of["weight"], of["indices"], of["offsets"]
    _need(weight.dim() == 2 and indices.dim() == 1 == offsets.dim() and 0 <= of["mode"] <= 2, "bags")
    _need(indices.is_contiguous() and offsets.is_contiguous() and indices.dtype is offsets.dtype, "bags")
    _within(indices, 0, weight.shape[0], "indices")
    _within(offsets, 0, indices.numel() + 1, "offsets")
    _need(not offsets.numel() or offsets.is_meta or bool((offsets.diff() >= 0).all()), "offsets")
    _need(of.get("per_sample_weights") is None or of["per_sample_weights"].shape == indices.shape, "weights")


def _bags_backward(of: Given) -> None:
    grad, indices, bag = of["grad"], of["indices"], of["offset2bag"]
    rows = of["weight"].shape[0] if "weight" in of else of["num_weights"]
    _need(grad.dim() == 2 and indices.dim() == 1 == bag.dim() and rows >= 0 <= of["mode"] <= 2, "bags")
    _need(indices.is_contiguous() and bag.is_contiguous(), "bags")
    made_of_offsets = not bag.numel() and "offsets" in of
    _need(bag.shape == indices.shape or made_of_offsets, "bags")
    _within(indices, 0, rows, "indices")
    _within(bag, 0, grad.shape[0], "bags")
    if "offsets" in of:
        _within(of["offsets"], 0, indices.numel() + 1, "offsets")
        _need(
            of["offsets"].dim() == 1 and grad.shape[0] in (of["offsets"].numel(), of["offsets"].numel() - 1), "offsets"
        )
        last = of["offsets"].numel() == grad.shape[0] + 1
        _need(not (last and made_of_offsets) or int(of["offsets"][-1]) == indices.numel(), "offsets")
        _need(of["offsets"].is_contiguous() and of["offsets"].dtype is indices.dtype, "offsets")
        _need(not made_of_offsets or bool((of["offsets"].diff() >= 0).all()), "offsets")
    if "bag_size" in of:
        _need(of["bag_size"].numel() >= grad.shape[0] or of["mode"] == 0, "bags")
    if of.get("maximum_indices") is not None and of["mode"] == 2:
        _shaped(of["maximum_indices"], grad.shape, "indices")
        _within(of["maximum_indices"], -1, rows, "indices")
    weights = of.get("per_sample_weights")
    _need(weights is None or (weights.shape == indices.shape and weights.dtype is grad.dtype), "weights")
    if "weight" in of:
        _need(of["weight"].dim() == 2 and of["weight"].shape[1] == grad.shape[1] and of["mode"] == 0, "weights")
        _need(bag.numel() == indices.numel() or of["offsets"].numel() > 0, "bags")
        _alike(grad, of["weight"])


# --- other -----------------------------------------------------------------------------------------------------------


def _fft(of: Given) -> None:
    tensor, dims = of["self"], list(of["dim"])
    _need(all(0 <= dim < tensor.dim() for dim in dims) and len(set(dims)) == len(dims), "dimensions")
    _need(bool(dims) and of.get("last_dim_size", 1) >= 1, "dimensions")
    _need(all(tensor.shape[dim] > 0 for dim in dims), "sizes")
    if "last_dim_size" in of:
        _need(of["last_dim_size"] // 2 + 1 == tensor.shape[dims[-1]], "sizes")
    _need(0 <= of["normalization"] <= 2, "a normalisation")


def _fused(of: Given) -> None:
    params = of["self"]
    for name, many in of.items():
        if not isinstance(many, (list, tuple)) or name == "self":
            continue
        optional = name in ("max_exp_avg_sqs", "momentum_buffer_list")
        _need(len(many) == len(params) or (optional and not many), name)
        for param, one in zip(params, many, strict=False):
            if name == "state_steps":
                _need(one.numel() == 1 and one.dtype is torch.float32, name)
            else:
                _need(one.shape == param.shape and _is_long_enough(one) and one.dtype is param.dtype, name)
    _need(all(param.is_floating_point() and _is_long_enough(param) for param in params), "parameters")
    _need(not of.get("amsgrad", False) or len(of["max_exp_avg_sqs"]) == len(params), "max_exp_avg_sqs")
    _need(not of.get("momentum") or len(of.get("momentum_buffer_list", params)) == len(params), "momentum_buffer_list")
    for name in ("lr", "grad_scale", "found_inf"):
        _need(not isinstance(of.get(name), torch.Tensor) or of[name].numel() == 1, name)


def _attention(of: Given) -> None:
    query, key, value = of["query"], of["key"], of["value"]
    _need(query.dim() == key.dim() == value.dim() == 4 and query.numel() > 0 < key.numel(), "attention")
    batch, heads, length, width = query.shape
    _need(key.shape[0] == value.shape[0] == batch and key.shape[3] == value.shape[3] == width, "attention")
    _need(key.shape[1] == value.shape[1] == heads and key.shape[2] == value.shape[2], "attention")
    _alike(query, key, value)
    rows = (query, key, value, of.get("out", query))  # read as if their numbers lay one behind the other
    _need(all(one.shape[-1] <= 1 or one.stride(-1) == 1 for one in rows), "attention")
    mask = of.get("attn_mask")
    if mask is not None:
        full = (batch, heads, length, key.shape[2])[-mask.dim() :]
        _need(mask.dim() in (2, 4), "a mask")
        _need(all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True)), "a mask")
    if "grad_out" in of:
        _shaped(of["grad_out"], query.shape, "a gradient")
        _shaped(of["out"], query.shape, "a gradient")
        _need(of["logsumexp"].numel() == batch * heads * length and of["logsumexp"].dim() == 3, "a gradient")
        _alike(query, of["grad_out"], of["out"])


def _recurrent(of: Given) -> None:
    tensor, hidden, gates = of["input"], of["hidden_size"], {2: 4, 3: 3}.get(of["mode"], 1)
    _need(tensor.dim() == 3 and hidden > 0 and of["num_layers"] == 1 and not of["bidirectional"], "a layer")
    _need(not of["batch_sizes"] and not of["batch_first"] and of["mode"] == 2, "a layer")
    steps, batch, width = tensor.shape
    first = "weight0" if "weight0" in of else "weight1"
    weights = [of[f"weight{int(first[-1]) + i}"] for i in range(4)]
    wanted = [(gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
    for weight, shape in zip(weights, wanted, strict=True):
        if len(shape) == 2 or of["has_biases"]:
            _shaped(weight, shape, "weights")
    _need(steps > 0 < batch and width > 0, "an input")
    for name in ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"):
        state = of.get(name)
        _need(state is None or (state.numel() == batch * hidden and state.shape[-1] == hidden), name)
    for name in ("output", "grad_output"):
        _shaped(of.get(name), (steps, batch, hidden), name)
    floats = [one for one in of.values() if isinstance(one, torch.Tensor) and one is not of.get("workspace")]
    _alike(tensor, *floats)


def _lstm(of: Given) -> None:
    """Of ``marid::lstm_layer``, in the names of what it calls."""
    weights = {f"weight{i}": of[name] for i, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh"))}
    names = {"hx": "hx_", "cx": "cx_", "hy": "hy_", "cy": "cy_"}
    given = {names.get(name, name): value for name, value in of.items()}
    _need(len(of["hidden_size"]) == 1, "a layer")
    constant = {"mode": 2, "num_layers": 1, "bidirectional": False, "batch_sizes": [], "batch_first": False}
    _recurrent({**given, **weights, **constant, "hidden_size": of["hidden_size"][0]})


def _batched(of: Given) -> None:
    _need(0 <= of["self_num_batch_dims"] <= of["self"].dim(), "dimensions")


def _infos(of: Given) -> None:
    _need(of["info"].dtype is torch.int32, "types")


def _finite(of: Given) -> None:
    """LAPACK's balancing ends in numbers of rows that there are not."""
    tensor = of["self"]
    _need(tensor.is_meta or bool(tensor.isfinite().all()), "a matrix")


def _observed(of: Given) -> None:
    """Ranges and switches are read where they begin; those of rows are made when there are none."""
    switches, ranges = ("observer_on", "fake_quant_on"), ("running_min", "running_max", "scale", "zero_point")
    _need(all(of[name].numel() == 1 for name in switches), "switches")
    _need(of["per_row_fake_quant"] or all(of[name].numel() for name in ranges), "ranges")


def _grouped(of: Given) -> None:
    first, second, ends = of["self"], of["mat2"], of["offs"]
    _need(first.dim() in (2, 3) and second.dim() in (2, 3) and of["bias"] is None, "groups")
    if ends is not None:
        whole = second.shape[-1] if first.dim() == 3 else first.shape[0 if second.dim() == 3 else 1]
        groups = second.shape[0] if second.dim() == 3 else first.shape[0] if first.dim() == 3 else ends.numel()
        _need(ends.dim() == 1 and ends.numel() == groups and ends.dtype is torch.int32, "groups")
        _within(ends, 0, whole + 1, "groups")
        _need(ends.is_meta or not ends.numel() or bool((ends.diff() >= 0).all()), "groups")


def _not_repeated(of: Given) -> None:
    """PyTorch 2.13 reads memory behind a dimension that is one number repeated, where it looks along that."""
    tensor, dim = of["self"], of.get("dim")
    if dim is None or not tensor.dim():
        return
    _dimension(dim, tensor.dim())
    _need(tensor.shape[dim] <= 1 or tensor.stride(dim) != 0, "a dimension whose numbers are one number")


def _pdist_backward(of: Given) -> None:
    grad, tensor, found = of["grad"], of["self"], of["pdist"]
    _need(tensor.dim() == 2 and tensor.numel() > 0 and tensor.is_contiguous() and found.is_contiguous(), "distances")
    count = tensor.shape[0] * (tensor.shape[0] - 1) // 2
    _need(grad.dim() == 1 == found.dim() and grad.numel() == count == found.numel(), "distances")
    _alike(tensor, grad, found)


def _pdist_forward(of: Given) -> None:
    _need(of["self"].dim() == 2, "distances")


def _cdist_backward(of: Given) -> None:
    first, second = of["x1"], of["x2"]
    _need(first.dim() >= 2 <= second.dim() and first.shape[-1] == second.shape[-1], "distances")
    _need(first.shape[:-2] == second.shape[:-2], "distances")
    wanted = (*first.shape[:-1], second.shape[-2])
    _shaped(of["grad"], wanted, "a gradient")
    _shaped(of["cdist"], wanted, "distances")
    _alike(first, second, of["grad"], of["cdist"])


def _lu(of: Given) -> None:
    data, pivots = of["LU_data"], of["LU_pivots"]
    _need(data.dim() >= 2 and pivots.dim() == data.dim() - 1 and pivots.dtype is torch.int32, "pivots")
    _need(pivots.shape[:-1] == data.shape[:-2] and pivots.shape[-1] == min(data.shape[-2:]), "pivots")
    _within(pivots, 1, data.shape[-2] + 1, "pivots")


CHECKS: dict[str, Callable[[Given], None]] = {
    "_reshape_alias": _reshape_alias,
    "as_strided_": _reshape_alias,
    "unfold_backward": _unfold_backward,
    **{f"_adaptive_avg_pool{n}d": _output_size for n in (2, 3)},
    "fractional_max_pool2d_backward": _fractional(2),
    "fractional_max_pool3d_backward": _fractional(3),
    **{
        f"{name}{end}": _scaled
        for name in (
            *[f"{exact}upsample_nearest{kind}{n}d" for n in (1, 2, 3) for exact, kind in (("", ""), ("_", "_exact"))],
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
            *[f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")],
        )
        for end in ("", "_backward")
    },
    "grid_sampler_2d_backward": _sampled_backward,
    "grid_sampler_3d_backward": _sampled_backward,
    **{f"rrelu_with_noise{end}": _noisy for end in ("", "_", "_functional")},
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _bags_backward,
    "lstm_layer": _lstm,
    "lstm_layer_backward": _lstm,
    **{f"{name}_pool{n}d_backward": _pooled_average(n) for name in ("_adaptive_avg", "avg") for n in (2, 3)},
    "adaptive_max_pool2d_backward": _pooled_maximum(2),
    "adaptive_max_pool3d_backward": _pooled_maximum(3),
    "max_pool2d_with_indices_backward": _pooled_maximum(2),
    "max_pool3d_with_indices_backward": _pooled_maximum(3),
    **{f"replication_pad{n}d_backward": _padded(n) for n in (1, 2, 3)},
    **{f"reflection_pad{n}d_backward": _reflected(n) for n in (1, 2, 3)},
    "convolution_backward": _convolution_backward,
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
    "_fft_c2c": _fft,
    "_fft_c2r": _fft,
    "_fft_r2c": _fft,
    **{f"_fused_{name}_": _fused for name in ("adam", "adamw", "sgd", "adagrad")},
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "_pdist_forward": _pdist_forward,
    "_pdist_backward": _pdist_backward,
    "_cdist_backward": _cdist_backward,
    "lu_unpack": _lu,
    "_linalg_eigvals": _finite,
    "_fused_moving_avg_obs_fq_helper": _observed,
    "_grouped_mm": _grouped,
    "_new_zeros_with_same_feature_meta": _batched,
    "_linalg_check_errors": _infos,
    "median": _not_repeated,
    "nanmedian": _not_repeated,
}
"""By the name of an operator of ATen."""
