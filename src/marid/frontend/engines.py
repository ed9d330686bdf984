"""Which engine runs the programs of each device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from marid.engine.inprocess import InProcessEngine
from marid.engine.protocol import Engine
from marid.engine.spilling import SpillingEngine
from marid.errors import LazyTensorError
from marid.frontend import handles
from marid.graph.node import Value
from marid.settings import settings


def _local_engine() -> InProcessEngine:
    if settings.engine == "cpu":
        return SpillingEngine(_local_values)
    from marid.engine.accelerated import AcceleratedEngine

    return AcceleratedEngine(torch.device(settings.engine))


def _local_values() -> list[Value]:
    """Values of the engine of this process that hold memory."""
    own = [index for index, engine in enumerate(_engines) if engine is local_engine]
    return [value for index in own for value in handles.tape(index).resident_values()]


local_engine = _local_engine()
"""The engine of this process, which all devices have unless they are given another one."""

_engines: list[Engine] = [local_engine] * handles.device_count


class _LeftBehind:
    """What a forked child has in place of its parent's connections."""

    name = "connection of the parent process"
    runs_ahead = False
    elsewhere = True
    local = False
    spilled = 0

    def wait(self, values: Sequence[Value] | None = None, need: str = "run") -> bool:  # noqa: ARG002
        """Nothing runs here."""
        return False if values is None else self._refuse()

    def has(self, value: Value) -> bool:  # noqa: ARG002
        """The parent has what there is."""
        return False

    def memory(self, buffer: Any) -> tuple[int, int]:  # noqa: ARG002
        """None of this process's."""
        return 0, 0

    def nothing(self, *_: Any) -> None:
        """For what is no use of the device."""

    settle = trim = forget = mark = worker_stats = nothing

    def compiling(self) -> int:
        """Nor is anything compiled."""
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise LazyTensorError(
            f"this process is a fork of one that was connected to workers, and {handles.DEVICE_TYPE} tensors of theirs "
            "belong to that one: start processes with spawn, connect in each, or use a device that is not connected"
        )


def _in_child() -> None:
    left: Any = _LeftBehind()
    _engines[:] = [engine if engine is local_engine else left for engine in _engines]


os.register_at_fork(after_in_child=_in_child)


def engine_of(device: int) -> Engine:
    """The engine of a device."""
    return _engines[device]


def all_engines() -> list[Engine]:
    """Each engine that some device has, once."""
    return list({id(engine): engine for engine in _engines}.values())


def assign(engines: Iterable[tuple[int, Engine]]) -> None:
    """Give devices other engines. No value of theirs may be alive."""
    for device, engine in engines:
        _engines[device] = engine
