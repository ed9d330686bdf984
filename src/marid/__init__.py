"""Marid: a lazy tensor engine for PyTorch.

Importing it gives PyTorch the device ``remote_accelerator``: operations on it are recorded, and run as one program when
a value is read. That is all it does: the rest is loaded when the device, or one of the names below, is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from marid import registration as _registration
from marid.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from marid import errors
    from marid.api import epoch, explain, graph, mark, materialize, reset_stats, stats
    from marid.frontend.capture import capture
    from marid.frontend.materialize import no_sync
    from marid.frontend.tensor import LazyTensor
    from marid.frontend.tuples import LazyTuple
    from marid.frontend.weights import load_file
    from marid.graph.computation import ComputationGraph
    from marid.guest import uninstall
    from marid.optimize.passes.registry import register_pass, unregister_pass
    from marid.replay.dynamic import mark_dynamic
    from marid.replay.function import compile
    from marid.report.explain import Explanation
    from marid.report.stats import FunctionStats, Stats
    from marid.report.traffic import RemoteStats, budget
    from marid.semantics.metadata import SemanticMetadata
    from marid.semantics.scopes import phase
    from marid.settings import Settings, settings

_WHERE = {
    **dict.fromkeys(("epoch", "explain", "graph", "mark", "materialize", "reset_stats", "stats"), "api"),
    "capture": "frontend.capture",
    "no_sync": "frontend.materialize",
    "LazyTensor": "frontend.tensor",
    "LazyTuple": "frontend.tuples",
    "load_file": "frontend.weights",
    "ComputationGraph": "graph.computation",
    "uninstall": "guest",
    "register_pass": "optimize.passes.registry",
    "unregister_pass": "optimize.passes.registry",
    "mark_dynamic": "replay.dynamic",
    "compile": "replay.function",
    "Explanation": "report.explain",
    "FunctionStats": "report.stats",
    "Stats": "report.stats",
    "RemoteStats": "report.traffic",
    "budget": "report.traffic",
    "SemanticMetadata": "semantics.metadata",
    "phase": "semantics.scopes",
    "Settings": "settings",
    "settings": "settings",
}


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _WHERE and (name.startswith("_") or find_spec(f"marid.{name}") is None):
            raise AttributeError(f"module 'marid' has no attribute {name!r}")
        with Uninterrupted():  # a package of which half was imported cannot be imported again
            found: Any = importlib.import_module(f"marid.{_WHERE.get(name, name)}")
        if name in _WHERE:
            found = self.__dict__[name] = getattr(found, name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # Python makes a subpackage an attribute when it is imported: `graph` and `settings` are something else here.
        if name not in _WHERE or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


def connect(*args: Any, **kwargs: Any) -> None:
    """Let workers be devices; see ``marid.remote.connect``, which needs the extra ``remote``."""
    from marid.remote.connect import connect

    connect(*args, **kwargs)


def disconnect(*indices: int) -> None:
    """Let devices be this process again; see ``marid.remote.connect``."""
    from marid.remote.connect import disconnect

    disconnect(*indices)


def process_group(devices: Any, *, timeout: int = 60) -> Any:
    """Devices that are workers, and reduce together; see ``marid.remote.parallel``."""
    from marid.remote.parallel import process_group

    return process_group(devices, timeout=timeout)


def all_reduce(tensors: Any, op: str = "sum", *, group: Any) -> Any:
    """What tensors on the members of a process group are together, on each; see ``marid.remote.parallel``."""
    from marid.remote.parallel import all_reduce

    return all_reduce(tensors, op, group=group)


__version__ = "0.1.0"

__all__ = [
    "ComputationGraph",
    "Explanation",
    "FunctionStats",
    "LazyTensor",
    "LazyTuple",
    "RemoteStats",
    "SemanticMetadata",
    "Settings",
    "Stats",
    "all_reduce",
    "budget",
    "capture",
    "compile",
    "connect",
    "disconnect",
    "epoch",
    "errors",
    "explain",
    "graph",
    "load_file",
    "mark",
    "mark_dynamic",
    "materialize",
    "no_sync",
    "phase",
    "process_group",
    "register_pass",
    "reset_stats",
    "settings",
    "stats",
    "uninstall",
    "unregister_pass",
]

sys.modules[__name__].__class__ = _Package
sys.modules[__name__].__dict__.pop("settings", None)  # the submodule, which registration has imported
_registration.register()
