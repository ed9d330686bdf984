"""Transforms, fused optimizers, attention, recurrent layers, distances and linear algebra."""

from __future__ import annotations

from collections.abc import Callable

import torch

from marid.remote.worker.checks.requirements import Given, alike, dimension, is_long_enough, need, shaped, within


def _fft(of: Given) -> None:
    tensor, dims = of["self"], list(of["dim"])
    need(all(0 <= dim < tensor.dim() for dim in dims) and len(set(dims)) == len(dims), "dimensions")
    need(bool(dims) or "forward" in of, "dimensions")  # from complex to complex, none is a copy
    need(of.get("last_dim_size", 1) >= 1, "dimensions")
    need(all(tensor.shape[dim] > 0 for dim in dims), "sizes")
    if "last_dim_size" in of:
        need(of["last_dim_size"] // 2 + 1 == tensor.shape[dims[-1]], "sizes")
    need(0 <= of["normalization"] <= 2, "a normalisation")


def _fused(of: Given) -> None:
    params = of["self"]
    for name, many in of.items():
        if not isinstance(many, (list, tuple)) or name == "self":
            continue
        optional = name in ("max_exp_avg_sqs", "momentum_buffer_list")
        need(len(many) == len(params) or (optional and not many), name)
        for param, one in zip(params, many, strict=False):
            if name == "state_steps":
                need(one.numel() == 1 and one.dtype is torch.float32, name)
            else:
                need(one.shape == param.shape and is_long_enough(one) and one.dtype is param.dtype, name)
    need(all(param.is_floating_point() and is_long_enough(param) for param in params), "parameters")
    need(not of.get("amsgrad", False) or len(of["max_exp_avg_sqs"]) == len(params), "max_exp_avg_sqs")
    need(not of.get("momentum") or len(of.get("momentum_buffer_list", params)) == len(params), "momentum_buffer_list")
    for name in ("lr", "grad_scale", "found_inf"):
        need(not isinstance(of.get(name), torch.Tensor) or of[name].numel() == 1, name)


def _attention(of: Given) -> None:
    query, key, value = of["query"], of["key"], of["value"]
    need(query.dim() == key.dim() == value.dim() == 4 and query.numel() > 0 < key.numel(), "attention")
    batch, heads, length, width = query.shape
    need(key.shape[0] == value.shape[0] == batch and key.shape[3] == value.shape[3] == width, "attention")
    need(key.shape[1] == value.shape[1] and key.shape[2] == value.shape[2], "attention")
    need(heads % key.shape[1] == 0, "attention")  # so many heads of the query for each of the keys
    alike(query, key, value)
    rows = (query, key, value, of.get("out", query))  # read as if their numbers lay one behind the other
    need(all(one.shape[-1] <= 1 or one.stride(-1) == 1 for one in rows), "attention")
    mask = of.get("attn_mask")
    if mask is not None:
        full = (batch, heads, length, key.shape[2])[-mask.dim() :]
        need(mask.dim() in (2, 4), "a mask")
        need(all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True)), "a mask")
    if "grad_out" in of:
        shaped(of["grad_out"], query.shape, "a gradient")
        shaped(of["out"], query.shape, "a gradient")
        need(of["logsumexp"].numel() == batch * heads * length and of["logsumexp"].dim() == 3, "a gradient")
        alike(query, of["grad_out"], of["out"])


def _recurrent(of: Given) -> None:
    tensor, hidden, gates = of["input"], of["hidden_size"], {2: 4, 3: 3}.get(of["mode"], 1)
    need(tensor.dim() == 3 and hidden > 0 and of["num_layers"] == 1 and not of["bidirectional"], "a layer")
    need(not of["batch_sizes"] and not of["batch_first"] and of["mode"] == 2, "a layer")
    steps, batch, width = tensor.shape
    first = "weight0" if "weight0" in of else "weight1"
    weights = [of[f"weight{int(first[-1]) + i}"] for i in range(4)]
    wanted = [(gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
    for weight, shape in zip(weights, wanted, strict=True):
        if len(shape) == 2 or of["has_biases"]:
            shaped(weight, shape, "weights")
    need(steps > 0 < batch and width > 0, "an input")
    for name in ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"):
        state = of.get(name)
        need(state is None or (state.numel() == batch * hidden and state.shape[-1] == hidden), name)
    for name in ("output", "grad_output"):
        shaped(of.get(name), (steps, batch, hidden), name)
    floats = [one for one in of.values() if isinstance(one, torch.Tensor) and one is not of.get("workspace")]
    alike(tensor, *floats)


def _lstm(of: Given) -> None:
    """Of ``marid::lstm_layer``, in the names of what it calls."""
    weights = {f"weight{i}": of[name] for i, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh"))}
    names = {"hx": "hx_", "cx": "cx_", "hy": "hy_", "cy": "cy_"}
    given = {names.get(name, name): value for name, value in of.items()}
    need(len(of["hidden_size"]) == 1, "a layer")
    constant = {"mode": 2, "num_layers": 1, "bidirectional": False, "batch_sizes": [], "batch_first": False}
    _recurrent({**given, **weights, **constant, "hidden_size": of["hidden_size"][0]})


def _batched(of: Given) -> None:
    need(0 <= of["self_num_batch_dims"] <= of["self"].dim(), "dimensions")


def _infos(of: Given) -> None:
    need(of["info"].dtype is torch.int32, "types")


def _finite(of: Given) -> None:
    """LAPACK's balancing ends in numbers of rows that there are not."""
    tensor = of["self"]
    need(tensor.is_meta or bool(tensor.isfinite().all()), "a matrix")


def _observed(of: Given) -> None:
    """Ranges and switches are read where they begin; those of rows are made when there are none."""
    switches, ranges = ("observer_on", "fake_quant_on"), ("running_min", "running_max", "scale", "zero_point")
    need(all(of[name].numel() == 1 for name in switches), "switches")
    need(of["per_row_fake_quant"] or all(of[name].numel() for name in ranges), "ranges")


def _grouped(of: Given) -> None:
    first, second, ends = of["self"], of["mat2"], of["offs"]
    need(first.dim() in (2, 3) and second.dim() in (2, 3) and of["bias"] is None, "groups")
    if ends is not None:
        whole = second.shape[-1] if first.dim() == 3 else first.shape[0 if second.dim() == 3 else 1]
        groups = second.shape[0] if second.dim() == 3 else first.shape[0] if first.dim() == 3 else ends.numel()
        need(ends.dim() == 1 and ends.numel() == groups and ends.dtype is torch.int32, "groups")
        within(ends, 0, whole + 1, "groups")
        need(ends.is_meta or not ends.numel() or bool((ends.diff() >= 0).all()), "groups")


def _not_repeated(of: Given) -> None:
    """PyTorch 2.13 reads memory behind a dimension that is one number repeated, where it looks along that."""
    tensor, dim = of["self"], of.get("dim")
    if dim is None or not tensor.dim():
        return
    dimension(dim, tensor.dim())
    need(tensor.shape[dim] <= 1 or tensor.stride(dim) != 0, "a dimension whose numbers are one number")


def _pdist_backward(of: Given) -> None:
    grad, tensor, found = of["grad"], of["self"], of["pdist"]
    need(tensor.dim() == 2 and len(tensor) > 0 and tensor.is_contiguous() and found.is_contiguous(), "distances")
    count = tensor.shape[0] * (tensor.shape[0] - 1) // 2
    need(grad.dim() == 1 == found.dim() and grad.numel() == count == found.numel(), "distances")
    alike(tensor, grad, found)


def _pdist_forward(of: Given) -> None:
    need(of["self"].dim() == 2, "distances")


def _cdist_backward(of: Given) -> None:
    first, second = of["x1"], of["x2"]
    need(first.dim() >= 2 <= second.dim() and first.shape[-1] == second.shape[-1], "distances")
    wanted = (*torch.broadcast_shapes(first.shape[:-2], second.shape[:-2]), first.shape[-2], second.shape[-2])
    shaped(of["grad"], wanted, "a gradient")
    shaped(of["cdist"], wanted, "distances")
    alike(first, second, of["grad"], of["cdist"])


def _lu(of: Given) -> None:
    data, pivots = of["LU_data"], of["LU_pivots"]
    need(data.dim() >= 2 and pivots.dim() == data.dim() - 1 and pivots.dtype is torch.int32, "pivots")
    need(pivots.shape[:-1] == data.shape[:-2] and pivots.shape[-1] == min(data.shape[-2:]), "pivots")
    within(pivots, 1, data.shape[-2] + 1, "pivots")


CHECKS: dict[str, Callable[[Given], None]] = {
    "lstm_layer": _lstm,
    "lstm_layer_backward": _lstm,
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
