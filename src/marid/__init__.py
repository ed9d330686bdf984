"""Marid: a lazy tensor engine for PyTorch.

Importing it gives PyTorch the device ``remote_accelerator``: operations on it are recorded, and run as one program when
a value is read.
"""

from __future__ import annotations

from typing import Any

from marid import errors
from marid.frontend import device as _device
from marid.frontend import linear_activation as _linear_activation

_device.register()
_linear_activation.register()

from marid.api import epoch, explain, graph, mark, materialize, reset_stats, stats  # noqa: E402  (the device comes first)
from marid.frontend.capture import capture  # noqa: E402
from marid.frontend.materialize import no_sync  # noqa: E402
from marid.frontend.tensor import LazyTensor  # noqa: E402
from marid.frontend.tuples import LazyTuple  # noqa: E402
from marid.frontend.weights import load_file  # noqa: E402
from marid.graph.computation import ComputationGraph  # noqa: E402
from marid.optimize.passes.registry import register_pass, unregister_pass  # noqa: E402
from marid.replay.dynamic import mark_dynamic  # noqa: E402
from marid.replay.function import compile  # noqa: E402
from marid.report.explain import Explanation  # noqa: E402
from marid.report.stats import FunctionStats, Stats  # noqa: E402
from marid.report.traffic import RemoteStats, budget  # noqa: E402
from marid.semantics.metadata import SemanticMetadata  # noqa: E402
from marid.semantics.scopes import phase  # noqa: E402
from marid.settings import Settings, settings  # noqa: E402


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
    "unregister_pass",
]
