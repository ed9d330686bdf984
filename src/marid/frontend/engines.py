"""Which engine runs the programs of each device."""

from __future__ import annotations

from collections.abc import Iterable

from marid.engine.inprocess import InProcessEngine
from marid.engine.protocol import Engine
from marid.frontend import handles

__all__ = ["all_engines", "assign", "engine_of", "local_engine"]

local_engine = InProcessEngine()
"""The engine of this process, which all devices have unless they are given another one."""

_engines: list[Engine] = [local_engine] * handles.device_count


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
