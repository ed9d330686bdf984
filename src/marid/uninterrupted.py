"""Bookkeeping that Ctrl-C must not split: what was sent is noted as sent, or was not sent."""

from __future__ import annotations

from _signal import SIGINT, getsignal, signal  # pyright: ignore[reportMissingImports]  # those of `signal` make enums
from threading import get_ident, main_thread
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which Ctrl-C waits until its end. Only for work that does not wait itself; may be nested."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if get_ident() == main_thread().ident:  # no other thread is interrupted
            handler = getsignal(SIGINT)
            if callable(handler):
                self._handler = handler
                signal(SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal(SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
