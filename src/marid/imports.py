"""Modules that are changed when somebody imports them, by one kind of finder in front of Python's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def on_import(names: Collection[str], found: Callable[[ModuleSpec], None]) -> Callable[[], None]:
    """Call ``found`` with the spec of each of these modules, before it is loaded. Returns what ends that."""
    finder = _Finder(names, found)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None


def after_loading(spec: ModuleSpec, act: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
    """Have ``act`` called when the module has been loaded, and ``before`` when that begins."""
    loader: Any = spec.loader
    load = loader.exec_module

    def load_and_act(module: ModuleType) -> None:
        before()
        load(module)
        act()

    loader.exec_module = load_and_act


def changed_when_imported(
    name: str, change: Callable[[], Callable[[], None]], before: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Change a module now or, where it is not there yet, when it has been imported; ``before`` is called when that
    begins. ``change`` returns what undoes it. Returns what ends all of it."""
    if name in sys.modules:
        return change()
    undo: list[Callable[[], None]] = []
    ended = False

    def loaded() -> None:  # twice where an import holds another one of the same module (frontend/late.py)
        watch_no_more()
        if not ended and not undo:
            undo.append(change())

    def end() -> None:
        nonlocal ended
        ended = True
        for each in (watch_no_more, *undo):
            each()

    watch_no_more = on_import({name}, lambda spec: after_loading(spec, loaded, before))
    return end


class _Finder(MetaPathFinder):
    """Finds what the finders behind it find."""

    def __init__(self, names: Collection[str], found: Callable[[ModuleSpec], None]) -> None:
        self._names, self._found = names, found

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for other in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find: Any = getattr(other, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._found(spec)
                return spec
        return None
