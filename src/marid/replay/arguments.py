"""Reading the arguments of a compiled function: their tensors, and a key of everything else that its Python can see.

Two calls with one key differ only in the values of tensors. Arguments that are neither tensors, plain values nor
containers (modules, say) count by identity; what they hold is part of the state (``reachable.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._device import DeviceContext

from marid.frontend import handles
from marid.frontend.tensor import LazyTensor
from marid.graph.node import Spec
from marid.native import module
from marid.replay.dynamic import dynamic_dims_of
from marid.replay.reachable import is_plain

HOOKS = 2
"""What ``module.tensor_flags`` says of a tensor with hooks."""


class Unreadable(Exception):
    """A call that is not one to replay: inside of a transform, say, or with tensors that have hooks."""


class Call:
    """The arguments of one call: ``lazy`` and ``host`` are its tensors, ``others`` what is known by identity,
    ``containers`` the identities of its lists and dicts."""

    __slots__ = ("_parts", "containers", "host", "key", "lazy", "others")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.lazy: list[Any] = []
        self.host: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.containers: set[int] = set()
        self._parts: list[Any] = [surroundings(), tuple(kwargs)]
        try:
            for arg in (*args, *kwargs.values()):
                self._read(arg)
        except RecursionError:  # one leads to itself
            raise Unreadable from None
        self.key = tuple(self._parts)

    def is_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are others than they were when they were read, but for values of tensors."""
        try:
            now = Call(args, kwargs)
        except Unreadable:
            return True
        tensors = zip((*now.lazy, *now.host), (*self.lazy, *self.host), strict=False)
        return now.key != self.key or any(one is not other for one, other in tensors)

    def family(self) -> tuple[Any, ...]:
        """The key without the sizes of dimensions that are marked as dynamic."""
        sizes = []
        for tensor in (*self.lazy, *self.host):
            dims = dynamic_dims_of(tensor)
            shape = [None if dim in dims else size for dim, size in enumerate(tensor.shape)]
            sizes.append(
                (
                    *shape,
                    *(() if dims else tensor.stride()),
                    tensor.storage_offset(),
                    tensor.dtype,
                    tensor.requires_grad,
                )
            )
        rest = [part for part in self._parts if type(part) is not Spec and not _is_geometry(part)]
        return (*rest, *sizes)

    def _read(self, arg: Any) -> None:
        put = self._parts.append
        kind = type(arg)
        if handles.is_lazy(arg):
            put(arg._value.spec)
            put(_first(self.lazy, arg))
            put((kind, arg.requires_grad, arg.grad_fn is None, arg.is_inference()))
            if kind is not LazyTensor:
                self.others.append(kind)
            if module.tensor_flags([arg])[0] & HOOKS:
                raise Unreadable
            self.lazy.append(arg)
            self._read_attributes(arg, self.lazy)
        elif isinstance(arg, torch.Tensor):
            if kind not in (torch.Tensor, torch.nn.Parameter) or arg.layout is not torch.strided:
                raise Unreadable
            put((kind, arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.device, arg.requires_grad))
            put(_first(self.host, arg))
            self.host.append(arg)
            self._read_attributes(arg, self.host)
        elif kind is tuple or kind is list:
            put((kind, len(arg)))
            self.containers.add(id(arg))
            for item in arg:
                self._read(item)
        elif kind is dict:
            self.containers.add(id(arg))
            put((dict, tuple(arg), tuple(map(type, arg))))
            for item in arg.values():
                self._read(item)
        elif kind is float or kind is complex or isinstance(arg, np.generic):
            put((kind, repr(arg)))  # 0.0 is not -0.0, and NaN is itself
        elif kind is range:
            put((kind, arg.start, arg.stop, arg.step))  # empty ones are equal
        elif is_plain(arg):
            put((kind, arg) if kind.__hash__ is not None else (kind, repr(arg)))
        elif _pytree.is_namedtuple_class(kind):
            put((kind, len(arg)))
            self.others.append(kind)
            for item in arg:
                self._read(item)
        elif kind in _pytree.SUPPORTED_NODES:
            children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(arg)
            put((kind, len(children), repr(context)))
            self.containers.add(id(arg))
            self.others.append(kind)
            for item in children:
                self._read(item)
        else:
            put((kind, id(arg)))
            self.others.append(arg)

    def _read_attributes(self, tensor: Any, found: list[Any]) -> None:
        own = module.attributes_of(tensor)
        if own is not None and _first(found, tensor) == len(found) - 1:  # they may lead to it again
            self._read(own)


def _is_geometry(part: Any) -> bool:
    return type(part) is tuple and len(part) == 7 and part[0] in (torch.Tensor, torch.nn.Parameter)


def _first(found: list[Any], arg: Any) -> int:
    """Where ``arg`` occurred first, or its own place."""
    for index, one in enumerate(found):
        if one is arg:
            return index
    return len(found)


def same_as_state(lazy: list[Any], places: dict[int, int]) -> tuple[int, ...]:
    """For each tensor of a call, which one of the state it is (``places_of``); -1 for another one."""
    return tuple([places.get(id(arg), -1) for arg in lazy])


def places_of(state: list[Any]) -> dict[int, int]:
    """Where each tensor of the state is in it, by identity."""
    return {id(one): index for index, one in enumerate(state)}


def surroundings() -> Any:
    """What decides, beside arguments and state, what PyTorch does: modes and defaults of this thread.

    Raises ``Unreadable`` inside of transforms, forward derivatives, dispatch modes and hooks on saved tensors.
    """
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch.is_anomaly_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or forward_ad._current_level >= 0
    ):
        raise Unreadable
    modes: Any = None
    if torch._C._len_torch_function_stack():
        modes = tuple([_mode(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack())])
    autocast: Any = None
    if torch.is_autocast_enabled(handles.DEVICE_TYPE) or torch.is_autocast_enabled("cpu"):
        autocast = tuple(
            [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in (handles.DEVICE_TYPE, "cpu")]
        )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        handles.current_device(),
        torch.are_deterministic_algorithms_enabled(),
        autocast,
        modes,
    )


def _mode(mode: Any) -> Any:
    if type(mode) is DeviceContext:
        return mode.device
    if type(mode).__module__.startswith("marid."):
        return type(mode)
    raise Unreadable
