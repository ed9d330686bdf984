"""Which requests go together in one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from marid.remote.client.steps import Work
from marid.remote.wire.requests import record_of

__all__ = ["Message", "messages_of"]

_ITEMS = 12_000  # inputs and numbers; a header has a bound
_BYTES = 32 << 20  # in segments
_SEGMENTS = 200


class Message:
    """Requests that go together, and the steps that end among them, with their places."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.ends: list[tuple[int, Work]] = []
        self._items = self._bytes = self._segments = 0

    def has_room(self, request: Any) -> bool:
        """Whether a request fits in too; counts it as if it were added. One fits always."""
        record = record_of(request)
        self._items += record.size(request)
        for piece in record.buffers(request):
            self._segments += 1
            self._bytes += memoryview(piece).nbytes
        fits = self._items <= _ITEMS and self._segments <= _SEGMENTS and self._bytes <= _BYTES
        return fits or not self.requests


def messages_of(requests: Iterable[Any]) -> list[Message]:
    """As few messages as these fit into."""
    found = [Message()]
    for request in requests:
        if not found[-1].has_room(request):
            found.append(Message())
            found[-1].has_room(request)
        found[-1].requests.append(request)
    return found
