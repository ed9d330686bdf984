"""Streams and events of a device that runs everything in program order."""

from __future__ import annotations

import time
from typing import Any, Self

import torch

from marid.as_cuda.devices import OURS, index_of, ours
from marid.frontend import handles


class Stream(torch.Stream):
    """A stream of the device, which runs everything in program order."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return super().__new__(cls, torch.device(OURS, index_of(device)), priority=priority)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """All streams are equal."""
        return 0, 0

    def synchronize(self) -> None:
        """Run what is recorded on the device."""
        ours().synchronize(self.device_index)

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: program order holds already."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: program order holds already."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A moment in the device's work. One that takes the time runs what was recorded before it, so that it can."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed = enable_timing
        self._device: int | None = None
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._device = handles.current_device() if stream is None else stream.device_index
        if self._timed:
            ours().synchronize(self._device)
            self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for: program order holds already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._device is not None:
            ours().synchronize(self._device)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        if not (self._timed and end._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._device is None or end._device is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._seconds - self._seconds) * 1000
