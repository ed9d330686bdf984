"""The values of a tensor as PyTorch prints them, of which no more is brought than what is shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import _tensor_str

from marid.frontend.materialize import download

__all__ = ["values_text"]


def values_text(tensor: Any) -> str:
    """What ``torch.Tensor.__repr__`` shows of the values, a summary where there are many."""
    options: Any = _tensor_str.PRINT_OPTS
    if tensor.numel() <= options.threshold:
        return _tensor_str._tensor_str(download(tensor, "print"), 0)
    # A summary shows the ends of each long dimension. With one element left in the middle it is a summary still.
    with torch.no_grad():
        shown = tensor.detach()
        for dim, size in enumerate(tensor.shape):
            if size > 2 * options.edgeitems + 1:
                first = shown.narrow(dim, 0, options.edgeitems + 1)
                shown = torch.cat([first, shown.narrow(dim, size - options.edgeitems, options.edgeitems)], dim)
    with _tensor_str.printoptions(threshold=0):
        return _tensor_str._tensor_str(download(shown, "print"), 0)
