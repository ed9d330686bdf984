"""Records on the wire: each field of one is declared once, and is written, read and documented by its declaration.

A field is declared as ``Annotated[type, kind]``. A ``Kind`` says how values travel and what is accepted in their place:
nothing that comes from the other side is taken for granted, so every number has bounds and every list a length, and
whatever does not fit raises ``WireError``. ``Record`` is the codec of a class that is declared so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from marid.errors import WireError
from marid.remote.wire.codec import (
    MEMORY_FORMATS,
    Buffer,
    as_bytes,
    as_int,
    as_list,
    as_text,
    dtype_name,
    dtype_named,
    number_from,
    number_to,
)
from marid.remote.wire.tensors import LONGEST, RANK, check_sizes, spec_from, spec_to

__all__ = [
    "ARGUMENT",
    "DTYPE",
    "FLAG",
    "HANDLE",
    "HANDLES",
    "NUMBER",
    "SIZES",
    "SPEC",
    "VIEW",
    "Handle",
    "Kind",
    "Record",
    "choice",
    "exact",
    "listed",
    "matching",
    "nested",
    "optional",
    "pairs",
    "segment",
    "segments",
    "text",
    "whole",
    "wholes",
]

HANDLES = 1 << 53
"""Handles are below this."""
_ITEMS = 1 << 12  # in a list that is an argument
_DIGEST_ITEMS = 4  # items of a header that are as long as a digest


@dataclass(frozen=True)
class Kind:
    """How the values of a field travel.

    ``read`` is given what has come and the segments of its message; ``write`` gives plain data, and adds segments
    (None: a value travels as it is). ``size`` are the items of a header that a value takes beside the one of its
    request, ``buffers`` what of it travels in segments. ``says`` describes it in the documentation.
    """

    says: str
    read: Callable[[Any, Sequence[Buffer]], Any]
    write: Callable[[Any, list[Buffer]], Any] | None = None
    size: Callable[[Any], int] | None = None
    buffers: Callable[[Any], Sequence[Buffer]] | None = None

    def plain(self, value: Any, segments: list[Buffer]) -> Any:
        """A value as it travels."""
        return value if self.write is None else self.write(value, segments)


# --- single values ---------------------------------------------------------------------------------------------------


def whole(low: int, high: int, what: str) -> Kind:
    """A whole number from ``low`` to ``high``."""
    return Kind(what, lambda value, _: as_int(value, low, high, what))


def exact(size: int, what: str) -> Kind:
    """So many bytes."""
    return Kind(f"{what} ({size} bytes)", lambda value, _: as_bytes(value, size, what))


def text(longest: int, what: str) -> Kind:
    """A text of so many characters at most."""
    return Kind(what, lambda value, _: as_text(value, longest, what))


def matching(pattern: str, longest: int, what: str) -> Kind:
    """A text of ASCII characters that has a form."""
    form = re.compile(pattern, re.ASCII)

    def read(value: Any, _: Sequence[Buffer]) -> str:
        if not form.fullmatch(as_text(value, longest, what)):
            raise WireError(f"{what} is none")
        return value

    return Kind(what, read)


def choice(options: Sequence[Any], what: str) -> Kind:
    """One of some values; its position travels."""
    return Kind(
        f"{what}: position of {', '.join(map(str, options))}",
        lambda value, _: options[as_int(value, 0, len(options) - 1, what)],
        lambda value, _: options.index(value),
    )


def _read_flag(value: Any, _: Sequence[Buffer]) -> bool:
    if type(value) is not bool:
        raise WireError("a flag is true or false")
    return value


FLAG = Kind("true or false", _read_flag)
DTYPE = Kind("dtype", lambda value, _: dtype_named(value), lambda value, _: dtype_name(value))
NUMBER = Kind("number or random position", lambda value, _: number_from(value), lambda value, _: number_to(value))
SPEC = Kind("spec", lambda value, _: spec_from(value), lambda value, _: spec_to(value))


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(
        f"{kind.says}, or None",
        lambda value, segments: None if value is None else kind.read(value, segments),
        lambda value, segments: None if value is None else kind.plain(value, segments),
    )


# --- lists -----------------------------------------------------------------------------------------------------------


def listed(kind: Kind, longest: int, what: str) -> Kind:
    """A tuple of so many values of one kind at most."""
    weight = _DIGEST_ITEMS if kind.says.startswith("digest") else 1
    return Kind(
        f"list of at most {longest} {what}",
        lambda value, segments: tuple([kind.read(one, segments) for one in as_list(value, longest, what)]),
        lambda value, segments: [kind.plain(one, segments) for one in value],
        lambda value: weight * len(value),
    )


def wholes(low: int, high: int, longest: int, what: str) -> Kind:
    """A tuple of whole numbers, of which there may be thousands in each step of a loop."""

    def read(value: Any, _: Sequence[Buffer]) -> tuple[int, ...]:
        given = as_list(value, longest, what)
        if given and (set(map(type, given)) != {int} or min(given) < low or max(given) > high):
            raise WireError(f"{what} must be whole numbers from {low} to {high}")
        return tuple(given)

    return Kind(f"list of at most {longest} {what}", read, lambda value, _: list(value), len)


def pairs(first: Kind, second: Kind, longest: int, what: str) -> Kind:
    """A tuple of pairs; the first and the second of each travel one after the other."""

    def read(value: Any, segments: Sequence[Buffer]) -> tuple[tuple[Any, Any], ...]:
        flat = as_list(value, 2 * longest, what)
        if len(flat) % 2:
            raise WireError(f"{what} are pairs")
        return tuple(
            [(first.read(a, segments), second.read(b, segments)) for a, b in zip(flat[::2], flat[1::2], strict=True)]
        )

    def write(value: Any, segments: list[Buffer]) -> list[Any]:
        return [part for a, b in value for part in (first.plain(a, segments), second.plain(b, segments))]

    return Kind(f"flat list of at most {longest} {what}: {first.says}, {second.says}", read, write, len)


# --- arguments of operators ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor of the session, as an argument."""

    number: int


def _write_argument(arg: Any, segments: list[Buffer]) -> Any:
    if isinstance(arg, Handle):
        return {"h": arg.number}
    if isinstance(arg, (list, tuple)):
        return [_write_argument(item, segments) for item in arg]
    if isinstance(arg, torch.dtype):
        return {"t": dtype_name(arg)}
    if isinstance(arg, torch.memory_format):
        return {"m": MEMORY_FORMATS.index(arg)}
    if arg is torch.strided:
        return {"y": True}
    return arg if arg is None or type(arg) in (bool, str) else number_to(arg)


def _read_argument(data: Any, segments: Sequence[Buffer], depth: int = 0) -> Any:
    if data is None or type(data) in (bool, str):
        return data
    if type(data) is list:
        if depth > 1 or len(data) > _ITEMS:
            raise WireError("a list of arguments is too long, or nested")
        return [_read_argument(item, segments, depth + 1) for item in data]
    if type(data) is dict and len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "h":
            return Handle(as_int(value, 0, HANDLES, "a handle"))
        if tag == "t":
            return dtype_named(value)
        if tag == "m":
            return MEMORY_FORMATS[as_int(value, 0, len(MEMORY_FORMATS) - 1, "a memory format")]
        if tag == "y":
            return torch.strided
    return number_from(data)


def _read_view(data: Any, _: Sequence[Buffer]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    parts = as_list(data, 3, "a view")
    if len(parts) != 3:
        raise WireError("a view has an offset, a shape and a stride")
    shape, stride = (SIZES.read(part, ()) for part in parts[1:])
    check_sizes(shape, stride, torch.uint8)  # checked again when the dtype is known
    return as_int(parts[0], 0, HANDLES, "an offset"), shape, stride


HANDLE = whole(0, HANDLES, "handle")
SIZES = wholes(0, LONGEST, RANK, "sizes")
ARGUMENT = Kind("argument", _read_argument, _write_argument)
VIEW = Kind("offset, shape and stride", _read_view)


# --- bytes -----------------------------------------------------------------------------------------------------------


def _segment_at(position: Any, segments: Sequence[Buffer], longest: int) -> Buffer:
    found = segments[as_int(position, 0, len(segments) - 1, "a segment")]
    if memoryview(found).nbytes > longest:
        raise WireError(f"a segment has {memoryview(found).nbytes} bytes, and may have {longest}")
    return found


def segment(longest: int, what: str) -> Kind:
    """Bytes in a segment of the message, of which the header has the position."""

    def write(value: Buffer, segments: list[Buffer]) -> int:
        segments.append(value)
        return len(segments) - 1

    return Kind(
        f"segment with {what} (at most {longest} bytes)",
        lambda value, segments: _segment_at(value, segments, longest),
        write,
        buffers=lambda value: (value,),
    )


def segments(longest: int, what: str) -> Kind:
    """Bytes in segments that follow each other: the header has the first one's position and their number."""

    def read(value: Any, given: Sequence[Buffer]) -> tuple[Buffer, ...]:
        if value == []:
            return ()
        if len(as_list(value, 2, what)) != 2:
            raise WireError(f"{what} have a first segment and a number")
        first, count = (as_int(one, 0, len(given), "a segment") for one in value)
        return tuple([_segment_at(first + i, given, longest) for i in range(count)])

    def write(value: Sequence[Buffer], given: list[Buffer]) -> list[int]:
        first = len(given)
        given += value
        return [first, len(value)] if value else []

    return Kind(f"first segment and number of segments with {what}", read, write, buffers=lambda value: value)


# --- records ---------------------------------------------------------------------------------------------------------


class Record:
    """The codec of a class: a list of its fields, behind ``head``. Fields at the end that have their defaults are left
    out. ``check``, a method of the class, raises ``WireError`` for fields that do not belong together."""

    def __init__(self, cls: type[Any], *head: str) -> None:
        hints = get_type_hints(cls, include_extras=True)
        parameters = inspect.signature(cls).parameters.values()
        self.cls = cls
        self.fields: dict[str, Kind] = {
            one.name: next(part for part in hints[one.name].__metadata__ if isinstance(part, Kind))
            for one in parameters
        }
        self._head = head
        self._kinds = list(self.fields.values())
        self._writers = [(name, kind.write) for name, kind in self.fields.items()]
        self._defaults = [(one.name, one.default) for one in parameters if one.default is not one.empty][::-1]
        self._sizes = [(name, kind.size) for name, kind in self.fields.items() if kind.size is not None]
        self._buffers = [(name, kind.buffers) for name, kind in self.fields.items() if kind.buffers is not None]
        self._check: Callable[[Any], None] | None = getattr(cls, "check", None)

    def write(self, record: Any, segments: list[Buffer]) -> list[Any]:
        """A record as plain data. Bytes of tensors and of programs are added to ``segments``."""
        data: list[Any] = [*self._head]
        for name, write in self._writers:
            value = getattr(record, name)
            data.append(value if write is None else write(value, segments))
        for name, default in self._defaults:
            if getattr(record, name) != default:
                break
            data.pop()
        return data

    def read(self, data: list[Any], segments: Sequence[Buffer]) -> Any:
        """The record of that data. Raises ``WireError``."""
        given = data[len(self._head) :]
        most = len(self._kinds)
        if not most - len(self._defaults) <= len(given) <= most:
            raise WireError(f"{self.cls.__name__} has {len(given)} fields")
        record = self.cls(*[kind.read(value, segments) for kind, value in zip(self._kinds, given, strict=False)])
        if self._check is not None:
            self._check(record)
        return record

    def size(self, record: Any) -> int:
        """How many items of a header it takes."""
        return 1 + sum([size(getattr(record, name)) for name, size in self._sizes])

    def buffers(self, record: Any) -> list[Buffer]:
        """What of it travels in segments."""
        return [one for name, buffers in self._buffers for one in buffers(getattr(record, name))]


def nested(cls: type[Any], what: str) -> Kind:
    """A record as a field of another one."""
    codec = Record(cls)
    return Kind(
        f"{what}: {', '.join(kind.says for kind in codec.fields.values())}",
        lambda value, segments: codec.read(as_list(value, len(codec.fields), what), segments),
        codec.write,
    )
