"""Marid: a lazy tensor engine for PyTorch.

Importing it gives PyTorch the device ``remote_accelerator``: operations on it are recorded, and run as one program when
a value is read. Nothing else of PyTorch or of the process changes before the device is first used (``guest.py``).
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from marid import registration

if TYPE_CHECKING:
    from marid.frontend.quantize import quantize
    from marid.placement.place import Placement, place
    from marid.saved.loaded import SavedProgram, load_program
    from marid.saved.writing import save_program

registration.register()
_collects = gc.isenabled()
gc.disable()  # or it looks through all that PyTorch has loaded because these files make so many objects
try:
    from marid import errors
    from marid.api import (
        clear_caches,
        epoch,
        explain,
        graph,
        mark,
        materialize,
        on_build,
        on_materialize,
        on_record,
        on_run,
        programs,
        reset_stats,
        stats,
    )
    from marid.execute.compiled.passes.registry import register_pass, unregister_pass
    from marid.frontend.capture import capture
    from marid.frontend.defaults import default_device, default_dtype
    from marid.frontend.materialize import no_sync
    from marid.frontend.tensor import LazyTensor
    from marid.frontend.tuples import LazyTuple
    from marid.frontend.waits import Wait, would_sync
    from marid.frontend.weights import load_file
    from marid.graph.computation import ComputationGraph
    from marid.guest import uninstall
    from marid.replay.compile import compile
    from marid.replay.dynamic import mark_dynamic
    from marid.report.document import report
    from marid.report.explain import Explanation
    from marid.report.nans import FirstNan, first_nan
    from marid.report.stats import FunctionStats, Stats
    from marid.report.tracing import trace
    from marid.report.traffic import RemoteStats, budget
    from marid.semantics.analyzer import register_enricher, unregister_enricher
    from marid.semantics.metadata import SemanticMetadata
    from marid.semantics.scopes import phase
    from marid.semantics.user_patterns import register_pattern, unregister_pattern
    from marid.settings import Settings, settings
except ImportError as error:
    from marid import environment

    if not environment.is_asked_for():  # `marid env` says what is missing
        raise
    _problem: str | None = str(error)
else:
    _problem = None
finally:
    if _collects:
        gc.enable()
        gc.collect(1)  # of these alone, and not in the middle of the first operation


_LATE = {
    "Placement": "placement.place",
    "SavedProgram": "saved.loaded",
    "load_program": "saved.loaded",
    "place": "placement.place",
    "quantize": "frontend.quantize",
    "save_program": "saved.writing",
}


def __getattr__(name: str) -> Any:
    """What few programs need is imported with its first use."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"marid.{_LATE[name]}"), name)
    return found


def connect(*args: Any, **kwargs: Any) -> None:
    """Let workers be devices; see ``marid.remote.launch.connect``, which needs the extra ``remote``."""
    from marid.remote.launch.connect import connect

    connect(*args, **kwargs)


def disconnect(*indices: int, force: bool = False) -> None:
    """Let devices be this process again; see ``marid.remote.launch.connect``."""
    from marid.remote.launch.connect import disconnect

    disconnect(*indices, force=force)


def process_group(devices: Any, *, timeout: int = 60) -> Any:
    """Devices that are workers, and reduce together; see ``marid.remote.client.parallel``."""
    from marid.remote.client.parallel import process_group

    return process_group(devices, timeout=timeout)


def all_reduce(tensors: Any, op: str = "sum", *, group: Any) -> Any:
    """What tensors on the members of a process group are together, on each; see ``marid.remote.client.parallel``."""
    from marid.remote.client.parallel import all_reduce

    return all_reduce(tensors, op, group=group)


__version__ = "0.1.0"

__all__ = [
    "ComputationGraph",
    "Explanation",
    "FirstNan",
    "FunctionStats",
    "LazyTensor",
    "LazyTuple",
    "Placement",
    "RemoteStats",
    "SavedProgram",
    "SemanticMetadata",
    "Settings",
    "Stats",
    "Wait",
    "all_reduce",
    "budget",
    "capture",
    "clear_caches",
    "compile",
    "connect",
    "default_device",
    "default_dtype",
    "disconnect",
    "epoch",
    "errors",
    "explain",
    "first_nan",
    "graph",
    "load_file",
    "load_program",
    "mark",
    "mark_dynamic",
    "materialize",
    "no_sync",
    "on_build",
    "on_materialize",
    "on_record",
    "on_run",
    "phase",
    "place",
    "process_group",
    "programs",
    "quantize",
    "register_enricher",
    "register_pass",
    "register_pattern",
    "report",
    "reset_stats",
    "save_program",
    "settings",
    "stats",
    "trace",
    "uninstall",
    "unregister_enricher",
    "unregister_pass",
    "unregister_pattern",
    "would_sync",
]
