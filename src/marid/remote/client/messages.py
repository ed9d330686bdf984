"""Which requests go together in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from marid.remote.client.steps import Work
from marid.remote.wire.codec import Buffer
from marid.remote.wire.requests import Again, Chunk, Geometry, Have, Load, Program, Run, Upload

__all__ = ["Message", "messages_of"]

_ITEMS = 12_000  # inputs and numbers; a header has a bound
_DIGEST = 4  # items that are as long as a digest
_BYTES = 32 << 20  # in segments
_SEGMENTS = 200


_items: dict[type, Callable[[Any], int]] = {
    Run: lambda of: len(of.inputs) + len(of.params),
    Again: lambda of: len(of.inputs) + len(of.params),
    Upload: lambda of: _DIGEST * len(of.digests),
    Have: lambda of: _DIGEST * len(of.digests),
    Load: lambda of: _DIGEST * len(of.digests),
}
_pieces: dict[type, Callable[[Any], Sequence[Buffer]]] = {
    Upload: lambda of: of.data,
    Chunk: lambda of: (of.data,),
    Program: lambda of: (of.body,),
    Geometry: lambda of: (of.body,),
}


class Message:
    """Requests that go together, and the steps that end among them, with their places."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.ends: list[tuple[int, Work]] = []
        self._items = self._bytes = self._segments = 0

    def has_room(self, request: Any) -> bool:
        """Whether a request fits in too; counts it as if it were added. One fits always."""
        kind = type(request)
        self._items += 1 + (_items[kind](request) if kind in _items else 0)
        for piece in _pieces[kind](request) if kind in _pieces else ():
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
