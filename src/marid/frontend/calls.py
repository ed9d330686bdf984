"""Reading the calls of operators: what a node holds, and the key under which what is known of such calls is found.

A key has a spec for each tensor and everything else that can decide the metadata of a result: whole numbers, texts and
types as they are, floating-point numbers only by their kind (``bucket``) where they cannot decide a shape.
``native/call.cpp`` does what ``take`` does, for calls as they come from PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch

from marid.engine.protocol import other_layout
from marid.errors import UnsupportedOperationError
from marid.frontend import handles
from marid.graph.arguments import leaves, map_leaves, values_in
from marid.semantics.scopes import current_site

if TYPE_CHECKING:
    from marid.frontend.record import Recorder

# Objects of these types are their own keys.
OTHER_TYPES = frozenset({torch.dtype, torch.memory_format, torch.layout})
# Keywords that are no part of the call that is recorded.
NOT_RECORDED = frozenset({"device", "generator", "layout", "pin_memory"})

Pairs = tuple[tuple[str, Any], ...]
Taken = tuple[tuple[Any, ...], tuple[Any, ...], Pairs | None, list[Any]]


class Call:
    """One call of an operator: values stand in ``args`` and ``kwargs`` (pairs) for tensors, tuples for lists.

    ``tensors`` are the lazy tensors in order of appearance, CPU scalars lifted.
    """

    __slots__ = ("args", "device", "generator", "key", "kwargs", "tensors")

    def __init__(self, taken: Taken, device: int, generator: torch.Generator | None) -> None:
        self.key: Any
        self.key, self.args, self.kwargs, self.tensors = taken
        self.device = device
        self.generator = generator


# --- the usual calls -----------------------------------------------------------------------------------------------


class _Unusual(Exception):
    """An argument that has to be looked at."""


def take(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any] | None, exact: bool, exact_lists: bool
) -> Taken | None:
    """Key, arguments, keyword arguments and lazy tensors (instances of ``cls``) of a usual call; None for another one.

    ``exact`` makes floating-point numbers part of the key, ``exact_lists`` those in lists.
    """
    try:
        return _Reader(cls, exact_lists, False).take(args, kwargs, exact)
    except _Unusual:
        return None


def taken_from(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], exact: bool, exact_lists: bool) -> Taken:
    """The same of any call, whatever its arguments are."""
    return _Reader(cls, exact_lists, True).take(args, kwargs, exact)


class _Reader:
    """Reads one call, collecting its key and its tensors."""

    __slots__ = ("cls", "exact_lists", "tensors", "unusual")

    def __init__(self, cls: type, exact_lists: bool, unusual: bool) -> None:
        self.cls = cls
        self.exact_lists = exact_lists
        self.unusual = unusual
        self.tensors: list[Any] = []

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, exact: bool) -> Taken:
        key: list[Any] = []
        values = tuple([self._take_one(arg, exact, key) for arg in args])
        pairs: list[tuple[str, Any]] = []
        for name, arg in kwargs.items() if kwargs else ():
            if name in NOT_RECORDED and not self.unusual:
                raise _Unusual
            key.append(name)
            pairs.append((name, self._take_one(arg, exact, key)))
        return tuple(key), values, tuple(pairs) or None, self.tensors

    def _take_one(self, arg: Any, exact: bool, key: list[Any]) -> Any:
        kind = type(arg)
        if kind is self.cls:
            self.tensors.append(arg)
            key.append(arg._value.spec)
            return arg._value
        if kind is list or kind is tuple:
            parts: list[Any] = []
            values = tuple([self._take_one(item, self.exact_lists, parts) for item in arg])
            key.append(tuple(parts))
            return values
        if kind is float:
            key.append((arg,) if exact else bucket(arg))  # a tuple, because 1.0 equals 1
        elif kind is bool:
            key.append("True" if arg else "False")
        elif kind is complex:
            key.append(complex)
        elif isinstance(arg, self.cls):  # of a user's subclass
            self.tensors.append(arg)
            key.append(arg._value.spec)
            return arg._value
        elif self.unusual or kind is int or kind is str or arg is None or kind in OTHER_TYPES:
            key.append(arg)
        else:
            raise _Unusual
        return arg


# Beyond these, a number does not fit into some dtype: filling a tensor with it raises.
BOUNDS = sorted(
    [float(torch.iinfo(dtype).max) for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)]
    + [float(torch.iinfo(dtype).max) for dtype in (torch.uint32, torch.int64, torch.uint64)]
    + [torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
)
_LARGE = ["large", *(f"beyond {bound}" for bound in BOUNDS)]
_NEGATIVE = ["negative", *(f"beyond -{bound}" for bound in BOUNDS)]


def bucket(number: float) -> str:
    """The metadata of a result may depend on the sign and range of a number, never on the number."""
    if number != number:
        return "nan"
    if 0.0 <= number <= 1.0:
        return "unit"
    return _LARGE[bisect_left(BOUNDS, number)] if number > 0 else _NEGATIVE[bisect_left(BOUNDS, -number)]


# --- any call ------------------------------------------------------------------------------------------------------


def read(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Any call. Raises torch's device error for tensors of other devices."""
    drawing = recorder.position.get("generator", len(args))
    if drawing < len(args):  # `torch.poisson(x, generator)`: draws are recorded by name
        names = [argument.name for argument in recorder.func._schema.arguments]
        args, kwargs = args[:drawing], {**kwargs, **dict(zip(names[drawing:], args[drawing:], strict=False))}
    device = _device_of(args, kwargs)
    cleaned = tuple([_cleaned(recorder, arg, index, device) for index, arg in enumerate(args)])
    named = {
        name: _cleaned(recorder, arg, recorder.position.get(name, -1), device)
        for name, arg in kwargs.items()
        if name not in NOT_RECORDED or (name == "layout" and arg is not torch.strided)
    }
    taken = taken_from(handles._handle_class, cleaned, named, recorder.exact_floats, recorder.exact_lists)
    return Call(taken, device, kwargs.get("generator"))


def _cleaned(recorder: Recorder, arg: Any, position: int, device: int) -> Any:
    def clean(leaf: Any) -> Any:
        if handles.is_lazy(leaf):
            if leaf._value.spec.device != device:
                raise _on_other_device(device, f"{handles.DEVICE_TYPE}:{leaf._value.spec.device}")
            return leaf
        if isinstance(leaf, torch.Tensor):
            return _lifted(recorder, leaf, position, device)
        return leaf.node.guard_int("", 0) if isinstance(leaf, torch.SymInt) else leaf

    return map_leaves(clean, list(arg) if isinstance(arg, (list, tuple)) else arg)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for item in leaves((args, list(kwargs.values()))):
        if handles.is_lazy(item):
            return item._value.spec.device
    device = kwargs.get("device")
    index = None if device is None else torch.device(device).index
    return handles.current_device() if index is None else index


def _lifted(recorder: Recorder, tensor: torch.Tensor, position: int, device: int) -> Any:
    from marid.frontend.capture import lift, lifts_everything

    written = position >= 0 and recorder.written[position]
    if tensor.device.type == handles.DEVICE_TYPE:
        raise unsupported(recorder.op.name, f"an argument has layout {other_layout(tensor)}")
    on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    from_cpu = tensor.dim() == 0 or position in recorder.facts.cpu_arguments
    if on_cpu and not written and (from_cpu or lifts_everything()):
        return lift(tensor, device)
    hint = f"move it with .to('{handles.DEVICE_TYPE}') or marid.LazyTensor.lift"
    raise _on_other_device(device, f"{tensor.device}", f" (in {recorder.op.name} at {current_site()}; {hint})")


def unsupported(name: str, why: str) -> UnsupportedOperationError:
    """The error for what the device cannot represent, at the user's line."""
    return UnsupportedOperationError(
        f"{name} at {current_site()}: {why}, which {handles.DEVICE_TYPE} does not support; "
        "move the tensors to the CPU first with .cpu()"
    )


def _on_other_device(device: int, other: str, more: str = "") -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{handles.DEVICE_TYPE}:{device} and {other}!{more}"
    )


def writes_of(recorder: Recorder, args: tuple[Any, ...], kwargs: Pairs | None) -> list[int]:
    """Which of the tensors of a call are written."""
    writes: list[int] = []
    seen = 0
    arguments = [*enumerate(args), *((recorder.position[name], value) for name, value in kwargs or ())]
    for position, arg in arguments:
        count = len(list(values_in((arg,))))
        if recorder.written[position]:
            writes += range(seen, seen + count)
        seen += count
    return writes
