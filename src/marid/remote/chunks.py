"""Large tensors by content: cut into chunks, each named by the BLAKE3 of all of its bytes, and kept by the worker.

A chunk that the worker has is not sent again, by this client or another one of the same owner. Owners do not see each
other's chunks: whether somebody else has sent certain bytes is nobody's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import blake3

from marid.errors import WireError

__all__ = ["CHUNK_BYTES", "ChunkStore", "chunks_of"]

CHUNK_BYTES = 4 << 20
"""The length of every chunk of a tensor but the last."""
_ENTRY = 128  # bytes that a chunk takes beside its own


def chunks_of(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The chunks of some bytes, in order: digest and bytes. Hashing releases the interpreter's lock."""
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        yield blake3.blake3(piece).digest(), piece


class ChunkStore:
    """The chunks that a worker keeps, at most ``limit`` bytes; the least recently used go first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = 0
        self._chunks: OrderedDict[tuple[bytes, bytes], Any] = OrderedDict()

    def put(self, owner: bytes, digest: bytes, data: Any) -> None:
        """Keep a chunk. Raises ``WireError`` when the digest is that of other bytes."""
        if blake3.blake3(data).digest() != digest:
            raise WireError("a chunk does not have the digest that it was sent with")
        key = (owner, digest)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return
        size = memoryview(data).nbytes + _ENTRY
        if size > self.limit:
            return
        self._chunks[key] = data
        self.nbytes += size
        while self.nbytes > self.limit:
            _, oldest = self._chunks.popitem(last=False)
            self.nbytes -= memoryview(oldest).nbytes + _ENTRY

    def get(self, owner: bytes, digest: bytes) -> Any:
        """The bytes of a chunk, or None."""
        found = self._chunks.get((owner, digest))
        if found is not None:
            self._chunks.move_to_end((owner, digest))
        return found

    def missing(self, owner: bytes, digests: tuple[bytes, ...]) -> list[int]:
        """The positions of the chunks that are not there; those that are count as used."""
        lacking = [index for index, digest in enumerate(digests) if self.get(owner, digest) is None]
        self.hits += len(digests) - len(lacking)
        return lacking

    def __len__(self) -> int:
        return len(self._chunks)
