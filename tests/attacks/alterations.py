"""One thing at a time that should not be in a call, for ``forge.py``: every argument, every size, every element."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["each_alteration", "other_tensors"]

_NUMBERS = (0, 1, -1, 2, 7, 1000, -5000, 1 << 31, 1 << 62, -(1 << 63))
_FLOATS = (0.0, -1.0, math.nan, math.inf, 1e30)
_STRANGE = ("nan", "inf", "-inf", "-1.0", "1.5", "1e30", "-1e30", "2147483520.0")
_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "complex64", "bfloat16")
_LARGEST = 20_000

Place = tuple[Any, Any]


def each_alteration(call: Any, fixed: set[Any]) -> Iterator[Any]:
    """Calls that differ from a valid one in one thing, or in one thing for all tensors but one. ``fixed`` has the
    positions and names of arguments that a worker reads as what they are."""
    made = json.loads(json.dumps(call))
    places = [place for place in _places(made) if place[1] not in fixed or place[0] not in (made[0], made[1])]
    for holder, key in places:
        valid = holder[key]
        for other in _others(valid):
            holder[key] = other
            yield json.loads(json.dumps(made))
        holder[key] = valid
    tensors = [(holder, key) for holder, key in places if type(holder[key]) is dict and "T" in holder[key]]
    if len(tensors) > 1:
        yield from _together(made, tensors)


def _places(call: Any) -> Iterator[Place]:
    def walk(holder: Any, key: Any) -> Iterator[Place]:
        yield holder, key
        if type(holder[key]) is list:
            for index in range(len(holder[key])):
                yield from walk(holder[key], index)

    for index in range(len(call[0])):
        yield from walk(call[0], index)
    for name in call[1]:
        yield from walk(call[1], name)


def _others(item: Any) -> Iterator[Any]:
    if type(item) is bool:
        yield not item
    elif type(item) is int:
        yield from {*_NUMBERS, item + 1, item - 1, item * 2, -item} - {item}
    elif type(item) is list:
        yield []
        if item:
            yield item[:-1]
            yield [*item, item[-1]]
    elif item is None:
        yield from (0, 1, {"T": "float32", "s": [3], "d": None}, {"T": "int64", "s": [2], "d": None})
    elif type(item) is dict and "f" in item:
        yield from ({"f": value.hex()} for value in _FLOATS)
    elif type(item) is dict and "T" in item:
        yield None
        yield from other_tensors(item)


def other_tensors(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tensor with another shape, type, layout in memory, or with strange numbers in it."""
    shape = item["s"]
    shapes = [[0] * len(shape), [1] * len(shape), [], shape[1:], shape[:-1], [*shape, 2], [1, *shape]]
    for index, size in enumerate(shape):
        shapes += [[*shape[:index], other, *shape[index + 1 :]] for other in (0, 1, size + 1, size - 1, size * 3)]
    yield from (_shaped(item, other) for other in shapes if other != shape and min(other, default=0) >= 0)
    yield from ({**_plain(item), "T": dtype} for dtype in _DTYPES if dtype != item["T"])
    yield {**_plain(item), "e": True}
    yield {**item, "l": "reversed"}
    yield {**item, "l": "every second"}
    yield from ({**item, "l": f"repeated {place}"} for place in range(len(shape)))
    if item["T"] in ("float32", "float64"):
        yield from ({**item, "at": [place, float(text).hex()]} for place in ("last", "all") for text in _STRANGE)
    if "v" in item:
        numbers = {*_NUMBERS, *shape, -math.prod(shape) - 1}
        yield from ({**item, "at": [place, number]} for place in ("first", "last", "all") for number in numbers)


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    return {"T": item["T"], "s": item["s"], "d": None}


def _shaped(item: dict[str, Any], shape: list[int]) -> dict[str, Any]:
    return {**_plain(item), "s": shape} if math.prod(shape) <= _LARGEST else item


def _together(call: Any, tensors: list[Place]) -> Iterator[Any]:
    """All tensors but one, or all, get another size at one place, another rank or another type."""
    valid = [holder[key] for holder, key in tensors]
    longest = max(len(one["s"]) for one in valid)
    changes: list[Any] = [lambda one, t=dtype: {**_plain(one), "T": t} for dtype in ("float64", "int64", "bfloat16")]
    changes += [lambda one: _shaped(one, [1, *one["s"]]), lambda one: _shaped(one, [*one["s"], 1])]
    for place in range(-longest, longest):
        for amount in (0, 3):

            def resized(one: Any, place: int = place, amount: int = amount) -> Any:
                shape = list(one["s"])
                if not -len(shape) <= place < len(shape):
                    return one
                shape[place] *= amount
                return _shaped(one, shape)

            changes.append(resized)
    for change in changes:
        for spared in range(-1, len(tensors)):
            for index, (holder, key) in enumerate(tensors):
                holder[key] = valid[index] if index == spared else change(valid[index])
            yield json.loads(json.dumps(call))
    for (holder, key), one in zip(tensors, valid, strict=True):
        holder[key] = one
