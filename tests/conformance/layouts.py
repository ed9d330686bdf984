"""Random layouts of tensors, random convolutions on them, and rules compared with the CPU's kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.rules import rules
from marid.graph.node import Node

KINDS = ("plain", "plain", "channels last", "permuted", "sliced", "expanded", "strides of ones")
DTYPES = (*[torch.float32] * 4, torch.float64, torch.bfloat16, torch.float16)


def laid_out(choice: random.Random, shape: Sequence[int], dtype: torch.dtype, kind: str | None = None) -> torch.Tensor:
    """Zeros of this shape, in a layout of this kind or of any."""
    rank = len(shape)
    kind = kind or choice.choice(KINDS)
    last = (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))
    if kind == "channels last":
        return _in_order(shape, last, dtype)
    if kind == "permuted":
        return _in_order(shape, choice.sample(range(rank), rank), dtype)
    if kind == "sliced":
        wide = [size + choice.choice((0, 0, 1, 2)) for size in shape]
        order = last if choice.random() < 0.4 else range(rank)
        return _in_order(wide, order, dtype)[tuple([slice(size) for size in shape])]
    if kind == "expanded":
        return torch.zeros([1 if choice.random() < 0.3 else size for size in shape], dtype=dtype).expand(shape)
    made = torch.zeros(shape, dtype=dtype)
    if kind == "strides of ones":
        strides = zip(shape, made.stride(), strict=True)
        return made.as_strided(shape, [choice.choice((0, 1, 7, 1000)) if n == 1 else step for n, step in strides])
    return made


def _in_order(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose dimensions lie in memory in this order."""
    inner = torch.zeros([shape[dim] for dim in order], dtype=dtype)
    return inner.permute([list(order).index(dim) for dim in range(len(shape))])


@dataclass
class Convolution:
    """Arguments of ``aten::convolution``; ``options`` are those behind the tensors."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    options: tuple[Any, ...]

    @property
    def groups(self) -> int:
        return self.options[-1]

    @property
    def bias_sizes(self) -> list[int] | None:
        return None if self.bias is None else list(self.bias.shape)


def convolution(choice: random.Random) -> Convolution:
    """One that may be refused by the CPU, too."""
    rank, transposed, groups = choice.choice((1, 2, 2, 2, 3)), choice.random() < 0.3, choice.choice((1, 1, 1, 2, 3, 8))
    wide = (1, 3, 8, 32) if groups == 1 else (1, 2, 4)
    inputs, outputs = groups * choice.choice(wide), choice.choice(wide)
    if choice.random() < 0.03:
        inputs = 0
    kernel = [choice.choice((1, 1, 2, 3, 4, 5)) for _ in range(rank)]
    if choice.random() < 0.5:
        kernel = kernel[:1] * rank
    stride = [choice.choice((1, 1, 2)) for _ in range(rank)]
    dilation = [choice.choice((1, 1, 1, 1, 2)) for _ in range(rank)]
    padding = [choice.choice((0, 1, 2)) for _ in range(rank)]
    extra = [choice.choice((0, 0, 1)) if transposed and step > 1 else 0 for step in stride]
    sizes = [choice.choice((1, 2, 4, 6, 9) if rank < 3 else (1, 2, 4, 5)) for _ in range(rank)]
    if rank == 2 and choice.random() < 0.1:
        sizes = [32, 31]
    dtype = choice.choice(DTYPES)
    per_group = [inputs, outputs] if transposed else [outputs * groups, inputs // groups]
    return Convolution(
        laid_out(choice, [choice.choice((0, 1, 1, 2, 2, 16, 17)), inputs, *sizes], dtype),
        laid_out(choice, [*per_group, *kernel], dtype),
        torch.zeros(outputs * groups, dtype=dtype) if choice.random() < 0.5 else None,
        (stride, padding, dilation, transposed, extra, groups),
    )


def compare(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether there is a rule for this call; then it must say what the CPU's kernel does."""
    ruled = _ruled(func, args)
    if ruled is NotImplemented:
        return False
    shown = [(a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
    assert ruled == _returned(func, args), f"{func}{shown}, {torch.get_num_threads()} threads"
    return True


def _recorded(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return Node(0, None, None, None, handles.spec_of(arg, 0), None, None, None)
    return tuple(arg) if isinstance(arg, list) else arg


def _ruled(func: Any, args: tuple[Any, ...]) -> Any:
    """Shape and strides of each result by the rule; ``NotImplemented`` where there is none."""
    found = rules[func](*map(_recorded, args))
    if found is NotImplemented:
        return NotImplemented
    many = found if type(found) is list else [found]
    return [one and (one[0], one[1], one[3]) for one in many]


def _returned(func: Any, args: tuple[Any, ...]) -> Any:
    """The same by the kernel; ``NotImplemented`` where it refuses the call."""
    try:
        found = func(*args)
    except RuntimeError:
        return NotImplemented
    many = found if isinstance(found, tuple) else [found]
    return [None if one is None else (tuple(one.shape), one.stride(), one.dtype) for one in many]
