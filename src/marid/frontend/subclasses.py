"""Subclasses of ``torch.Tensor`` and ``torch.nn.Parameter`` that a user has, with values on the device.

A tensor has one Python object, which tensors of the device get when they are made: so it is that which changes its
class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import Parameter, UninitializedTensorMixin

from marid.frontend import uninitialized
from marid.native import module


def quicken_instance_checks() -> Callable[[], None]:
    """Answer ``isinstance(x, torch.Tensor)`` without a new bound method; returns what undoes it."""
    return module.leave_instance_checks if module.quicken_instance_checks() else lambda: None


class _KeepsItsClass:
    """What subclasses of ``torch.Tensor`` do to results of operations, unless they say otherwise."""

    __torch_function__ = vars(torch.Tensor)["__torch_function__"]


def as_class(tensor: torch.Tensor, cls: type[torch.Tensor], own: type[torch.Tensor]) -> Any:
    """The same value as a tensor of a class that is ``cls`` and ``own``, the class of the device's tensors; a view for
    autograd, as ``as_subclass`` is."""
    with torch._C.DisableTorchFunctionSubclass():  # else it has the tensor's own class
        made = torch.ops.aten.alias(tensor)
    return made if issubclass(own, cls) else _become(made, cls, own)


def _become(tensor: Any, cls: type[torch.Tensor], own: type[torch.Tensor]) -> Any:
    tensor.__class__ = class_on_device(cls, own)
    if cls is Parameter:  # which goes by this attribute too
        tensor._is_param = True
    return tensor


def class_on_device(cls: type[torch.Tensor], own: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class that a tensor of ``cls`` has on the device; ``own``, that of the device's tensors, if it is PyTorch's
    own, or has no shape yet."""
    if issubclass(own, cls) or cls is Parameter or issubclass(cls, UninitializedTensorMixin):
        return own
    return cls if issubclass(cls, own) else _both(cls, own)


@functools.cache
def _both(cls: type[torch.Tensor], own: type[torch.Tensor]) -> type[torch.Tensor]:
    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if issubclass(cls, Parameter):  # whose methods are for tensors of the CPU
        names |= {
            name: getattr(own, name)
            for name in ("__deepcopy__", "__reduce_ex__", "__repr__")
            if getattr(cls, name) is getattr(Parameter, name)
        }
    return type(cls)(cls.__name__, (cls, _KeepsItsClass, own), names)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor of the device is ``nn.Parameter``, or derived from that: not where ``nn.Parameter``
    was given a tensor of a class of the user's, which it marks, and which is copied and pickled like one."""
    return isinstance(tensor, Parameter) and (
        _user_class_of(type(tensor)) is None or issubclass(type(tensor), Parameter)
    )


def user_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class that a tensor of the device was given by ``class_on_device``, or ``torch.Tensor``."""
    return _user_class_of(type(tensor)) or torch.Tensor


def _user_class_of(cls: type[torch.Tensor]) -> type[torch.Tensor] | None:
    """The class that ``class_on_device`` has made another one of; None for classes that it has not made."""
    return cls.__bases__[0] if _KeepsItsClass in cls.__bases__ else None


def giving(own: Any) -> Callable[[Any], Any]:
    """``torch.Tensor.as_subclass``, where it is called by that name with a tensor of the device."""

    def replaced(convert: Callable[..., Any]) -> Any:
        @functools.wraps(convert)
        def as_subclass(self: torch.Tensor, cls: type) -> Any:
            if isinstance(self, own):
                return own.as_subclass(self, cls)
            return convert(self, _user_class_of(cls) or cls)  # what was moved to the CPU

        return as_subclass

    return replaced


def making(own: type[torch.Tensor]) -> Callable[[Any], Any]:
    """``torch.Tensor._make_subclass``, by which classes make themselves of the data of another tensor, for data that is
    on the device too."""

    def replaced(make: Callable[..., Any]) -> Any:
        @functools.wraps(make)
        def make_subclass(cls: type, data: torch.Tensor, require_grad: bool = False, **kwargs: Any) -> Any:
            if not isinstance(data, own):
                return make(cls, data, require_grad, **kwargs)
            if issubclass(cls, UninitializedTensorMixin):
                return uninitialized.on_device(make(cls, data.new_empty(0, device="cpu"), require_grad), data.device)
            with torch._C.DisableTorchFunctionSubclass():
                made = data.detach().requires_grad_(require_grad)
            return _become(made, cls, own)

        return staticmethod(make_subclass)

    return replaced


def making_parameters(own: type[torch.Tensor]) -> Callable[[Any], Any]:
    """``torch.nn.Parameter.__new__``, for which a subclass keeps its class on the device too."""

    def replaced(make: Callable[..., Any]) -> Any:
        of_the_cpu: Any = torch._C.TensorBase._make_subclass  # pyright: ignore[reportAttributeAccessIssue]

        @functools.wraps(make)
        def make_parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
            if type(data) is torch.Tensor:  # as in PyTorch's, and so no slower
                return of_the_cpu(cls, data, requires_grad)
            if cls is Parameter or not isinstance(data, own):
                return make(cls, data, requires_grad)
            return torch.Tensor._make_subclass(cls, data, requires_grad)  # pyright: ignore[reportAttributeAccessIssue]

        return staticmethod(make_parameter)

    return replaced
