"""``nn.TransformerEncoder`` with padding, whose fast path PyTorch runs on nested tensors, a layout the device lacks.

The encoder is told that the padding does not suit nested tensors, so it runs on dense ones with a mask. What the nested
path leaves at padded positions, zeros (or the final norm of zeros), is put there afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from marid.frontend import handles
from marid.frontend.record import special


@special(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def _left_aligned(*_: Any) -> bool:
    return False


def padding(forward: FunctionType) -> Callable[..., torch.Tensor]:
    """The encoder's ``forward``, for tensors of the device too."""

    def wrapper(
        self: nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        output = forward(self, src, mask, src_key_padding_mask, is_causal)
        if src_key_padding_mask is None or not handles.is_lazy(src) or mask is not None or not _nests(self, src):
            return output
        mask = F._canonical_mask(src_key_padding_mask, "src_key_padding_mask", None, "mask", src.dtype)
        assert mask is not None
        kept = mask.logical_not()
        aligned = (kept[:, 1:] <= kept[:, :-1]).all()
        blank = torch.zeros_like(output)
        if self.norm is not None:
            blank = self.norm(blank)
        return torch.where((aligned & ~kept).unsqueeze(-1), blank, output)

    # torch.jit.script compiles the source of what is wrapped, and looks names up where the wrapper's are.
    names = {**forward.__globals__, **wrapper.__globals__}
    seen = FunctionType(wrapper.__code__, names, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__)
    return functools.update_wrapper(seen, forward)


def _nests(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    first: Any = encoder.layers[0]
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and getattr(encoder, "mask_check", True)
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())))
    )
