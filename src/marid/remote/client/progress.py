"""A progress bar for long uploads, where somebody looks at a terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from marid.settings import settings

__all__ = ["UploadProgress"]

_BYTES = 64 << 20  # fewer are not worth a bar
_DELAY = 1.0  # seconds that uploads take before there is one
_EVERY = 0.1  # seconds between drawings


class UploadProgress:
    """What one device uploads: a bar from when that takes long until nothing is left.

    ``name`` says whose it is. Nothing is shown unless standard error is a terminal and ``settings.progress`` holds.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._total = self._done = 0
        self._started = 0.0
        self._shown = 0.0
        self._bar: Progress | None = None

    def add(self, nbytes: int) -> None:
        """So many bytes are to be uploaded."""
        if not self._total:
            self._started = time.monotonic()
        self._total += nbytes
        self._show()

    def done(self, nbytes: int) -> None:
        """So many bytes have arrived, or were there."""
        self._done += nbytes
        self._show()
        if self._done >= self._total:
            self.end()

    def end(self) -> None:
        """Nothing more is to be uploaded."""
        self._total = self._done = 0
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        if self._bar is None:
            if self._total < _BYTES or time.monotonic() - self._started < _DELAY:
                return
            if not settings.progress or not sys.stderr.isatty():
                return
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            console = Console(stderr=True)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
            self._bar.add_task(f"upload to {self._name}", total=None)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], total=self._total, completed=self._done)
        if time.monotonic() - self._shown > _EVERY:
            self._shown = time.monotonic()
            self._bar.refresh()
