"""The chunks of uploads that a worker keeps.

A chunk that the worker has is not sent again, by this client or another one of the same owner. Owners do not see each
other's chunks: whether somebody else has sent certain bytes is nobody's business.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import blake3
import torch

from marid.errors import WireError
from marid.remote.wire.tensors import file_pieces

_LEAST = 64 << 10  # bytes of a piece that is looked for in a file
_ENTRY = 1024  # bytes that a chunk takes beside its own, about


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory of a tensor that was made of chunks, which are kept there as long as nobody writes it."""

    storage: torch.UntypedStorage
    keys: list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where in it a chunk lies."""

    memory: _Memory
    start: int
    size: int

    def read(self, digest: bytes) -> memoryview | None:
        """Its bytes if they are still there."""
        storage = self.memory.storage
        if storage.nbytes() < self.start + self.size:
            return None
        array = (ctypes.c_char * self.size).from_address(storage.data_ptr() + self.start)
        array.storage = storage  # pyright: ignore[reportAttributeAccessIssue]  # which lives as long as the view
        data = memoryview(array).cast("B")
        return data if blake3.blake3(data).digest() == digest else None


class ChunkStore:
    """The chunks that a worker keeps, at most ``limit`` bytes; the least recently used go first. What became a tensor
    of the host stays in its memory, and is not kept twice."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = 0
        self._chunks: OrderedDict[tuple[bytes, bytes], Any] = OrderedDict()

    def capacity_for(self, count: int) -> int:
        """The bytes that so many chunks may have together to be there at once."""
        return self.limit - count * _ENTRY

    def put(self, owner: bytes, digest: bytes, data: Any) -> None:
        """Keep a chunk. Raises ``WireError`` when the digest is that of other bytes."""
        if blake3.blake3(data).digest() != digest:
            raise WireError("a chunk does not have the digest that it was sent with")
        key = (owner, digest)
        size = _size(data) + _ENTRY
        if size > self.limit or self.get(owner, digest) is not None:
            return
        self._chunks[key] = data
        self.nbytes += size
        while self.nbytes > self.limit:
            self._drop(next(iter(self._chunks)))

    def adopt(self, owner: bytes, digests: tuple[bytes, ...], storage: torch.UntypedStorage) -> None:
        """These chunks are all that lies in this memory of the host now, one after the other. They stay there, unless
        some stay elsewhere or twice: memory is kept for what is counted only."""
        memory = _Memory(storage, [(owner, digest) for digest in digests])
        chunks = [self._chunks[key] for key in memory.keys]
        if len(set(digests)) != len(digests) or any(isinstance(chunk, _Slice) for chunk in chunks):
            return
        start = 0
        for key, chunk in zip(memory.keys, chunks, strict=True):
            self._chunks[key] = _Slice(memory, start, _size(chunk))
            start += _size(chunk)

    def get(self, owner: bytes, digest: bytes) -> Any:
        """The bytes of a chunk, or None. To be used before anything else is done with tensors."""
        key = (owner, digest)
        found = self._chunks.get(key)
        if isinstance(found, _Slice):
            found = found.read(digest)
            if found is None:
                self._drop(key)
        if found is not None:
            self._chunks.move_to_end(key)
        return found

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        """Forget a chunk, and those that lie in one memory with it."""
        chunk = self._chunks[key]
        for each in chunk.memory.keys if isinstance(chunk, _Slice) else [key]:
            self.nbytes -= _size(self._chunks.pop(each)) + _ENTRY

    def missing(self, owner: bytes, digests: tuple[bytes, ...]) -> list[int]:
        """The positions of the chunks that are not there; those that are count as used."""
        lacking = [index for index, digest in enumerate(digests) if self.get(owner, digest) is None]
        self.hits += len(digests) - len(lacking)
        return lacking

    def load(self, owner: bytes, path: str, offset: int, nbytes: int, digests: tuple[bytes, ...]) -> list[int]:
        """Take chunks from a file where they are not there; the positions of those that it does not have either.

        What is in the file is told to nobody: only what has a digest that was given is kept. A piece of few bytes is
        not looked for, since its digest can be guessed.
        """
        lacking = self.missing(owner, digests)
        wanted = set(lacking)
        found = set[int]()
        try:
            for place, piece in enumerate(file_pieces(path, offset, nbytes) if lacking else ()):
                if place in wanted and len(piece) >= _LEAST and blake3.blake3(piece).digest() == digests[place]:
                    self.put(owner, digests[place], piece)
                    found.add(place)
        except (OSError, ValueError):  # not a file of this machine, or a path that none can have
            pass
        return [place for place in lacking if place not in found]

    def __len__(self) -> int:
        return len(self._chunks)


def _size(chunk: Any) -> int:
    return chunk.size if isinstance(chunk, _Slice) else memoryview(chunk).nbytes
