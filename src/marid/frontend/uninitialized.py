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
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from marid.frontend import handles

_DEVICE = "_device"  # the attribute that holds the device, unless that is the tensor's own


def moved(tensor: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same uninitialised tensor, with the device and dtype that ``fn`` (of ``Module._apply``) gives to others."""
    with torch.no_grad():
        like = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.device))
        if like.device.type == handles.DEVICE_TYPE or tensor.device.type == handles.DEVICE_TYPE:
            tensor.data = tensor.data.to(like.dtype)
            setattr(tensor, _DEVICE, like.device)
            return tensor
        return fn(tensor)


def made_during(make: Callable[[], None]) -> None:
    """Call ``make``, which changes the constructors of these tensors. Where one of those is running, as it is when such
    a tensor is the first of a process, it finishes as a changed one would."""
    constructors = {UninitializedParameter.__new__.__code__, UninitializedBuffer.__new__.__code__}
    running = _frame_of(constructors)
    make()
    if running is None:
        return

    def make_subclass(cls: type, data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
        del tensor_type._make_subclass
        if not handles.is_lazy(data):
            return tensor_type._make_subclass(cls, data, requires_grad)
        made = tensor_type._make_subclass(cls, torch.empty(0, dtype=data.dtype, device="cpu"), requires_grad)
        setattr(made, _DEVICE, data.device)
        return made

    tensor_type: Any = torch.Tensor
    tensor_type._make_subclass = staticmethod(make_subclass)


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
    setattr(tensor, _DEVICE, value.device)
    return tensor


def _frame_of(codes: set[Any]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def device_of(tensor: Any) -> torch.device:
    """The device of an uninitialised tensor."""
    found = tensor.__dict__.get(_DEVICE)
    return torch._C._TensorBase.device.__get__(tensor) if found is None else found


def making(make: Callable[..., Any]) -> Callable[..., Any]:
    """``__new__`` for tensors of the device too."""

    @functools.wraps(make)
    def wrapper(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if len(args) > 1:  # requires_grad, device, dtype
            args, device, kwargs = (
                args[:1],
                args[1],
                {**dict(zip(("dtype", "persistent"), args[2:], strict=False)), **kwargs},
            )
        wanted = torch.get_default_device() if device is None else torch.device(device)
        if wanted.type != handles.DEVICE_TYPE:
            return make(cls, *args, device=device, **kwargs)
        made = make(cls, *args, device="cpu", **kwargs)
        setattr(made, _DEVICE, torch.empty(0, device=wanted).device)  # with its index
        return made

    return wrapper


def copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    """``__deepcopy__`` that keeps the device."""

    @functools.wraps(copy)
    def wrapper(self: Any, memo: dict[int, Any]) -> Any:
        made = copy(self, memo)
        if _DEVICE in self.__dict__:
            setattr(made, _DEVICE, self.device)
        return made

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
