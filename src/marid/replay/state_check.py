"""Whether the Python state that a function can reach is what it was: asked at each replay, so it has to be cheap.

The objects in all containers are listed by a few calls into C and compared by identity. Only where that finds a
difference are they looked at: a number that was computed again and is equal is no change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LRScheduler

from marid.native import module
from marid.replay.reachable import LONG, MISSING, Reached, is_plain


def same_number(one: Any, other: Any) -> bool:
    """Equality of plain things that tells 1 from 1.0 and True, 0.0 from -0.0, and takes NaN for itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_number(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):  # a class of one's own may print it otherwise
        return float.__repr__(one) == float.__repr__(other)
    return repr(one) == repr(other) if isinstance(one, (complex, range)) else bool(one == other)


def _bytes(array: np.ndarray[Any, Any]) -> bytes:
    content = np.ndarray.tobytes(array)  # masked arrays have a method that writes to them
    return content + np.ma.getmaskarray(array).tobytes() if isinstance(array, np.ma.MaskedArray) else content


@dataclass(frozen=True)
class Place:
    """An entry of a dict or a list, a global, or a variable of a closure: the object ``index`` of a snapshot. Places of
    two recordings are equal where they have one ``path``."""

    container: dict[Any, Any] | list[Any] | CellType = field(compare=False)
    key: Any = field(compare=False)
    index: int = field(compare=False)
    path: str

    def get(self) -> Any:
        """What is in it; ``MISSING`` where nothing is."""
        if isinstance(self.container, CellType):
            return _content(self.container)
        if isinstance(self.container, dict):
            return self.container.get(self.key, MISSING)
        return self.container[self.key] if self.key < len(self.container) else MISSING

    def set(self, thing: Any) -> None:
        """Put ``thing`` there."""
        if isinstance(self.container, CellType):
            self.container.cell_contents = thing
        else:
            self.container[self.key] = thing


class Snapshot:
    """The state at one moment, but for the learning rates of the groups of parameters ``rated``, and for what the
    ``schedules`` count. Holds on to it, so that identities stay unique."""

    def __init__(self, reached: Reached, rated: list[dict[str, Any]], schedules: list[LRScheduler]) -> None:
        self._reached = reached
        dicts = [one for _, one in reached.dicts]
        lists = [one for _, one in reached.lists]
        self._dicts = [one for one in dicts if 0 < len(one) <= LONG]
        self._lists = [one for one in lists if 0 < len(one) <= LONG]
        self._empty = [one for one in (*dicts, *lists) if not one]
        long = [(path, one) for path, one in (*reached.dicts, *reached.lists) if len(one) > LONG]
        self._counted = [(path, one, len(one)) for path, one in (*long, *reached.classes)]
        self._names = [(scope, name) for _, scope, names in reached.names for name in names]
        self._cells = [cell for _, cell in reached.cells]
        self._instances = [one for _, one in reached.instances]
        self._arrays = [(one, one.shape, one.dtype, _bytes(one)) for _, one in reached.arrays]
        groups, counts = set(map(id, rated)), {id(schedule.__dict__) for schedule in schedules}
        keys = enumerate((id(one), key) for one in self._dicts for key in one)
        free = (index for index, (one, key) in keys if one in counts or (one in groups and key == "lr"))
        self._free = tuple(free)
        self._kept = list(self._objects())

    def _objects(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(dict.keys, self._dicts)),
            chain.from_iterable(self._lists),
            [_named(scope, name) for scope, name in self._names],
            [_content(cell) for cell in self._cells],
            map(type, self._instances),
        )

    def _now(self) -> list[Any]:
        """The objects, with those that are not compared as they were."""
        now = list(self._objects())
        if len(now) == len(self._kept):
            for index in self._free:
                now[index] = self._kept[index]
        return now

    def change(self) -> str | None:
        """What is not as it was, in words."""
        if any(self._empty):
            return self._what_changed()
        if not self._is_same():
            now = self._now()
            if len(now) != len(self._kept) or not all(map(_unchanged, self._kept, now)):
                return self._what_changed()
            self._kept = now
        for path, one, length in self._counted:
            if len(one) != length:
                return f"{path} had {length} entries and has {len(one)}"
        for (path, _), (one, shape, dtype, content) in zip(self._reached.arrays, self._arrays, strict=True):
            if one.shape != shape or one.dtype != dtype or _bytes(one) != content:
                return f"the array {path} changed"
        return None

    def _is_same(self) -> bool:
        """Whether all objects are those that were there."""
        containers = self._dicts, self._lists, self._names, self._cells, self._instances
        return module.same_objects(*containers, self._kept, self._free, MISSING)

    def differences(self) -> list[tuple[int, Any, Any]]:
        """The objects that are others now: position, before and now. None of them where there are more or fewer."""
        now = self._now()
        if len(now) != len(self._kept):
            return []
        pairs = enumerate(zip(self._kept, now, strict=True))
        return [(index, before, after) for index, (before, after) in pairs if not _unchanged(before, after)]

    def expect(self, index: int, thing: Any) -> None:
        """From now on, ``thing`` is what is to be at that position."""
        self._kept[index] = thing

    def is_once(self, thing: Any) -> bool:
        """Whether one of the objects is ``thing``, and only one."""
        return sum(one is thing for one in self._kept) == 1

    def place(self, index: int) -> Place | None:
        """Where the object at a position is kept, if something else can be put there."""
        found = next(item for position, item in enumerate(self._places()) if position == index)
        return None if found is None else Place(*found, index, self._path(index))

    def _places(self) -> Iterator[tuple[Any, Any] | None]:
        for one in self._dicts:
            yield from ((one, key) if type(one) in (dict, OrderedDict) else None for key in one)
        for one in self._dicts:
            yield from (None for _ in one)
        for one in self._lists:
            yield from ((one, position) if type(one) is list else None for position in range(len(one)))
        yield from ((scope, name) if type(scope) is dict else None for scope, name in self._names)
        yield from ((cell, None) for cell in self._cells)
        yield from (None for _ in self._instances)

    def _what_changed(self) -> str:
        for path, one in (*self._reached.dicts, *self._reached.lists):
            if any(one is empty for empty in self._empty) and one:
                return f"{path} was empty and has {len(one)} entries"
        now = self._now()
        for index, (a, b) in enumerate(zip(self._kept, now, strict=False)):
            if not _unchanged(a, b):
                return f"{self._path(index)}: {_shown(a)} -> {_shown(b)}"
        return "a container has entries more or fewer"

    def _path(self, index: int) -> str:
        """The name of the place behind one of ``_objects``."""
        names = {id(one): path for path, one in (*self._reached.dicts, *self._reached.lists)}
        places: list[str] = []
        for one in self._dicts:
            places += [f"{names[id(one)]}[{key!r}]" if is_plain(key) else f"{names[id(one)]}[...]" for key in one]
        for one in self._dicts:
            places += [f"the keys of {names[id(one)]}"] * len(one)
        for one in self._lists:
            places += [f"{names[id(one)]}[{position}]" for position in range(len(one))]
        places += [name for _, name in self._names]
        places += [name for name, _ in self._reached.cells]
        places += [f"the class of {path}" for path, _ in self._reached.instances]
        return places[index] if index < len(places) else "a container"


def _named(scope: Any, name: str) -> Any:
    return getattr(scope, name) if isinstance(scope, FunctionType) else scope.get(name, MISSING)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _unchanged(one: Any, other: Any) -> bool:
    return one is other or (is_plain(one) and same_number(one, other))


def _shown(thing: Any) -> str:
    if thing is MISSING:
        return "nothing"
    return repr(thing) if is_plain(thing) else f"a {type(thing).__name__}"
