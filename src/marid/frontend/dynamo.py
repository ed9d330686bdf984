"""``torch.compile`` beside Marid: a function that uses tensors of the device runs as plain Python, and is recorded.

Dynamo traces what runs under ``torch.compile``. It can do nothing with tensors that are recorded, and would take their
device for one whose code Inductor generates. So a frame in which it meets one is left to Python, with all that the
frame calls. Marid's own functions, which run within the user's frames, are on its list of what is not traced.

Dynamo has no interface for the former; the places are those of PyTorch 2.11 to 2.13. They are changed when Dynamo has
been imported: that takes half a second, for which a program without ``torch.compile`` does not wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map

from marid.frontend import handles
from marid.frontend.tensor import LazyTensor

_TRIES = 8  # times that a function is traced in vain before it is left to Python for good


class _Met(BaseException):
    """Dynamo has met a tensor of the device. No ``Exception``: Dynamo would take it for one of the user's."""


_converting = threading.local()  # ``frame``: whether Dynamo is at work on a frame, and not on an export


def leave_alone() -> Callable[[], None]:
    """Have Dynamo trace no code of Marid's. Returns what undoes it."""
    from torch._dynamo import trace_rules

    before = list(trace_rules.SKIP_DIRS)
    trace_rules.add("marid")  # its folder; for each entry an expression of all is compiled, for 7 ms
    added = [path for path in trace_rules.SKIP_DIRS if path not in before]

    def undo() -> None:
        trace_rules.SKIP_DIRS[:] = [path for path in trace_rules.SKIP_DIRS if path not in added]
        trace_rules._recompile_re()

    return undo


def traced_as_before(before: Any, make: Callable[[Any], Any]) -> Any:
    """What ``make`` makes of ``before``, which is what Dynamo traces in its place: a frame with tensors of the device
    is none of its affair."""
    made = make(before)
    if isinstance(made, FunctionType):
        made._torchdynamo_inline = before  # pyright: ignore[reportFunctionMemberAccess]
    return made


def beside_fake_tensors(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``FakeTensorMode.__torch_dispatch__``, which leaves calls with tensors of other classes to these: tensors of the
    device are computed as ever, or become fake ones beside such."""
    from torch._subclasses.fake_tensor import FakeTensor

    @functools.wraps(dispatch)
    def wrapper(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        returned = dispatch(self, func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs)) if returned is NotImplemented else []
        if not any(map(handles.is_lazy, leaves)):
            return returned
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if not self.allow_non_fake_inputs:  # as PyTorch says it of its own
                raise AssertionError(
                    "Please convert all Tensors to FakeTensors first or instantiate FakeTensorMode with "
                    f"'allow_non_fake_inputs'. Found in {func}"
                )
            args, kwargs = tree_map(
                lambda leaf: self.from_tensor(leaf) if handles.is_lazy(leaf) else leaf, (args, kwargs)
            )
        return func(*args, **(kwargs or {}))

    return wrapper


def skipping(convert: Callable[..., Any]) -> Callable[..., Any]:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
    from torch._dynamo.types import ConvertFrameReturn

    met: WeakKeyDictionary[CodeType, int] = WeakKeyDictionary()

    @functools.wraps(convert)
    def wrapper(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        times = met.get(frame.f_code, 0)
        if not (times and _is_for_the_device(frame.f_locals.values())):
            outside = getattr(_converting, "frame", False)
            _converting.frame = True
            try:
                return convert(self, frame, *args, **kwargs)
            except _Met:
                met[frame.f_code] = times = times + 1
            finally:
                _converting.frame = outside
        # The same code may be called with tensors of the CPU later, to be compiled then.
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        return ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=times >= _TRIES)

    return wrapper


def _is_for_the_device(values: Iterable[Any]) -> bool:
    """Whether that can be seen at a glance: by a tensor, or by the parameters of a module or an optimizer."""
    for value in values:
        if isinstance(value, torch.nn.Module):
            value = next(value.parameters(), None)
        elif isinstance(value, torch.optim.Optimizer):
            value = value.param_groups[0]["params"][0]
        if isinstance(value, LazyTensor):
            return True
    return False


def refusing(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def wrapper(self: Any, value: Any) -> Any:
        if isinstance(value, LazyTensor) and getattr(_converting, "frame", False):
            raise _Met
        return wrap(self, value)

    return wrapper


def refusing_devices(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.device is not None and self.device.type == handles.DEVICE_TYPE and getattr(_converting, "frame", False):
            raise _Met

    return wrapper
