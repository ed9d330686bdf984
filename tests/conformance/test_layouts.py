"""Shape, strides and dtype of what ``torch.nn.functional`` returns, as recorded, beside eager PyTorch's.

In many layouts, for sizes that are tried and sizes that are too large for it. None of it runs eagerly.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import marid

from .layouts import laid_out
from .opinfo import to_device

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LAYOUTS = ("plain", "channels last", "permuted", "sliced", "strides of ones")
SIZES_2D = ((2, 8, 6, 6), (1, 8, 6, 6), (2, 1, 6, 6), (2, 8, 6, 1), (4, 32, 24, 24), (17, 8, 16, 12))

Call = Callable[[torch.Tensor], Any]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.zeros(x.shape, dtype=x.dtype, device=x.device)], 1)


def _attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.detach() * 2, x.detach() * 3)


def _weight(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device).requires_grad_()


CALLS: dict[str, Call] = {
    "adaptive_avg_pool2d 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d 3": lambda x: F.adaptive_avg_pool2d(x, (3, 1)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 1)),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, (2, 1)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, _weight(x, x.shape[1]), None, True),
    "batch_norm eval": lambda x: F.batch_norm(x, _weight(x, x.shape[1]).detach(), _weight(x, x.shape[1]).detach()),
    "cat": _mixed,
    "channel_shuffle": lambda x: F.channel_shuffle(x, 1 if x.shape[1] == 1 else 2),
    "clone": lambda x: x.clone(),
    "conv2d": lambda x: F.conv2d(x, _weight(x, 4, x.shape[1], 1, 1), _weight(x, 4)),
    "conv2d depthwise": lambda x: F.conv2d(x, _weight(x, x.shape[1], 1, 3, 3), padding=1, groups=x.shape[1]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, _weight(x, x.shape[1], 4, 2, 2), stride=2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.detach() * 2, 1),
    "cumsum": lambda x: x.cumsum(2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "fold": lambda x: F.fold(F.unfold(x, (2, 1)), x.shape[2:], (2, 1)),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64, device=x.device)),
    "gelu": F.gelu,
    "glu": lambda x: F.glu(_mixed(x), 1),
    "grid_sample": lambda x: F.grid_sample(
        x, torch.zeros(x.shape[0], 5, 4, 2, dtype=x.dtype, device=x.device), align_corners=False
    ),
    "group_norm": lambda x: F.group_norm(
        x, 1 if x.shape[1] == 1 else 4, _weight(x, x.shape[1]), _weight(x, x.shape[1])
    ),
    "hardswish": F.hardswish,
    "index": lambda x: x[:, torch.zeros(3, dtype=torch.int64, device=x.device)],
    "index_select": lambda x: x.index_select(2, torch.zeros(3, dtype=torch.int64, device=x.device)),
    "instance_norm": lambda x: F.instance_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:], _weight(x, *x.shape[2:])),
    "linear": lambda x: F.linear(x, _weight(x, 5, x.shape[3]), _weight(x, 5)),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "logsumexp": lambda x: x.logsumexp((1, 2)),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 1, 2, (2, 1)),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "max dim": lambda x: x.max(1),
    "max_pool2d": lambda x: F.max_pool2d(x, (2, 1), return_indices=True),
    "mean": lambda x: x.mean((2, 3)),
    "norm": lambda x: x.norm(dim=1),
    "pad": lambda x: F.pad(x, (1, 0, 0, 2)),
    "pad reflect": lambda x: F.pad(x, (0, 0, 1, 1), mode="reflect"),
    "pad replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pad circular": lambda x: F.pad(x, (0, 0, 1, 1), mode="circular"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.repeat(1, 1, 1, 2), 2),
    "prelu": lambda x: F.prelu(x, _weight(x, x.shape[1])),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[3:], _weight(x, x.shape[3])),
    "rnn": lambda x: nn.RNN(x.shape[3], 3, dtype=x.dtype).to(x.device)(x[0]),
    "roll": lambda x: x.roll(1, 2),
    "scaled_dot_product_attention": _attended,
    "scatter": lambda x: x.scatter(1, torch.zeros(x.shape, dtype=torch.int64, device=x.device), x),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sort": lambda x: x.sort(1),
    "stack": lambda x: torch.stack([x, x.contiguous()], 2),
    "std": lambda x: x.std(1),
    "sum": lambda x: x.sum(1),
    "topk": lambda x: x.topk(1, 1),
    "tril": lambda x: x.tril(),
    "upsample nearest": lambda x: F.interpolate(x, scale_factor=2),
    "upsample bilinear": lambda x: F.interpolate(x, (7, 5), mode="bilinear"),
    "upsample bilinear antialias": lambda x: F.interpolate(x, (7, 5), mode="bilinear", antialias=True),
    "upsample bicubic": lambda x: F.interpolate(x, (7, 5), mode="bicubic"),
    "upsample area": lambda x: F.interpolate(x, (3, 1), mode="area"),
    "where": lambda x: torch.where(x > 0, x, x.new_zeros(())),
}


def _looks(call: Call, x: torch.Tensor) -> Any:
    """Geometry of results and gradients; the type of the error where it raises one."""
    leaf = x.detach().requires_grad_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs = [t for t in tree_leaves(call(leaf)) if isinstance(t, torch.Tensor)]
            differentiable = [t for t in outs if t.requires_grad]
            grads = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in differentiable]
            outs += torch.autograd.grad(differentiable, leaf, grads) if differentiable else ()
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)
    return [(tuple(t.shape), _strides(t) if t is outs[-1] else t.stride(), t.dtype) for t in outs]


def _strides(grad: torch.Tensor) -> list[int | None]:
    """Those that mean something. Where several gradients of one tensor meet, autograd adds to the first of them; where
    that is a subclass it makes a new one instead, and computes the strides of dimensions of one element."""
    return [step if size > 1 else None for size, step in zip(grad.shape, grad.stride(), strict=True)]


def _differences(call: Call, sizes: Any, layouts: Any, dtypes: Any) -> list[str]:
    choice, found = random.Random(0), []
    for shape, layout, dtype in itertools.product(sizes, layouts, dtypes):
        x = laid_out(choice, shape, dtype, layout)
        marid.reset_stats()
        expected, recorded = _looks(call, x), _looks(call, to_device(x))
        if expected != recorded:
            found.append(f"{shape} {x.stride()} {dtype}: {recorded} recorded, {expected} returned")
        elif not isinstance(expected, type):
            found += [f"{shape} {x.stride()} {dtype}: {name} ran eagerly" for name in marid.stats().fallbacks]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_what_is_recorded_is_what_eager_returns(name: str) -> None:
    found = _differences(CALLS[name], SIZES_2D[::2], LAYOUTS[:2], DTYPES[:1])
    assert not found, "\n".join(found)


@pytest.mark.conformance
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_recorded_is_what_eager_returns_in_every_layout(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _differences(CALLS[name], SIZES_2D, LAYOUTS, DTYPES)
    finally:
        torch.set_num_threads(before)
    assert not found, "\n".join(found)
