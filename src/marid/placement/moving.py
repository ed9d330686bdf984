"""Running a module whose layers lie on several devices: operands of one operation are brought together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from marid.frontend import handles
from marid.placement.forward import tensors_in

_LEFT_ALONE = {torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.type_as}
"""They take tensors of several devices."""


def writes(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_IN_PLACE = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}


class Together(TorchFunctionMode):
    """While a module runs: an operation whose operands lie on several devices happens on one of them.

    That is the device of what it writes to; else that of the parameter among its operands, or of a view of one; else
    the one that comes last in ``devices``. The other operands are copied there, each once for a call of the module;
    autograd copies their gradients back.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__()
        self._order = {index: place for place, index in enumerate(devices)}
        self._own = threading.local()
        self._hooks: list[RemovableHandle] = []

    def hook(self, model: nn.Module) -> None:
        """Be in force whenever ``model`` runs, or a module of it that lies on several devices.

        Modules that lie on one get their arguments there: what they do has its operands together then where they run
        outside of the model, too, as in a backward that computes activations again.
        """
        on = {one.device for one in (*model.parameters(), *model.buffers())}
        if len(on) == 1:
            (target,) = on
            self._hooks.append(
                model.register_forward_pre_hook(
                    lambda _, args, kwargs: self._arguments(args, kwargs, target), with_kwargs=True
                )
            )
        elif on:
            self._hooks.append(model.register_forward_pre_hook(self._begin, prepend=True))
            self._hooks.append(model.register_forward_hook(self._end, always_call=True))
            for child in model.children():
                self.hook(child)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with tensors, and tuples of them, at ``target``. What the module may write to, such as a list that
        is a cache, stays what it is."""
        if not hasattr(self._own, "copies"):
            return args, kwargs  # not within the model, whose copies these would be
        given, bring = (args, tuple(kwargs.items())), lambda one: self._brought(one, target)
        args, pairs = _pytree.tree_map_only(Tensor, bring, given, is_leaf=lambda one: type(one) is not tuple)
        return args, dict(pairs)

    def unhook(self) -> None:
        """Not be in force any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, *_: Any) -> None:
        depth = getattr(self._own, "depth", 0)
        self._own.depth = depth + 1
        if depth == 0:
            self._own.copies = {}
            self.__enter__()

    def _end(self, *_: Any) -> None:
        self._own.depth -= 1
        if self._own.depth == 0:
            del self._own.copies
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = tensors_in((args, kwargs))
        on = {one.device.index for one in operands if one.device.type == handles.DEVICE_TYPE}
        if len(on) < 2 or func in _LEFT_ALONE:
            return func(*args, **kwargs)
        target = self._target(getattr(func, "__name__", ""), operands, kwargs)
        args, kwargs = _pytree.tree_map_only(Tensor, lambda one: self._brought(one, target), (args, kwargs))
        return func(*args, **kwargs)

    def _target(self, name: str, operands: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
        operands = [one for one in operands if one.device.type == handles.DEVICE_TYPE]
        if writes(name):
            return operands[0].device
        if kwargs.get("out") is not None:
            return tensors_in(kwargs["out"])[0].device
        for one in operands:
            if isinstance(one, nn.Parameter) or isinstance(one._base, nn.Parameter):
                return one.device
        return max((one.device for one in operands), key=lambda device: self._order.get(device.index or 0, -1))

    def _brought(self, tensor: Tensor, target: torch.device) -> Tensor:
        if tensor.device.type != handles.DEVICE_TYPE or tensor.device == target:
            return tensor
        key = id(tensor), tensor._version, target.index, torch.is_grad_enabled()
        found = self._own.copies.get(key)
        if found is None:
            found = self._own.copies[key] = tensor, tensor.to(target)  # the tensor too: its identity is not given again
        return found[1]
