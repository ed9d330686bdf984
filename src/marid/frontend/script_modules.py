"""Modules of TorchScript: how they move to the device and from it, and how they are saved and loaded.

PyTorch's C++ writes and reads the memory of their tensors itself, and tensors of the device have none in this process.
So a module is saved as its copy on the CPU, and a file is loaded onto the CPU before its module moves.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from marid.frontend import handles


def moving_parameters(module: torch.jit.ScriptModule, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``fn`` of ``Module._apply``, which makes new parameters where they cross devices, of ``nn.Parameter`` only. Those
    of a module that was loaded or copied are plain tensors to Python: they are called parameters then."""
    plain = [one for one in module._parameters.values() if one is not None and not isinstance(one, torch.nn.Parameter)]

    def convert(tensor: Any) -> Any:
        applied = fn(tensor)
        if handles.is_lazy(applied) != handles.is_lazy(tensor) and any(tensor is one for one in plain):
            tensor._is_param = True
        return applied

    return convert


def saving_from_the_cpu(save: Callable[..., Any]) -> Callable[..., Any]:
    """``save`` and ``save_to_buffer`` of a ``ScriptModule``."""

    @functools.wraps(save)
    def wrapper(self: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        there = any(map(handles.is_lazy, itertools.chain(self.parameters(), self.buffers())))
        return save(_copied_to_the_cpu(self) if there else self, *args, **kwargs)

    return wrapper


def _copied_to_the_cpu(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    with torch.no_grad():  # else parameters are computed from those of the module
        copied = copy.deepcopy(module).to("cpu")
    for one, of in zip(copied.parameters(), module.parameters(), strict=True):
        one.requires_grad_(of.requires_grad)
    return copied


def loading_through_the_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.jit.load``."""

    @functools.wraps(load)
    def wrapper(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == handles.DEVICE_TYPE:
            return load(f, "cpu", *args, **kwargs).to(map_location)
        return load(f, map_location, *args, **kwargs)

    return wrapper
