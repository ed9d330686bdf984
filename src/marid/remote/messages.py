"""Which requests go together in one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from marid.remote.requests import Again, Chunk, Geometry, Have, Load, Program, Run, Upload
from marid.remote.work import Work

__all__ = ["Message", "messages_of"]

_ITEMS = 12_000  # inputs and numbers; a header has a bound
_DIGEST = 4  # items that are as long as a digest
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
        pieces: tuple[Any, ...] = ()
        items = 1
        if isinstance(request, (Run, Again)):
            items += len(request.inputs) + len(request.params)
        elif isinstance(request, Upload):
            pieces = request.data
            items += _DIGEST * len(request.digests)
        elif isinstance(request, (Have, Load)):
            items += _DIGEST * len(request.digests)
        elif isinstance(request, Chunk):
            pieces = (request.data,)
        elif isinstance(request, (Program, Geometry)):
            pieces = (request.body,)
        self._items += items
        self._segments += len(pieces)
        self._bytes += sum(memoryview(piece).nbytes for piece in pieces)
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
