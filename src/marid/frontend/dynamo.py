"""``torch.compile`` beside Marid: Dynamo does not look into Marid's own functions.

A function under ``torch.compile`` that uses tensors of the device runs Marid within its frames; Dynamo, which takes
every frame it meets for the user's, would trace the engine too, and fail. It keeps a list of packages that are not to
be traced (``torch._dynamo.trace_rules``), to which Marid's are added as soon as there is one: importing Dynamo takes
half a second, which a program without ``torch.compile`` does not wait for.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_RULES = "torch._dynamo.trace_rules"
# The models of ``marid bench`` are compiled as a user's are; the hooks in ``semantics`` are traced, to nothing.
_TRACED = ("bench", "semantics")


def install() -> None:
    """Have Dynamo leave Marid's functions alone, now or when it is imported."""
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks on modules")
    rules = sys.modules.get(_RULES)
    if rules is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _add_to(rules)


def _add_to(rules: Any) -> None:
    for module in pkgutil.iter_modules([_PACKAGE]):
        if module.name not in _TRACED:
            rules.add(f"marid.{module.name}")


class _Finder(MetaPathFinder):
    """Finds nothing but ``torch._dynamo.trace_rules``, and that once, to add to it when it has been loaded."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                _add_to(module)

            spec.loader.exec_module = load_and_add
        return spec
