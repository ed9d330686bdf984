"""Arguments of operators in the description of a part: written where parts are chosen, read by passes, and by the
process that compiles, which loads nothing else of the package.

They are no constants of programs as ``engine/plain.py`` writes them: each is a map, in which whole numbers may become
expressions (``describe.py``), and numbers may be compiled in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


def plain(number: Any) -> Any:
    """A number as data: floats as text, exact, also those that JSON does not know. Raises ``TypeError``."""
    if not isinstance(number, (int, float)):
        raise TypeError(f"{number!r} is no number that a part may have")
    return {"float": number.hex()} if isinstance(number, float) else number


def plain_constant(value: Any) -> Any:
    """Any other argument than a number as data. Raises ``TypeError``."""
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": name_of(value)}
    if value is not None and not isinstance(value, (bool, str)):
        raise TypeError(f"{value!r} is nothing that a part may have")
    return {"constant": value}


def name_of(value: torch.dtype | torch.memory_format) -> str:
    """The name that a type or a memory format has in a description."""
    return str(value).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The type of that name. Raises ``ValueError``."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type {name!r}")
    return found


def argument_of(
    data: dict[str, Any],
    tensor: Callable[[int], Any],
    number: Callable[[int], Any],
    whole: Callable[[Any], Any] = lambda given: given,
) -> Any:
    """An argument, with what these make of the slots, numbers and whole numbers in it."""

    def baked(given: Any) -> Any:
        return float.fromhex(given["float"]) if isinstance(given, dict) and "float" in given else whole(given)

    if "slot" in data:
        return tensor(data["slot"])
    if "list" in data:
        return [None if item is None else tensor(item["slot"]) for item in data["list"]]
    if "number" in data:
        return number(data["number"])
    if "numbers" in data:
        return list(map(number, data["numbers"]))
    if "baked" in data:
        given = data["baked"]
        return list(map(baked, given)) if isinstance(given, list) else baked(given)
    if "dtype" in data:
        return dtype_named(data["dtype"])
    return _FORMATS[data["memory_format"]] if "memory_format" in data else data["constant"]
