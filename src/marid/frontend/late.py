"""What is imported late, when an operation first needs it: Ctrl-C waits until it is there.

A large package of which half has been imported cannot be imported again: Python keeps the modules that were complete,
and these refer to those that were not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from threading import get_ident, main_thread
from types import ModuleType

from marid.imports import on_import
from marid.uninterrupted import Uninterrupted

_WHOLE = {
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "sympy"),
    *("marid.remote.launch.connect", "marid.remote.client.parallel", "networkx", "rich.console"),
}


def find_whole() -> Callable[[], None]:
    """Have some packages imported as a whole, or not at all, whoever imports them. Returns what ends that."""
    loading: set[str] = set()

    def found(spec: ModuleSpec) -> None:
        if spec.name not in loading and get_ident() == main_thread().ident:  # where an interruption can come
            spec.loader = _Loader(loading)

    return on_import(_WHOLE, found)


class _Loader(Loader):
    """Imports a module a second time, without interruption, before the first one has begun to; and gives it that.

    So what comes after the import, in Python's own code, can be interrupted: the module is there by then.
    """

    def __init__(self, loading: set[str]) -> None:
        self._loading = loading
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._loading.add(spec.name)
        try:
            with Uninterrupted():
                module = importlib.import_module(spec.name)
                self.spec = module.__spec__
        finally:
            self._loading.discard(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
