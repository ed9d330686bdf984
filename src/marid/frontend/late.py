"""What is imported late, when an operation first needs it: Ctrl-C waits until it is there, and Dynamo is not needed.

Meta kernels import sympy, and much else of PyTorch, when they are first called. A large package of which half has been
imported cannot be imported again: Python keeps the modules that were complete, and these refer to those that were not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident, main_thread
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch._compile import _disable_dynamo

from marid.uninterrupted import Uninterrupted

__all__ = ["DYNAMO", "find_whole", "other_spec", "require_dynamo", "spare_dynamo"]

DYNAMO = "torch._dynamo"
_WHOLE = {
    *(DYNAMO, "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "sympy"),
    *("marid.remote.connect", "marid.remote.parallel", "networkx", "rich.console"),
}


def find_whole() -> Callable[[], None]:
    """Have some packages imported as a whole, or not at all, whoever imports them. Returns what ends that."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None


class _Finder(MetaPathFinder):
    """Finds what others find, and lets it be imported without interruption where that can come: on the main thread."""

    def __init__(self) -> None:
        self.loading: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WHOLE or fullname in self.loading or get_ident() != main_thread().ident:
            return None
        spec = other_spec(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self)
        return spec


def other_spec(
    finder: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """What the finders after one of ours find."""
    for other in sys.meta_path[sys.meta_path.index(finder) + 1 :]:
        find: Any = getattr(other, "find_spec", None)
        spec = None if find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None


class _Loader(Loader):
    """Imports a module a second time, without interruption, before the first one has begun to; and gives it that.

    So what comes after the import, in Python's own code, can be interrupted: the module is there by then.
    """

    def __init__(self, finder: _Finder) -> None:
        self.finder = finder
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.finder.loading.add(spec.name)
        try:
            with Uninterrupted():
                module = importlib.import_module(spec.name)
                self.spec = module.__spec__
        finally:
            self.finder.loading.discard(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


# --- Dynamo ----------------------------------------------------------------------------------------------------------

# PyTorch's reference implementations, which its meta kernels call, are not to be traced: `_disable_dynamo` imports
# Dynamo to tell it so. What is kept under this name it calls instead.
_KEPT = "__dynamo_disable"
_REFERENCES = ("torch._decomp", "torch._meta_registrations", "torch._prims", "torch._refs")
_DISABLING = _disable_dynamo(lambda: None).__code__  # pyright: ignore[reportFunctionMemberAccess]

_spared: list[Any] | None = None


def spare_dynamo() -> None:
    """Let PyTorch's meta kernels run without Dynamo, until that is imported; once per process."""
    global _spared
    if _spared is None:
        with Uninterrupted():
            disabling = _disabling() if DYNAMO not in sys.modules else []
            _spared = [kept for kept in disabling if not hasattr(kept, _KEPT)]
            for kept in _spared:
                setattr(kept, _KEPT, kept)


def require_dynamo(for_good: bool = True) -> None:
    """Dynamo is about to be imported (``for_good``), or may be, and can be told what not to trace."""
    global _spared
    with Uninterrupted():
        spared, _spared = _spared or [], [] if for_good else None
        for kept in spared:
            delattr(kept, _KEPT)


def _disabling() -> list[Any]:
    """The reference implementations that are not to be traced."""
    found: dict[int, Any] = {}
    pending = [
        thing
        for name, module in list(sys.modules.items())
        if name.startswith(_REFERENCES)
        for thing in vars(module).values()
    ]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if type(function) is FunctionType and id(function) not in seen:
            seen.add(id(function))
            inside = [_contents(cell) for cell in function.__closure__ or ()]
            if function.__code__ is _DISABLING:
                kept: Any = inside[_DISABLING.co_freevars.index("fn")]
                found[id(kept)] = kept
            pending += inside
    return list(found.values())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
