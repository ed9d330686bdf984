"""Parameters and buffers without a shape yet (``torch.nn.LazyLinear`` and the like) on the device.

PyTorch makes an uninitialised parameter a subclass view of an empty tensor on its device, which a lazy tensor, being a
subclass itself, cannot be. Here it stays an empty CPU tensor that knows its device, and becomes a lazy tensor in place
when it is given a shape.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from marid.frontend import handles

_DEVICE = "_device"  # the attribute that holds the device, unless that is the tensor's own


def moved(tensor: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same uninitialised tensor, with the device and dtype that ``fn`` (of ``Module._apply``) gives to others."""
    with torch.no_grad():
        like = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.device))
        if like.device.type == handles.DEVICE_TYPE or tensor.device.type == handles.DEVICE_TYPE:
            tensor.data = tensor.data.to(like.dtype)
            return on_device(tensor, like.device)
        return fn(tensor)


def on_device(tensor: Any, device: torch.device) -> Any:
    """The uninitialised tensor, which is of the CPU, as one of this device."""
    setattr(tensor, _DEVICE, device)
    return tensor


_move: Any = torch.nn.Module._apply
_MOVE = inspect.unwrap(_move).__code__


def converted(value: torch.Tensor, kind: Any) -> torch.Tensor:
    """What ``to`` of an uninitialised tensor returns, of which ``value`` is what it moved to the device.

    In the move of a module that is the first use, PyTorch's own ``Module._apply`` is still running: it gets the tensor
    that it moves, which stays the same object.
    """
    moving = _frame_of({_MOVE})
    tensor: Any = None if moving is None else moving.f_locals.get("buf", moving.f_locals.get("param"))
    if not is_lazy(tensor):
        return kind(device=value.device, dtype=value.dtype)
    tensor.data = tensor.data.to(value.dtype)
    return on_device(tensor, value.device)


def _frame_of(codes: set[Any]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def device_of(tensor: Any) -> torch.device:
    """The device of an uninitialised tensor."""
    found = tensor.__dict__.get(_DEVICE)
    return torch._C._TensorBase.device.__get__(tensor) if found is None else found


def copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    """``__deepcopy__`` that keeps the device."""

    @functools.wraps(copy)
    def wrapper(self: Any, memo: dict[int, Any]) -> Any:
        made = copy(self, memo)
        return on_device(made, self.device) if _DEVICE in self.__dict__ else made

    return wrapper


def materializing(materialize: Callable[..., None]) -> Callable[..., None]:
    """``materialize`` for tensors of the device too."""

    @functools.wraps(materialize)
    def wrapper(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        wanted = self.device if device is None else torch.device(device)
        if wanted.type != handles.DEVICE_TYPE:
            materialize(self, shape, device=wanted, dtype=dtype)
            return
        made = torch.empty(shape, device=wanted, dtype=dtype or self.data.dtype)
        attributes = {name: value for name, value in self.__dict__.items() if name != _DEVICE}
        if issubclass(self.cls_to_become, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        made.__dict__.update(attributes)
        torch.utils.swap_tensors(self, made)

    return wrapper
