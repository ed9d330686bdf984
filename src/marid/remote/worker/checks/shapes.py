"""Views, pooling, padding, resampling and convolutions: the sizes of what is read follow from other arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from marid.remote.worker.checks.requirements import Given, alike, dimension, need, shaped, within


def _reshape_alias(of: Given) -> None:
    tensor, size, stride, offset = of["self"], of["size"], of["stride"], of.get("storage_offset")
    need(len(size) == len(stride) and min([*size, *stride], default=0) >= 0, "a view")
    if math.prod(size):
        last = int(tensor.storage_offset()) if offset is None else offset
        need(last >= 0, "a view")
        last += sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        need((last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes(), "a view")


def _unfold_backward(of: Given) -> None:
    grad, sizes, dim, size, step = of["grad_in"], list(of["input_sizes"]), of["dim"], of["size"], of["step"]
    dimension(dim, max(len(sizes), 1))
    if not sizes:  # a number is unfolded like a tensor of one
        need(step > 0 and 0 <= size <= 1, "a view")
        shaped(grad, [size], "a gradient")
        return
    need(min(sizes) >= 0 and step > 0 and 0 <= size <= sizes[dim], "a view")
    wanted = [*sizes, size]
    wanted[dim % len(sizes)] = (sizes[dim] - size) // step + 1
    shaped(grad, wanted, "a gradient")


def _pooled_average(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor = of["grad_output"], of["self"]
        need(grad.dim() == tensor.dim() and spatial < tensor.dim() <= spatial + 2, "a gradient")
        need(grad.shape[:-spatial] == tensor.shape[:-spatial], "a gradient")
        need(min((*grad.shape[-spatial:], *tensor.shape[-spatial:])) > 0, "a gradient")
        alike(grad, tensor)

    return check


def _pooled_maximum(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor, indices = of["grad_output"], of["self"], of["indices"]
        need(grad.dim() == tensor.dim() and spatial < tensor.dim() <= spatial + 2, "a gradient")
        need(grad.shape[:-spatial] == tensor.shape[:-spatial] and indices.dtype is torch.int64, "a gradient")
        shaped(indices, grad.shape, "indices")
        need(torch.ops.aten.is_non_overlapping_and_dense.default(indices), "indices")  # read as they lie in memory
        alike(grad, tensor)
        within(indices, 0, math.prod(tensor.shape[-spatial:]), "indices")

    return check


def _fractional(spatial: int) -> Callable[[Given], None]:
    maximum = _pooled_maximum(spatial)

    def check(of: Given) -> None:
        maximum(of)
        need(len(of["kernel_size"]) == spatial == len(of["output_size"]), "sizes")
        shaped(of["grad_output"], [*of["self"].shape[:-spatial], *of["output_size"]], "a gradient")

    return check


def _output_size(of: Given) -> None:
    need(min(of["output_size"], default=0) >= 0, "a size")


def _scaled(of: Given) -> None:
    """Kernels find the place in the input by a scale that need not be that of the sizes, as a whole number that may be
    beyond what that type holds."""
    names = ("scales",) if "scales" in of else ("scales_d", "scales_h", "scales_w")
    scales = [of[name] for name in names if name in of]
    need(not scales or len(scales) == len(of["output_size"]), "sizes")
    for scale, size in zip(scales, of["output_size"] if scales else (), strict=True):
        need(scale is None or not scale > 0 or size <= scale * (1 << 24), "a scale")


def _sampled_backward(of: Given) -> None:
    grad, tensor, grid = of["grad_output"], of["input"], of["grid"]
    spatial = tensor.dim() - 2
    need(spatial in (2, 3) and grid.dim() == grad.dim() == tensor.dim() and tensor.numel() > 0, "a grid")
    shaped(grid, [tensor.shape[0], *grid.shape[1:-1], spatial], "a grid")
    shaped(grad, [*tensor.shape[:2], *grid.shape[1:-1]], "a gradient")
    need(0 <= of["interpolation_mode"] <= 2 and 0 <= of["padding_mode"] <= 2, "a way to sample")
    need(len(of["output_mask"]) == 2, "a mask")
    alike(tensor, grad, grid)
    if of["padding_mode"] and not grid.is_meta:  # places outside are moved inside, but for those that are no numbers
        need(not bool(grid.isnan().any()), "a grid")


def _index_put(of: Given) -> None:
    """The CPU's kernel looks where indices lead; that of CUDA does not, where a call says that they are safe."""
    if of["self"].device.type == "cpu" or not of["unsafe"]:
        return
    dim = 0
    for index in of["indices"]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            need(dim < of["self"].dim(), "indices")
            size = of["self"].shape[dim]
            within(index, -size, size, "indices")
            dim += 1
        else:
            dim += index.dim()


def _padded(spatial: int) -> Callable[[Given], None]:
    def check(of: Given) -> None:
        grad, tensor, padding = of["grad_output"], of["self"], of["padding"]
        need(len(padding) == 2 * spatial and spatial < tensor.dim() <= spatial + 2, "padding")
        wanted = list(tensor.shape)
        for index in range(spatial):
            need(all(abs(amount) < 1 << 31 for amount in padding), "padding")
            wanted[-1 - index] += padding[2 * index] + padding[2 * index + 1]
        shaped(grad, wanted, "a gradient")
        need(min((*wanted[-spatial:], *tensor.shape[-spatial:])) > 0, "a gradient")
        alike(grad, tensor)

    return check


def _reflected(spatial: int) -> Callable[[Given], None]:
    padded = _padded(spatial)

    def check(of: Given) -> None:
        padded(of)
        for index in range(spatial):
            size = of["self"].shape[-1 - index]
            need(all(abs(amount) < size for amount in of["padding"][2 * index : 2 * index + 2]), "padding")

    return check


_LONGEST_STRIDE = 32


def _strides(of: Given) -> None:
    """oneDNN leaves its memory where a transposed convolution in bfloat16 has strides of 100 (PyTorch 2.13)."""
    halved = torch.bfloat16 in (of["input"].dtype, of["weight"].dtype)
    need(not halved or all(step <= _LONGEST_STRIDE for step in of["stride"]), "strides")


def _convolution(of: Given) -> None:
    if of["transposed"]:
        _strides(of)


def _convolution_backward(of: Given) -> None:
    """The gradient has the shape of the result; not all kernels that may be chosen look."""
    grad, tensor, weight, groups = of["grad_output"], of["input"], of["weight"], of["groups"]
    spatial = tensor.dim() - 2
    _strides(of)
    need(spatial > 0 and weight.dim() == tensor.dim() and groups > 0 and len(of["output_mask"]) == 3, "a convolution")
    names = ("stride", "padding", "dilation", "output_padding")
    lists = [of[name] * spatial if len(of[name]) == 1 else of[name] for name in names]
    need(all(len(amounts) == spatial for amounts in lists) and min(lists[0]) > 0 < min(lists[2]), "a convolution")
    need(weight.shape[0] % groups == 0 and weight.shape[0] > 0, "a convolution")
    ins, outs = (weight.shape[1] * groups, weight.shape[0])[:: -1 if of["transposed"] else 1]
    need(tensor.shape[1] == ins, "channels")
    wanted = [tensor.shape[0], outs]
    for size, kernel, step, pad, dilation, more in zip(tensor.shape[2:], weight.shape[2:], *lists, strict=True):
        reach = dilation * (kernel - 1) + 1
        need(kernel > 0 and pad >= 0 <= more, "a convolution")
        wanted.append(
            (size - 1) * step - 2 * pad + reach + more if of["transposed"] else (size + 2 * pad - reach) // step + 1
        )
    shaped(grad, wanted, "a gradient")


CHECKS: dict[str, Callable[[Given], None]] = {
    "_reshape_alias": _reshape_alias,
    "as_strided_": _reshape_alias,
    "unfold_backward": _unfold_backward,
    "_index_put_impl_": _index_put,
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
    **{f"{name}_pool{n}d_backward": _pooled_average(n) for name in ("_adaptive_avg", "avg") for n in (2, 3)},
    "adaptive_max_pool2d_backward": _pooled_maximum(2),
    "adaptive_max_pool3d_backward": _pooled_maximum(3),
    "max_pool2d_with_indices_backward": _pooled_maximum(2),
    "max_pool3d_with_indices_backward": _pooled_maximum(3),
    **{f"replication_pad{n}d_backward": _padded(n) for n in (1, 2, 3)},
    **{f"reflection_pad{n}d_backward": _reflected(n) for n in (1, 2, 3)},
    **{f"{start}convolution{end}": _convolution for start, end in (("", ""), ("_", ""), ("", "_overrideable"))},
    "convolution_backward": _convolution_backward,
}
"""By the name of an operator of ATen."""
