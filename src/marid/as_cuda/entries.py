"""What function modes do not see: autocast, generators, default devices, files, fake tensors, ``torch.accelerator``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.amp import autocast_mode
from torch.utils import _device

from marid import registration
from marid.as_cuda.devices import COUNT, CUDA, OURS, from_cuda, index_of, to_cuda
from marid.as_cuda.functions import legacy_type
from marid.frontend import autocast, serialize


def _translate_first(
    function: Callable[..., Any], default: str | None = None, translate: Callable[[Any], Any] = from_cuda
) -> Callable[..., Any]:
    """``function`` with its first argument, a device or its type, translated; ``default`` stands for none given."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (translate(args[0]), *args[1:])
        elif default is not None and not kwargs:
            args = (default,)
        return function(*args, **{name: translate(arg) for name, arg in kwargs.items()})

    return translated


def _replace_autocast() -> None:
    autocast.use_cuda_lists()
    initialise = autocast_mode.autocast.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, from_cuda(device_type), *args, **kwargs)

    autocast_mode.autocast.__init__ = __init__
    for name in ("get_autocast_dtype", "set_autocast_dtype"):
        setattr(torch, name, _translate_first(getattr(torch, name)))
    # Without a device these two mean "cuda".
    torch.is_autocast_enabled = _translate_first(torch.is_autocast_enabled, OURS)
    set_enabled = _translate_first(torch.set_autocast_enabled)
    torch.set_autocast_enabled = lambda *args: set_enabled(*(args if len(args) > 1 else (OURS, *args)))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype(OURS)
    torch.set_autocast_gpu_dtype = lambda dtype: torch.set_autocast_dtype(OURS, dtype)


def _replace_generator() -> None:
    class Kind(type(torch._C.Generator)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch._C.Generator)

    class Generator(torch._C.Generator, metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            make: Any = super().__new__
            return make(cls, device=from_cuda(device))

        def __init__(self, device: Any = "cpu") -> None:
            pass  # what is there already

        @property
        def device(self) -> torch.device:
            return to_cuda(super().device)

    torch.Generator = Generator


def _replace_device_contexts() -> None:
    """``with torch.device("cuda"):`` and ``torch.set_default_device("cuda")``."""
    initialise = _device.DeviceContext.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, device: Any) -> None:
        initialise(self, from_cuda(torch.device(device)))

    _device.DeviceContext.__init__ = __init__
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        legacy = legacy_type(kind)
        if legacy is None:
            set_type(kind)
        else:
            torch.set_default_dtype(legacy.dtype)
            torch.set_default_device(CUDA)

    torch.set_default_tensor_type = set_default_tensor_type
    default = torch.get_default_device
    torch.get_default_device = functools.wraps(default)(lambda: to_cuda(default()))


def _replace_loading() -> None:
    """Files whose tensors were on a GPU, and ``torch.load(map_location="cuda")``. What is saved is for GPUs too."""

    def location(storage: Any) -> str | None:
        device = registration.location_of(storage)
        return None if device is None else device.replace(OURS, CUDA)

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith(CUDA):
            return None
        index = torch.device(location).index or 0
        if index >= COUNT:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is {COUNT}. "
                "Please use torch.load with map_location to map your storages to an existing device."
            )
        return serialize.restore(storage, f"{OURS}:{index}")

    def cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:  # noqa: ARG001
        return serialize.restore(self, f"{OURS}:{index_of(device)}")

    torch.serialization.register_package(4, location, restore)  # before the one of PyTorch's CUDA, at 20
    torch.UntypedStorage.cuda = cuda
    device = torch.UntypedStorage.device.__get__
    torch.UntypedStorage.device = property(lambda self: to_cuda(device(self)))


def _replace_factories() -> None:
    """Functions that make tensors and that modes do not see."""
    torch.range = _translate_first(torch.range)
    torch.nested.nested_tensor = _translate_first(torch.nested.nested_tensor)
    torch.nested.as_nested_tensor = _translate_first(torch.nested.as_nested_tensor)


_OF_ACCELERATORS = (
    *("set_device_index", "set_device_idx", "current_stream", "synchronize", "get_memory_info", "memory_allocated"),
    *("memory_reserved", "memory_stats", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"),
    "reset_accumulated_memory_stats",
)


def _replace_accelerator() -> None:
    """``torch.accelerator``, whose accelerator is CUDA, with one device."""
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device(CUDA)  # noqa: ARG005
    setattr(torch._C, "_get_accelerator", lambda check=None: torch.device(CUDA))  # noqa: ARG005, B010
    torch.accelerator.device_count = lambda: COUNT
    for name in _OF_ACCELERATORS:
        if hasattr(torch.accelerator, name):  # the versions of PyTorch have not all of them
            function = getattr(torch.accelerator, name)
            setattr(torch.accelerator, name, _translate_first(function, translate=index_of))


def _replace_fake_tensors() -> None:
    """A fake tensor is made for the device that a tensor says it is on; autograd would ask PyTorch's CUDA for it, and
    end the process."""
    make = fake_tensor.FakeTensor.__new__

    @functools.wraps(make)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: from_cuda(arg) for name, arg in kwargs.items()}
        return make(cls, *[from_cuda(arg) for arg in args], **named)

    fake_tensor.FakeTensor.__new__ = staticmethod(__new__)


def _replace_cudnn() -> None:
    """Builds of PyTorch for CUDA would call cuDNN for recurrent layers, which is not there."""
    cudnn: Any = torch.backends.cudnn
    cudnn.is_acceptable = lambda tensor: False  # noqa: ARG005


def replace_entries() -> None:
    """Let all of these translate devices, for good."""
    _replace_autocast()
    _replace_generator()
    _replace_device_contexts()
    _replace_loading()
    _replace_factories()
    _replace_fake_tensors()
    _replace_accelerator()
    _replace_cudnn()
