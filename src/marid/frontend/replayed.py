"""Views that autograd could not find the history of after a write, where it replays views: without the C++ half.

A view that was made to require gradients is a leaf, and its base requires none. Autograd looks for the history of a
view of that leaf again when their memory has been written, by making the view anew from the base; what it gets has no
history then, and an assertion inside of PyTorch fails at the next use. So the write is refused, at its line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from marid.errors import LazyTensorError
from marid.frontend import handles
from marid.frontend.handles import storage_of
from marid.graph.node import Storage

__all__ = ["note_views", "refuse_write"]

# By identity: tensors are compared element by element.
_views: WeakKeyDictionary[Storage, WeakValueDictionary[int, Any]] = WeakKeyDictionary()


def note_views(of: Any, made: Any) -> None:
    """Views ``made`` of a tensor, one or several, are about to be returned."""
    if not of.requires_grad or not of._is_view() or of._base.requires_grad:
        return
    for view in made if isinstance(made, (list, tuple)) else (made,):
        _views.setdefault(storage_of(view), WeakValueDictionary())[id(view)] = view


def refuse_write(tensors: list[Any], writes: Iterable[int]) -> None:
    """Raise ``LazyTensorError`` where a call would leave a view without its history. With a gradient of its own, which
    the base has from then on, it does not."""
    if not _views or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return
    if any(_views.get(storage_of(tensors[index])) for index in writes):
        raise LazyTensorError(
            "this would write to the memory of a view that was made to require gradients, while there are views of "
            f"that view: without its C++ half, {handles.DEVICE_TYPE} could not take gradients through those any more. "
            "Write first, or make that view with detach() or clone(), or install a C++ compiler"
        )
