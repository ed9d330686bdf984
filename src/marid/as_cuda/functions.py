"""PyTorch's functions, given and giving devices that are called ``"cuda"``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from marid.as_cuda.devices import CUDA, OURS, from_cuda, index_of, to_cuda
from marid.frontend import handles
from marid.semantics.tracebacks import fold


class _Cuda(TorchFunctionMode):
    """Translates devices in the arguments of PyTorch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            replaced = _REPLACED.get(func)
            if replaced is not None:
                return replaced(func, *args, **(kwargs or {}))
            if args:
                args = [from_cuda(arg) if type(arg) in _DEVICE_LIKE else arg for arg in args]
            if kwargs:
                kwargs = {name: from_cuda(arg) for name, arg in kwargs.items()}
                return func(*args, **kwargs)
            return func(*args)
        except BaseException as error:
            fold(error)
            raise


_DEVICE_LIKE = (str, torch.device)


def _device_of(func: Any, tensor: torch.Tensor, *_: Any) -> torch.device:
    return to_cuda(func(tensor))


def _shown_device(device: torch.device, first: Any = None, *_: Any) -> torch.device:
    """A script's device object keeps saying "cuda", and one of a number is PyTorch's accelerator."""
    return to_cuda(device) if isinstance(first, int) else device


def _is_cuda(_func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    return tensor.device.type == OURS  # also where it is a tensor of such tensors: nested, distributed


def _tensor_cuda(
    _func: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    if device is not None and not isinstance(device, int) and torch.device(device).type != CUDA:
        raise RuntimeError("Invalid device, must be cuda device")
    return tensor.to(torch.device(OURS, index_of(device)), non_blocking=non_blocking, **kwargs)


def _pin_memory(_func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    if handles.is_lazy(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor  # the engine reads ordinary memory


class _LegacyType(type):
    """``torch.cuda.FloatTensor`` and its kin: a constructor, and what ``isinstance`` and ``Tensor.type`` take."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        return getattr(torch, cls.__name__)(*args).to(torch.device(OURS, handles.current_device()))

    def __instancecheck__(cls, instance: object) -> bool:
        return handles.is_lazy(instance) and instance.dtype is cls.dtype


def legacy_types() -> dict[str, _LegacyType]:
    names = [f"{kind}Tensor" for kind in "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()]
    return {name: _LegacyType(name, (), {"dtype": getattr(torch, name).dtype}) for name in names}


def legacy_type(given: Any) -> _LegacyType | None:
    if isinstance(given, str) and given.startswith("torch.cuda."):
        given = getattr(torch.cuda, given.removeprefix("torch.cuda."), None)
    return given if isinstance(given, _LegacyType) else None


def _type(func: Any, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        return func(tensor).replace(OURS, CUDA)
    legacy = legacy_type(dtype)
    if legacy is not None:
        return tensor.to(torch.device(OURS, handles.current_device()), legacy.dtype, non_blocking=non_blocking)
    return func(tensor, dtype, non_blocking, **kwargs)


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.device: lambda func, *args, **kwargs: _shown_device(func(*args, **kwargs), *args),
    torch.Tensor.device.__get__: _device_of,
    torch.Tensor.is_cuda.__get__: _is_cuda,
    torch.Tensor.cuda: _tensor_cuda,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.type: _type,
    torch.Tensor.record_stream: lambda *_: None,
}


def _translating(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run in the mode."""

    @functools.wraps(function)
    def translating(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, _Cuda) for mode in _get_current_function_mode_stack()):
            return function(*args, **kwargs)
        with _Cuda():
            return function(*args, **kwargs)

    return translating


def enter_everywhere() -> None:
    """Function modes are per thread: enter one here, and in every thread that is started from now on. PyTorch leaves
    the mode for the function that it handles, so enter it again where that one calls a script's functions: hooks, and
    the backward of autograd functions."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_translating(self: threading.Thread) -> None:
        self.run = _translating(self.run)
        start(self)

    threading.Thread.start = start_translating

    graph: Any = torch.autograd.graph
    run_backward = _translating(graph._engine_run_backward)
    graph._engine_run_backward = run_backward
    setattr(torch.autograd, "_engine_run_backward", run_backward)  # noqa: B010

    initialise = graph.saved_tensors_hooks.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
        initialise(self, _translating(pack_hook), _translating(unpack_hook))

    graph.saved_tensors_hooks.__init__ = __init__
    _Cuda().__enter__()
