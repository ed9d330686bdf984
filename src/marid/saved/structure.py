"""Arguments and results of saved programs: tuples, lists and dicts of tensors, numbers and texts, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marid.engine.plain import as_list
from marid.errors import WireError
from marid.saved.json_text import number_from, number_to, parts_of

_DEPTH = 32
_ENTRIES = 1 << 16
_KINDS = ("tuple", "list", "dict")
Leaf = Callable[[Any, str], Any]
"""What becomes of a leaf: it is given the leaf, and where it is."""


def described(thing: Any, place: str, leaf: Leaf, depth: int = 0) -> Any:
    """The structure of ``thing`` as plain data, with what ``leaf`` makes of its leaves. Raises ``TypeError`` for what
    no file can have."""
    kind = type(thing)
    if depth > _DEPTH:
        raise TypeError(f"{place} is nested deeper than {_DEPTH}")
    if kind is tuple or kind is list:
        items = [described(item, f"{place}[{i}]", leaf, depth + 1) for i, item in enumerate(thing)]
        return {kind.__name__: items}
    if kind is dict:
        if not all(type(key) in (str, int, bool) for key in thing):
            raise TypeError(f"{place} is a dict with keys that are no texts or whole numbers")
        pairs = thing.items()
        return {"dict": [[key, described(item, f"{place}[{key!r}]", leaf, depth + 1)] for key, item in pairs]}
    return leaf(thing, place)


def value_to(thing: Any, place: str) -> Any:
    """A leaf that is no tensor. Raises ``TypeError``."""
    try:
        return {"value": number_to(thing)}
    except TypeError as error:
        raise TypeError(
            f"{place} is {error}: a file has tuples, lists, dicts, tensors, numbers, texts and None"
        ) from None


def rebuilt(data: Any, leaf: Callable[[dict[str, Any]], Any], depth: int = 0) -> Any:
    """What has the structure ``data``, with what ``leaf`` makes of its leaves. Raises ``WireError``."""
    if type(data) is not dict or depth > _DEPTH:
        raise WireError("a structure is malformed, or too deep")
    kind = next((kind for kind in _KINDS if kind in data), None)
    if kind is None:
        return leaf(data)
    items = as_list(data[kind], _ENTRIES, "a structure")
    if kind == "dict":
        found: dict[Any, Any] = {}
        for pair in items:
            key, item = parts_of(pair, 2, "an entry of a dict")
            if type(key) not in (str, int, bool) or key in found:
                raise WireError("a dict has a key that it cannot have, or twice")
            found[key] = rebuilt(item, leaf, depth + 1)
        return found
    made = [rebuilt(item, leaf, depth + 1) for item in items]
    return tuple(made) if kind == "tuple" else made


def fitted(thing: Any, expected: Any, place: str, leaf: Callable[[Any, Any, str], None]) -> None:
    """Call ``leaf`` with each leaf of ``thing``, its counterpart in ``expected``, and where it is. Raises ``TypeError``
    where the structures differ."""
    kind = type(expected)
    if kind not in (tuple, list, dict):
        leaf(thing, expected, place)
        return
    if type(thing) is not kind:
        raise TypeError(f"{place} is a {type(thing).__name__}, and the program was saved for a {kind.__name__}")
    if kind is dict:
        if thing.keys() != expected.keys():
            raise TypeError(f"{place} has the keys {list(thing)}, and the program was saved for {list(expected)}")
        for key, item in expected.items():
            fitted(thing[key], item, f"{place}[{key!r}]", leaf)
        return
    if len(thing) != len(expected):
        raise TypeError(f"{place} has {len(thing)} items, and the program was saved for {len(expected)}")
    for i, item in enumerate(expected):
        fitted(thing[i], item, f"{place}[{i}]", leaf)


def value_from(data: dict[str, Any]) -> Any:
    """The value of a leaf that is no tensor. Raises ``WireError``."""
    if data.keys() != {"value"}:
        raise WireError("a leaf of a structure is malformed")
    return number_from(data["value"])
