"""How a request says that it has to wait for what others do."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Waits"]


class Waits(Exception):
    """A request is to be asked again when something ``is_over``; until then its session is set aside."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.is_over = is_over
