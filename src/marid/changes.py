"""Ways to change an attribute of PyTorch or of the process, each of which returns what undoes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from marid.frontend import dynamo

Undo = Callable[[], None]


@dataclass(frozen=True)
class Change:
    """One change: of what, why, and in which versions of PyTorch that is there."""

    target: str
    why: str
    apply: Callable[[], Undo]
    versions: str = "2.11 to 2.13"


_ABSENT = object()


def found(target: str) -> tuple[Any, str] | None:
    """What has the attribute that ``target`` names, and its name there; None where this PyTorch has no such thing."""
    path, _, name = target.rpartition(".")
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            owner = getattr(owner, part, None)
        return (owner, name) if hasattr(owner, name) else None
    return None


def replace(target: str, make: Callable[[Any], Any]) -> Undo:
    """Put what ``make`` makes of an attribute in its place; nothing where this PyTorch has no such attribute."""
    place = found(target)
    return (lambda: None) if place is None else set_attribute(*place, dynamo.traced_as_before(getattr(*place), make))


def set_attribute(owner: Any, name: str, made: Any) -> Undo:
    """Set an attribute; the undo leaves what somebody else has set since."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, made)

    def undo() -> None:
        if vars(owner).get(name) is not made:
            return  # somebody has replaced ours, and calls it
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def replaced(target: str, why: str, make: Callable[[Any], Any], versions: str = "2.11 to 2.13") -> Change:
    """``replace``, as an entry of the table."""
    return Change(target, why, lambda: replace(target, make), versions)


def listed(target: str, why: str, item: Any) -> Change:
    """Append ``item`` to a list."""

    def apply() -> Undo:
        place = found(target)
        items = [] if place is None else getattr(*place)
        items.append(item)
        return lambda: items.remove(item) if item in items else None

    return Change(target, why, apply)


def entered(target: str, why: str, key: str, item: Any) -> Change:
    """Have ``item`` in a dictionary, at ``key``."""

    def apply() -> Undo:
        place = found(target)
        entries = {} if place is None else getattr(*place)
        before, entries[key] = entries.get(key, _ABSENT), item

        def undo() -> None:
            if before is _ABSENT:
                entries.pop(key, None)
            else:
                entries[key] = before

        return undo

    return Change(target, why, apply)


def all_or_nothing(applies: Iterator[Undo]) -> Undo:
    """Make several changes; those that were made are undone where one raises."""
    undos: list[Undo] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        undos.extend(applies)
    except BaseException:
        undo()
        raise
    return undo
