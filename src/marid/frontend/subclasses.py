"""Subclasses of ``torch.Tensor`` that a user has, with values on the device."""

from __future__ import annotations

import functools
from typing import Any

import torch


class _KeepsItsClass:
    """What subclasses of ``torch.Tensor`` do to results of operations, unless they say otherwise."""

    __torch_function__ = vars(torch.Tensor)["__torch_function__"]


def as_class(tensor: torch.Tensor, cls: type[torch.Tensor], own: type[torch.Tensor]) -> Any:
    """The same value as a tensor of a class that is ``cls`` and ``own``, the class of the device's tensors; a view for
    autograd, as ``as_subclass`` is.

    A tensor has one Python object, which tensors of the device get when they are made: so it is that which changes its
    class.
    """
    made = torch.ops.aten.alias(tensor)
    if not issubclass(own, cls):
        made.__class__ = cls if issubclass(cls, own) else _both(cls, own)
    return made


@functools.cache
def _both(cls: type[torch.Tensor], own: type[torch.Tensor]) -> type[torch.Tensor]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls, _KeepsItsClass, own), names)


def user_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class that a tensor of the device was given by ``as_class``, or ``torch.Tensor``."""
    bases = type(tensor).__bases__
    return bases[0] if _KeepsItsClass in bases else torch.Tensor
