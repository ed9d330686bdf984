"""Parts of messages and saved programs as plain data: whole numbers, texts, dtypes, constants, numbers of runs, specs.

What is read was written by somebody else: each part has bounds, and what does not fit raises ``WireError``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Draw, Spec


def as_int(value: Any, low: int, high: int, what: str) -> int:
    """A whole number from ``low`` to ``high``. Raises ``WireError`` naming ``what``."""
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{what} must be a whole number from {low} to {high}")
    return value


def as_bytes(value: Any, size: int, what: str) -> bytes:
    """Exactly ``size`` bytes. Raises ``WireError``."""
    if type(value) is not bytes or len(value) != size:
        raise WireError(f"{what} must be {size} bytes")
    return value


def as_text(value: Any, longest: int, what: str) -> str:
    """A text of at most ``longest`` characters. Raises ``WireError``."""
    if type(value) is not str or len(value) > longest:
        raise WireError(f"{what} must be a text of at most {longest} characters")
    return value


def as_list(value: Any, longest: int, what: str) -> list[Any]:
    """A list of at most ``longest`` items. Raises ``WireError``."""
    if type(value) is not list or len(value) > longest:
        raise WireError(f"{what} must be a list of at most {longest} items")
    return value


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
        *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a dtype travels by. Raises ``WireError`` for one that does not travel (quantised ones)."""
    name = _NAMES.get(dtype)
    if name is None:
        raise WireError(f"tensors of {dtype} cannot be sent")
    return name


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name. Raises ``WireError``."""
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"there is no dtype {str(name)[:40]!r}")
    return dtype


# --- the constants of a program --------------------------------------------------------------------------------------

_TEXT = 256  # the longest text
_FORMATS = {
    str(one).removeprefix("torch."): one
    for one in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


def constant_to(value: Any) -> Any:
    """An argument that is part of a program as plain data: None and booleans as they are, the rest tagged. Raises
    ``WireError``."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return {"str": value}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is torch.strided:
        return {"layout": "strided"}
    raise WireError(f"a program with {value!r} in it cannot be sent or saved")


def constant_from(data: Any) -> Any:
    """What ``constant_to`` was given. Raises ``WireError``."""
    if data is None or type(data) is bool:
        return data
    if type(data) is dict and len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "str":
            return as_text(value, _TEXT, "a text")
        if tag == "dtype":
            return dtype_named(value)
        if tag == "memory_format" and type(value) is str and value in _FORMATS:
            return _FORMATS[value]
        if tag == "layout" and value == "strided":
            return torch.strided
    raise WireError(f"{str(data)[:40]!r} is no argument of an operator")


# --- the numbers of a run --------------------------------------------------------------------------------------------

_WORDS = 1 << 62  # a position in a random stream
_NUMBERS = 1 << 12  # in one list of numbers


def number_to(value: Any) -> Any:
    """A parameter of a program as plain data: a number, a list of numbers, or a random position."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value
    if kind is tuple or kind is list:
        return list(value)
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is Draw:
        return {"d": [value.seed, value.offset, value.spare, value.end, value.end_spare]}
    raise WireError(f"a {kind.__name__} is no number of a program")


def number_from(value: Any) -> Any:
    """What ``number_to`` was given. Raises ``WireError``."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value
    if kind is list:
        if len(value) > _NUMBERS or not all(type(item) in (int, float, bool) for item in value):
            raise WireError("a list of numbers has something else in it, or is too long")
        return tuple(value)
    if kind is dict and len(value) == 1:
        if "c" in value:
            parts = as_list(value["c"], 2, "a complex number")
            if len(parts) == 2 and all(type(part) is float for part in parts):
                return complex(*parts)
        elif "d" in value:
            return _draw(as_list(value["d"], 5, "a random position"))
    raise WireError("a number of a run is none")


def _draw(parts: Sequence[Any]) -> Draw:
    if len(parts) != 5:
        raise WireError("a random position has five parts")
    seed = as_int(parts[0], 0, (1 << 64) - 1, "a seed")
    offset, end = (as_int(part, 0, _WORDS, "a random position") for part in (parts[1], parts[3]))
    spare, end_spare = (as_int(part, -1, _WORDS, "a random position") for part in (parts[2], parts[4]))
    return Draw(seed, offset, spare, end, end_spare)


# --- specs ------------------------------------------------------------------------------------------------------------

RANK = 64
"""The most dimensions."""
LONGEST = 1 << 46
"""The most bytes of memory that a tensor may reach."""
_interned: weakref.WeakValueDictionary[tuple[Any, ...], Spec] = weakref.WeakValueDictionary()


def spec_to(spec: Spec) -> list[Any]:
    """``[dtype, shape, stride, offset]``, and the conjugate and negative bits where one is set."""
    data = [dtype_name(spec.dtype), list(spec.shape), list(spec.stride), spec.offset]
    return [*data, spec.conj, spec.neg] if spec.conj or spec.neg else data


def spec_from(data: Any) -> Spec:
    """The spec of that data. Raises ``WireError``."""
    parts = as_list(data, 6, "a spec")
    if len(parts) not in (4, 6):
        raise WireError("a spec has four parts, or six")
    dtype = dtype_named(parts[0])
    shape, stride = sizes_from(parts[1], parts[2], dtype)
    offset = as_int(parts[3], 0, LONGEST, "an offset")
    bits = [False, False, *parts[4:]][-2:]
    if any(type(bit) is not bool for bit in bits) or (
        True in bits and not dtype.is_complex and not dtype.is_floating_point
    ):
        raise WireError("a spec has bits that it cannot have")
    return interned(shape, stride, offset, dtype, *bits)


def sizes_from(shape: Any, stride: Any, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a tensor that can be addressed. Raises ``WireError``."""
    sizes = tuple([as_int(size, 0, LONGEST, "a size") for size in as_list(shape, RANK, "a shape")])
    steps = tuple([as_int(step, 0, LONGEST, "a stride") for step in as_list(stride, RANK, "a stride")])
    check_sizes(sizes, steps, dtype)
    return sizes, steps


def check_sizes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``WireError`` unless a tensor with this shape and stride can be addressed."""
    if len(shape) != len(stride):
        raise WireError("a shape and its stride differ in length")
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    if max(math.prod(shape), reach + 1) * dtype.itemsize > LONGEST:
        raise WireError("a tensor is too large to be addressed")


def spec_of(tensor: torch.Tensor) -> Spec:
    """The spec of a concrete tensor."""
    offset = int(tensor.storage_offset())
    return interned(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def interned(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    conj: bool = False,
    neg: bool = False,
) -> Spec:
    """The one spec with these parts, on device 0."""
    key = (shape, stride, offset, dtype, conj, neg)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Spec(shape, stride, offset, dtype, 0, conj, neg)
    return found
