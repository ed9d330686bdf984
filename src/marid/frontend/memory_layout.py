"""How tensors lie in memory: sizes and strides, and what PyTorch makes of them without having the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Sizes = tuple[int, ...]

_PLAIN = torch.contiguous_format
_ONEDNN: Any = torch._C._ConvBackend.Mkldnn


class _Look(torch.Tensor):
    """What kernels are chosen by: a tensor of the CPU, but for the memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} is calculated to choose a kernel")


class MemoryLayout(NamedTuple):
    """Sizes and strides alone, of what may never exist: rules calculate with them, and have the dtype elsewhere."""

    shape: Sizes
    stride: Sizes

    def look(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the CPU without memory."""
        return torch.Tensor._make_wrapper_subclass(_Look, self.shape, self.stride, dtype=dtype, device="cpu")  # pyright: ignore

    def contiguous(self, memory_format: torch.memory_format) -> MemoryLayout:
        """As ``Tensor.contiguous`` leaves it: strides of what is contiguous already are kept."""
        step = 1
        for dim in _order(memory_format, len(self.shape)):
            if self.shape[dim] != 1:
                if self.stride[dim] != step:
                    return dense(self.shape, memory_format)
                step *= self.shape[dim]
        return self

    def suggested(self) -> torch.memory_format:
        """What ``Tensor.suggest_memory_format`` says."""
        if len(self.shape) not in (4, 5):
            return _PLAIN
        # A question that asks nothing else of tensors of this dtype.
        asked = self.look(torch.float32)
        return torch._C._conv_determine_backend_memory_format(asked, asked, _ONEDNN)


def _order(memory_format: torch.memory_format, rank: int) -> Sequence[int]:
    """Dimensions from the innermost one outwards."""
    inwards = range(rank - 1, -1, -1)
    return inwards if memory_format is _PLAIN else (1, *inwards[:-2], 0)


def dense(shape: Sizes, memory_format: torch.memory_format) -> MemoryLayout:
    """A new tensor in a memory format."""
    stride, step = [0] * len(shape), 1
    for dim in _order(memory_format, len(shape)):
        stride[dim] = step
        step *= max(shape[dim], 1) if memory_format is _PLAIN else shape[dim]
    return MemoryLayout(shape, tuple(stride))
