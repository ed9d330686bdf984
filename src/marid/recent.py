"""Mappings that keep what was used last."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most so many entries; the least recently used one, which is the first, makes room for a new one."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def used(self, key: K) -> V | None:
        """What is kept under a key, which counts as a use; None where nothing is."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> tuple[K, V] | None:
        """Keep something, as used last; the entry that made room for it, if one had to."""
        self[key] = value
        self.move_to_end(key)
        return self.popitem(last=False) if len(self) > self._most else None
