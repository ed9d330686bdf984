"""PyTorch's functions, given and giving devices that are called ``"cuda"``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


def _is_cuda(_func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    return handles.is_lazy(tensor)


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
    torch.device: lambda func, *args, **kwargs: func(*args, **kwargs),  # a script's device object keeps saying "cuda"
    torch.Tensor.device.__get__: _device_of,
    torch.Tensor.is_cuda.__get__: _is_cuda,
    torch.Tensor.cuda: _tensor_cuda,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.type: _type,
    torch.Tensor.record_stream: lambda *_: None,
}


def enter_in_every_thread() -> None:
    """Function modes are per thread: enter one here, and in every thread that is started from now on."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_translating(self: threading.Thread) -> None:
        run = self.run

        def run_translating() -> None:
            with _Cuda():
                run()

        self.run = run_translating
        start(self)

    threading.Thread.start = start_translating
    _Cuda().__enter__()
