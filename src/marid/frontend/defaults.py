"""``default_device`` and ``default_dtype``: what PyTorch's factories make, for a block of one task or thread.

The values are context variables. PyTorch's factories ask modes, which it keeps in a stack for each thread: the first
block of a thread puts a mode there, which the next ones share, and the last one takes it away, in whatever order the
blocks of tasks end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext, _device_constructors

T = TypeVar("T")


def default_device(device: torch.types.Device) -> _GeneratorContextManager[None]:
    """A block, or a decorator, in which PyTorch's factories (``torch.ones``, ``torch.tensor``, what makes parameters)
    make tensors on ``device`` where they are not told another one; like ``with torch.device(device)``, but each asyncio
    task and each thread has its own. The innermost block counts, also among those of ``torch.device``.

    It holds in the thread that enters it, for tasks that are begun inside too, until it ends. Raises PyTorch's error
    for what is no device.
    """
    return _device.block(DeviceContext(device).device)  # translated under --as-cuda


def default_dtype(dtype: torch.dtype) -> _GeneratorContextManager[None]:
    """A block, or a decorator, in which PyTorch's factories of dense tensors have ``dtype`` (and its complex
    counterpart) where they would have ``torch.get_default_dtype()``. Unlike ``torch.set_default_dtype``, each asyncio
    task and each thread has its own, no pending work runs, and only factories are concerned: dividing integers gives
    what it gives elsewhere, as do lists with tensors or numbers of NumPy's in them.

    It holds as that of ``default_device``. Raises ``TypeError`` for what is no floating-point dtype.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"marid.default_dtype() takes a floating-point dtype, but got {dtype}")
    return _dtype.block(dtype)


# --- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Block(Generic[T]):
    """One ``with`` block. Contexts that were copied inside may outlive it."""

    value: T
    outer: _Block[T] | None
    is_open: bool = True


class _Entered:
    """A mode of one thread, and how many open blocks of that thread share it."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self.mode = mode
        self.blocks = 0


class _Default(Generic[T]):
    """A default that is a context variable, and the modes that apply it."""

    def __init__(self, name: str, make_mode: Callable[[], TorchFunctionMode]) -> None:
        self._innermost: ContextVar[_Block[T] | None] = ContextVar(name, default=None)
        self._make_mode = make_mode
        self._here = threading.local()

    @property
    def value(self) -> T | None:
        """What counts now; None outside of all blocks."""
        block = self._innermost.get()
        while block is not None and not block.is_open:
            block = block.outer
        return None if block is None else block.value

    @contextmanager
    def block(self, value: T) -> Iterator[None]:
        block = _Block(value, self._innermost.get())
        self._innermost.set(block)
        entered: _Entered | None = getattr(self._here, "entered", None)
        if entered is None or not _is_asked(entered.mode):
            entered = self._here.entered = _Entered(self._make_mode())
            _push_mode(entered.mode)
        entered.blocks += 1
        try:
            yield
        finally:
            block.is_open = False
            if self._innermost.get() is block:
                self._innermost.set(block.outer)
            entered.blocks -= 1
            if entered.blocks == 0:
                _take(entered.mode)


def _is_asked(mode: TorchFunctionMode) -> bool:
    """Whether a mode is in the stack of this thread, and nobody else's has come after it."""
    for one in reversed(_get_current_function_mode_stack()):
        if one is mode or not isinstance(one, (_Devices, _Dtypes)):
            return one is mode
    return False


def _take(mode: Any) -> None:
    """Out of the stack of this thread, wherever it is by now: in the middle, or set aside by a mode that is the
    default of all threads, which PyTorch keeps as the only one of its kind."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for one in reversed(modes):
        if one is not mode:
            _push_mode(one)
        if getattr(one, "prev_mode", None) is mode:
            one.prev_mode = None


# --- devices ---------------------------------------------------------------------------------------------------------


class _Devices(DeviceContext):
    """``torch.device`` as a context, of a device that is looked up at each call."""

    def __init__(self) -> None:  # the other one sets the device
        self.prev_mode: DeviceContext | None = None

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For ``torch.get_default_device()``, which asks the innermost mode."""
        modes = [one for one in _get_current_function_mode_stack() if isinstance(one, DeviceContext)]
        outer = modes[: modes.index(self)] if self in modes else []
        return _device.value or (outer[-1].device if outer else torch.device("cpu"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is None and func in _device_constructors():
            kwargs["device"] = _device.value  # None: whatever is outside of this
        return func(*args, **kwargs)


# --- dtypes ----------------------------------------------------------------------------------------------------------

_FLOATING = {
    *(torch.empty, torch.empty_permuted, torch.empty_strided, torch.ones, torch.zeros, torch.eye),
    *(torch.rand, torch.randn, torch.normal, torch.linspace, torch.logspace, torch.range, torch.scalar_tensor),
    *(torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window),
    *(torch.fft.fftfreq, torch.fft.rfftfreq),
}
"""They have the default dtype, or its complex counterpart if an argument is complex."""
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""They have it if what they are given is made of Python's numbers, and some are not integers."""


class _Dtypes(TorchFunctionMode):
    """Tells factories the dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = _dtype.value
        if dtype is not None and kwargs.get("dtype") is None and kwargs.get("out") is None:
            kind = _kind_made(func, args, kwargs)
            if kind is not None:
                kwargs["dtype"] = dtype if kind is float else dtype.to_complex()
        return func(*args, **kwargs)


def _kind_made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``float`` or ``complex`` where a call makes a tensor of the default dtype or of its complex counterpart."""
    given = (*args, *kwargs.values())
    if func in _OF_DATA:
        kind = _kind_of(args[0] if args else kwargs.get("data", kwargs.get("obj")))
    elif func in (torch.arange, torch.full):  # the size has integers only
        kind = _widest({_kind_of_number(one) for one in given} - {None})
    elif func in _FLOATING:
        has_tensors = func is torch.normal and any(isinstance(one, torch.Tensor) for one in given)
        is_complex = func is not torch.scalar_tensor and any(_kind_of_number(one) is complex for one in given)
        kind = None if has_tensors else complex if is_complex else float
    else:
        kind = None
    return kind if kind in (float, complex) else None


def _kind_of_number(one: Any) -> Any:
    """That of a Python number, or of a tensor that stands for one; None for anything else."""
    if isinstance(one, torch.Tensor):
        return complex if one.is_complex() else float if one.is_floating_point() else int
    return next((kind for kind in (float, complex, int) if isinstance(one, kind)), None)  # int: also booleans


def _kind_of(data: Any) -> Any:
    """The widest of the Python numbers in nested lists; None where there is anything that has a dtype of its own."""
    if isinstance(data, (list, tuple)):
        return _widest({_kind_of(item) for item in data} or {float})
    return None if hasattr(data, "dtype") else _kind_of_number(data)


def _widest(kinds: set[Any]) -> Any:
    return next((kind for kind in (None, complex, float, int) if kind in kinds), None)


_device: _Default[torch.device] = _Default("marid.default_device", _Devices)
_dtype: _Default[torch.dtype] = _Default("marid.default_dtype", _Dtypes)
