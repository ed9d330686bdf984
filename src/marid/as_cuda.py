"""``marid run --as-cuda``: a process in which ``"cuda"`` means ``remote_accelerator``.

A script written for GPUs sees the world of a machine with one GPU: the default device is the CPU, ``torch.cuda`` says
that a device is there, ``.cuda()``, ``"cuda"`` and ``torch.device("cuda:0")`` lead to it, and tensors on it say that
they are on ``cuda:0``. A ``TorchFunctionMode`` translates what passes through PyTorch's functions, in every thread; the
few entry points that function modes do not see are replaced.

Not covered, because they need CUDA itself: CUDA graphs, custom kernels, NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.amp import autocast_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from marid.frontend import autocast, handles
from marid.semantics.tracebacks import fold

__all__ = ["install"]

_CUDA, _OURS = "cuda", handles.DEVICE_TYPE
_CAPABILITY = (8, 0)
"""Of the oldest GPUs on which everything that the device can do (bfloat16, above all) works."""

# --- the two translations ------------------------------------------------------------------------------------------


def _from_cuda(thing: Any) -> Any:
    """``"cuda"``, ``"cuda:1"`` or such a ``torch.device`` as our device; anything else as it is."""
    if isinstance(thing, str):
        if thing == _CUDA or thing.startswith("cuda:"):
            return _OURS + thing.removeprefix(_CUDA)
    elif isinstance(thing, torch.device) and thing.type == _CUDA:
        return torch.device(_OURS) if thing.index is None else torch.device(_OURS, thing.index)
    return thing


def _to_cuda(device: torch.device) -> torch.device:
    """What a script is shown instead of our device."""
    if device.type != _OURS:
        return device
    return torch.device(_CUDA) if device.index is None else torch.device(_CUDA, device.index)


class _Cuda(TorchFunctionMode):
    """Translates devices in the arguments of PyTorch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            replaced = _REPLACED.get(func)
            if replaced is not None:
                return replaced(func, *args, **(kwargs or {}))
            if args:
                args = [_from_cuda(arg) if type(arg) in _DEVICE_LIKE else arg for arg in args]
            if kwargs:
                kwargs = {name: _from_cuda(arg) for name, arg in kwargs.items()}
                return func(*args, **kwargs)
            return func(*args)
        except BaseException as error:
            fold(error)
            raise


_DEVICE_LIKE = (str, torch.device)


def _device_of(func: Any, tensor: torch.Tensor, *_: Any) -> torch.device:
    return _to_cuda(func(tensor))


def _is_cuda(_func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    return handles.is_lazy(tensor)


def _tensor_cuda(
    _func: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    target = torch.device(_OURS, handles.current_device()) if device is None else _from_cuda(device)
    if isinstance(target, int):
        target = torch.device(_OURS, target)
    return tensor.to(target, non_blocking=non_blocking, **kwargs)


def _pin_memory(_func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    if handles.is_lazy(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor  # the engine reads ordinary memory


class _LegacyType(type):
    """``torch.cuda.FloatTensor`` and its kin: a constructor, and what ``isinstance`` and ``Tensor.type`` take."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        return getattr(torch, cls.__name__)(*args).to(torch.device(_OURS, handles.current_device()))

    def __instancecheck__(cls, instance: object) -> bool:
        return handles.is_lazy(instance) and instance.dtype is cls.dtype


def _legacy_types() -> dict[str, _LegacyType]:
    names = [f"{kind}Tensor" for kind in "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()]
    return {name: _LegacyType(name, (), {"dtype": getattr(torch, name).dtype}) for name in names}


def _legacy_type(given: Any) -> _LegacyType | None:
    if isinstance(given, str) and given.startswith("torch.cuda."):
        given = getattr(torch.cuda, given.removeprefix("torch.cuda."), None)
    return given if isinstance(given, _LegacyType) else None


def _type(func: Any, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        return func(tensor).replace(_OURS, _CUDA)
    legacy = _legacy_type(dtype)
    if legacy is not None:
        return tensor.to(torch.device(_OURS, handles.current_device()), legacy.dtype, non_blocking=non_blocking)
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

# --- torch.cuda ----------------------------------------------------------------------------------------------------


class _Stream(torch.Stream):
    """A stream of the device, which runs everything in program order."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return super().__new__(cls, torch.device(_OURS, _index(device)), priority=priority)

    def synchronize(self) -> None:
        """Run what is recorded on the device."""
        _ours().synchronize(self.device_index)

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: program order holds already."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: program order holds already."""

    def record_event(self, event: _Event | None = None) -> _Event:
        event = _Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """A moment in the device's work. One that takes the time runs what was recorded before it, so that it can."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed = enable_timing
        self._device: int | None = None
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._device = handles.current_device() if stream is None else stream.device_index
        if self._timed:
            _ours().synchronize(self._device)
            self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for: program order holds already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._device is not None:
            _ours().synchronize(self._device)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to ``end``."""
        if not (self._timed and end._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._device is None or end._device is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._seconds - self._seconds) * 1000


def _ours() -> Any:
    return getattr(torch, _OURS)


def _index(device: Any) -> int:
    if device is None:
        return handles.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return handles.current_device() if index is None else index


def _memory() -> tuple[int, int]:
    """Free and total bytes of the machine that runs the programs."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such figures on this system
        return 0, 0


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=_ours().get_device_name(_index(device)),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


@contextlib.contextmanager
def _device_of_tensor(tensor: Any) -> Iterator[None]:
    with _ours().device(tensor.get_device()) if handles.is_lazy(tensor) else contextlib.nullcontext():
        yield


def _torch_cuda() -> dict[str, Any]:
    ours = _ours()
    same = """
        is_available is_initialized init current_device set_device device synchronize manual_seed manual_seed_all seed
        seed_all initial_seed get_rng_state set_rng_state memory_allocated memory_reserved max_memory_allocated
        max_memory_reserved reset_peak_memory_stats memory_stats empty_cache get_device_name
    """.split()
    nothing = "_lazy_init ipc_collect reset_max_memory_allocated reset_max_memory_cached set_stream".split()
    no = "_is_in_bad_fork is_current_stream_capturing".split()
    return {
        **{name: getattr(ours, name) for name in same},
        **dict.fromkeys(nothing, lambda *_, **__: None),
        **dict.fromkeys(no, lambda: False),
        # One: with more, scripts would share their work between devices that are all this machine.
        "device_count": lambda: 1,
        "get_rng_state_all": lambda: [ours.get_rng_state(0)],
        "set_rng_state_all": lambda states: [ours.set_rng_state(state, i) for i, state in enumerate(states)] and None,
        "device_of": _device_of_tensor,
        "get_device_capability": lambda device=None: _CAPABILITY,  # noqa: ARG005
        "get_device_properties": _properties,
        "get_arch_list": lambda: ["sm_{}{}".format(*_CAPABILITY)],
        "is_bf16_supported": lambda including_emulation=True: True,  # noqa: ARG005
        "is_tf32_supported": lambda: True,
        "mem_get_info": lambda device=None: _memory(),  # noqa: ARG005
        "memory_summary": lambda device=None, abbreviated=False: str(ours.memory_stats(device)),  # noqa: ARG005
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": contextlib.nullcontext,
        **_legacy_types(),
    }


def _replace_torch_cuda() -> None:
    for name, value in _torch_cuda().items():
        setattr(torch.cuda, name, value)
    for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
        setattr(torch.cuda.nvtx, name, lambda *_: 0)


# --- entry points that function modes do not see -------------------------------------------------------------------


def _translate_first(function: Callable[..., Any], default: str | None = None) -> Callable[..., Any]:
    """``function`` with its first argument, a device or its type, translated; ``default`` stands for none given."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_from_cuda(args[0]), *args[1:])
        elif default is not None and not kwargs:
            args = (default,)
        return function(*args, **{name: _from_cuda(arg) for name, arg in kwargs.items()})

    return translated


def _replace_autocast() -> None:
    autocast.use_cuda_lists()
    initialise = autocast_mode.autocast.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, _from_cuda(device_type), *args, **kwargs)

    autocast_mode.autocast.__init__ = __init__
    for name in ("get_autocast_dtype", "set_autocast_dtype"):
        setattr(torch, name, _translate_first(getattr(torch, name)))
    # Without a device these two mean "cuda".
    torch.is_autocast_enabled = _translate_first(torch.is_autocast_enabled, _OURS)
    set_enabled = _translate_first(torch.set_autocast_enabled)
    torch.set_autocast_enabled = lambda *args: set_enabled(*(args if len(args) > 1 else (_OURS, *args)))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype(_OURS)
    torch.set_autocast_gpu_dtype = lambda dtype: torch.set_autocast_dtype(_OURS, dtype)


def _replace_generator() -> None:
    class Kind(type(torch._C.Generator)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch._C.Generator)

    class Generator(torch._C.Generator, metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator(device=_from_cuda(device))

    torch.Generator = Generator


def _replace_device_contexts() -> None:
    """``with torch.device("cuda"):`` and ``torch.set_default_device("cuda")``."""
    initialise = _device.DeviceContext.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, device: Any) -> None:
        initialise(self, _from_cuda(torch.device(device)))

    _device.DeviceContext.__init__ = __init__
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        legacy = _legacy_type(kind)
        if legacy is None:
            set_type(kind)
        else:
            torch.set_default_dtype(legacy.dtype)
            torch.set_default_device(_CUDA)

    torch.set_default_tensor_type = set_default_tensor_type
    default = torch.get_default_device
    torch.get_default_device = functools.wraps(default)(lambda: _to_cuda(default()))


def _replace_loading() -> None:
    """Files whose tensors were on a GPU, and ``torch.load(map_location="cuda")``."""

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith(_CUDA):
            return None
        return torch.serialization.default_restore_location(storage, _from_cuda(location))

    torch.serialization.register_package(4, lambda _storage: None, restore)  # before the one of PyTorch's CUDA, at 20


def _enter_in_every_thread() -> None:
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


def install() -> None:
    """Let ``"cuda"`` mean the device from now on, in this process. There is no way back."""
    _replace_torch_cuda()
    _replace_autocast()
    _replace_generator()
    _replace_device_contexts()
    _replace_loading()
    _enter_in_every_thread()
