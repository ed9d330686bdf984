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

from marid.engine.plain import (
    LONGEST,
    RANK,
    as_bytes,
    as_int,
    as_list,
    as_text,
    check_sizes,
    constant_from,
    constant_to,
    dtype_name,
    dtype_named,
    number_from,
    number_to,
    spec_from,
    spec_to,
)
from marid.errors import WireError
from marid.graph.arguments import map_leaves
from marid.graph.node import Draw
from marid.remote.wire.codec import Buffer

HANDLES = 1 << 53
"""Handles are below this."""
_ITEMS = 1 << 12  # in a list that is an argument


@dataclass(frozen=True)
class Kind:
    """How the values of a field travel in a header.

    ``read`` is given what has come; ``write`` gives plain data (None: a value travels as it is). ``size`` are the items
    of a header that a value takes beside the one of its request. ``says`` describes it in the documentation.
    """

    says: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None
    size: Callable[[Any], int] | None = None


@dataclass(frozen=True)
class SegmentKind:
    """How the values of a field travel in segments of the message. ``buffers`` are their bytes."""

    says: str
    read: Callable[[Any, Sequence[Buffer]], Any]
    write: Callable[[Any, list[Buffer]], Any]
    buffers: Callable[[Any], Sequence[Buffer]]


def _as_it_is(value: Any) -> Any:
    return value


# --- single values ---------------------------------------------------------------------------------------------------


def whole(low: int, high: int, what: str) -> Kind:
    """A whole number from ``low`` to ``high``."""
    return Kind(what, lambda value: as_int(value, low, high, what))


def exact(size: int, what: str) -> Kind:
    """So many bytes."""
    return Kind(f"{what} ({size} bytes)", lambda value: as_bytes(value, size, what))


def text(longest: int, what: str) -> Kind:
    """A text of so many characters at most."""
    return Kind(what, lambda value: as_text(value, longest, what))


def matching(pattern: str, longest: int, what: str) -> Kind:
    """A text of ASCII characters that has a form."""
    form = re.compile(pattern, re.ASCII)

    def read(value: Any) -> str:
        if not form.fullmatch(as_text(value, longest, what)):
            raise WireError(f"{what} is none")
        return value

    return Kind(what, read)


def choice(options: Sequence[Any], what: str) -> Kind:
    """One of some values; its position travels."""
    return Kind(
        f"{what}: position of {', '.join(map(str, options))}",
        lambda value: options[as_int(value, 0, len(options) - 1, what)],
        options.index,
    )


def _read_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise WireError("a flag is true or false")
    return value


FLAG = Kind("true or false", _read_flag)
DTYPE = Kind("dtype", dtype_named, dtype_name)
NUMBER = Kind("number or random position", number_from, number_to)
SPEC = Kind("spec", spec_from, spec_to)


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    write = kind.write or _as_it_is
    return Kind(
        f"{kind.says}, or None",
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else write(value),
    )


# --- lists -----------------------------------------------------------------------------------------------------------


def listed(kind: Kind, longest: int, what: str, weight: int = 1) -> Kind:
    """A tuple of so many values of one kind at most, each as long as ``weight`` items of a header."""
    read, write = kind.read, kind.write or _as_it_is
    return Kind(
        f"list of at most {longest} {what}",
        lambda value: tuple([read(one) for one in as_list(value, longest, what)]),
        lambda value: [write(one) for one in value],
        lambda value: weight * len(value),
    )


def wholes(high: int, longest: int, what: str) -> Kind:
    """A tuple of whole numbers, of which there may be thousands in each step of a loop."""

    def read(value: Any) -> tuple[int, ...]:
        given = as_list(value, longest, what)
        if given and (set(map(type, given)) != {int} or min(given) < 0 or max(given) > high):
            raise WireError(f"{what} must be whole numbers from 0 to {high}")
        return tuple(given)

    return Kind(f"list of at most {longest} {what}", read, list, len)


def pairs(first: Kind, second: Kind, longest: int, what: str) -> Kind:
    """A tuple of pairs; the first and the second of each travel one after the other."""
    write_first, write_second = first.write or _as_it_is, second.write or _as_it_is

    def read(value: Any) -> tuple[tuple[Any, Any], ...]:
        flat = as_list(value, 2 * longest, what)
        if len(flat) % 2:
            raise WireError(f"{what} are pairs")
        ends = zip(map(first.read, flat[::2]), map(second.read, flat[1::2]), strict=True) if flat else ()
        return tuple(ends)

    def write(value: Any) -> list[Any]:
        return [part for a, b in value for part in (write_first(a), write_second(b))] if value else []

    return Kind(f"flat list of at most {longest} {what}: {first.says}, {second.says}", read, write, len)


# --- arguments of operators ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor of the session, as an argument."""

    number: int


def _write_argument(arg: Any) -> Any:
    if isinstance(arg, Handle):
        return {"h": arg.number}
    return number_to(arg) if isinstance(arg, (int, float, complex, Draw)) else constant_to(arg)


def _read_argument(data: Any, depth: int = 0) -> Any:
    if type(data) is list:
        if depth > 1 or len(data) > _ITEMS:
            raise WireError("a list of arguments is too long, or nested")
        return [_read_argument(item, depth + 1) for item in data]
    if type(data) is dict and data.keys() == {"h"}:
        return Handle(as_int(data["h"], 0, HANDLES, "a handle"))
    is_number = type(data) in (int, float) or (type(data) is dict and bool(data.keys() & {"c", "d"}))
    return number_from(data) if is_number else constant_from(data)


def _read_view(data: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    parts = as_list(data, 3, "a view")
    if len(parts) != 3:
        raise WireError("a view has an offset, a shape and a stride")
    shape, stride = (SIZES.read(part) for part in parts[1:])
    check_sizes(shape, stride, torch.uint8)  # checked again when the dtype is known
    return as_int(parts[0], 0, HANDLES, "an offset"), shape, stride


HANDLE = whole(0, HANDLES, "handle")
SIZES = wholes(LONGEST, RANK, "sizes")
ARGUMENT = Kind("argument", _read_argument, lambda arg: map_leaves(_write_argument, arg, list))
VIEW = Kind("offset, shape and stride", _read_view)


# --- bytes -----------------------------------------------------------------------------------------------------------


def _segment_at(position: Any, segments: Sequence[Buffer], longest: int) -> Buffer:
    found = segments[as_int(position, 0, len(segments) - 1, "a segment")]
    if memoryview(found).nbytes > longest:
        raise WireError(f"a segment has {memoryview(found).nbytes} bytes, and may have {longest}")
    return found


def segment(longest: int, what: str) -> SegmentKind:
    """Bytes in a segment of the message, of which the header has the position."""

    def write(value: Buffer, segments: list[Buffer]) -> int:
        segments.append(value)
        return len(segments) - 1

    return SegmentKind(
        f"segment with {what} (at most {longest} bytes)",
        lambda value, segments: _segment_at(value, segments, longest),
        write,
        lambda value: (value,),
    )


def segments(longest: int, what: str) -> SegmentKind:
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

    return SegmentKind(f"first segment and number of segments with {what}", read, write, lambda value: value)


# --- records ---------------------------------------------------------------------------------------------------------


class Record:
    """The codec of a class: a list of its fields, behind ``head``. Fields at the end that have their defaults are left
    out. ``check``, a method of the class, raises ``WireError`` for fields that do not belong together.

    ``sizes`` and ``buffers`` say by field how much of a message it takes: items of the header, and bytes in segments.
    """

    def __init__(self, cls: type[Any], *head: str) -> None:
        hints = get_type_hints(cls, include_extras=True)
        parameters = inspect.signature(cls).parameters.values()
        self.cls = cls
        self.fields: dict[str, Kind | SegmentKind] = {
            one.name: next(part for part in hints[one.name].__metadata__ if isinstance(part, (Kind, SegmentKind)))
            for one in parameters
        }
        kinds = list(self.fields.items())
        self.sizes = [(name, kind.size) for name, kind in kinds if isinstance(kind, Kind) and kind.size is not None]
        self.buffers = [(name, kind.buffers) for name, kind in kinds if isinstance(kind, SegmentKind)]
        self._head = head
        self._names = list(self.fields)
        self._kinds = list(self.fields.values())
        self._readers = [kind.read for kind in self.fields.values() if isinstance(kind, Kind)]
        self._writers = [(i, kind.write) for i, (_, kind) in enumerate(kinds) if isinstance(kind, Kind) and kind.write]
        self._segments = [(i, kind) for i, (_, kind) in enumerate(kinds) if isinstance(kind, SegmentKind)]
        self._defaults = [one.default for one in parameters if one.default is not one.empty][::-1]
        self._check: Callable[[Any], None] | None = getattr(cls, "check", None)

    def write(self, record: Any, segments: list[Buffer]) -> list[Any]:
        """A record as plain data. Bytes of tensors and of programs are added to ``segments``."""
        data = [getattr(record, name) for name in self._names]
        for default in self._defaults:
            if data[-1] != default:
                break
            data.pop()
        count = len(data)
        for index, write in self._writers:
            if index < count:
                data[index] = write(data[index])
        for index, kind in self._segments:
            if index < count:
                data[index] = kind.write(data[index], segments)
        return [*self._head, *data] if self._head else data

    def read(self, data: list[Any], segments: Sequence[Buffer]) -> Any:
        """The record of that data. Raises ``WireError``."""
        given = data[len(self._head) :]
        most = len(self._names)
        if not most - len(self._defaults) <= len(given) <= most:
            raise WireError(f"{self.cls.__name__} has {len(given)} fields")
        if self._segments:
            pairs = zip(self._kinds, given, strict=False)
            values = [kind.read(one) if isinstance(kind, Kind) else kind.read(one, segments) for kind, one in pairs]
        else:
            values = [read(one) for read, one in zip(self._readers, given, strict=False)]
        record = self.cls(*values)
        if self._check is not None:
            self._check(record)
        return record


def nested(cls: type[Any], what: str) -> Kind:
    """A record as a field of another one."""
    codec = Record(cls)
    return Kind(
        f"{what}: {', '.join(kind.says for kind in codec.fields.values())}",
        lambda value: codec.read(as_list(value, len(codec.fields), what), ()),
        lambda value: codec.write(value, []),
    )
