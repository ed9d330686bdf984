"""Parameters and buffers without a shape yet (``torch.nn.LazyLinear`` and the like) on the device.

PyTorch makes an uninitialised parameter a subclass view of an empty tensor on its device, which a lazy tensor, being a
subclass itself, cannot be. Here it stays an empty CPU tensor that knows its device, and becomes a lazy tensor in place
when it is given a shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, UninitializedTensorMixin

from marid.frontend import handles

__all__ = ["install", "moved"]

_DEVICE = "_device"  # the attribute that holds the device, unless that is the tensor's own


def install() -> None:
    """Teach PyTorch's uninitialised parameters and buffers the device."""
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = _making(kind.__new__)
        kind.__deepcopy__ = _copying(kind.__deepcopy__)
    UninitializedTensorMixin.device = property(_device_of)
    UninitializedTensorMixin.materialize = _materializing(UninitializedTensorMixin.materialize)


def moved(tensor: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same uninitialised tensor, with the device and dtype that ``fn`` (of ``Module._apply``) gives to others."""
    with torch.no_grad():
        like = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.device))
        if like.device.type == handles.DEVICE_TYPE or tensor.device.type == handles.DEVICE_TYPE:
            tensor.data = tensor.data.to(like.dtype)
            setattr(tensor, _DEVICE, like.device)
            return tensor
        return fn(tensor)


def _device_of(tensor: Any) -> torch.device:
    found = tensor.__dict__.get(_DEVICE)
    return torch._C._TensorBase.device.__get__(tensor) if found is None else found


def _making(make: Callable[..., Any]) -> Callable[..., Any]:
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


def _copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(copy)
    def wrapper(self: Any, memo: dict[int, Any]) -> Any:
        made = copy(self, memo)
        if _DEVICE in self.__dict__:
            setattr(made, _DEVICE, self.device)
        return made

    return wrapper


def _materializing(materialize: Callable[..., None]) -> Callable[..., None]:
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
