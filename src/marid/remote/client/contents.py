"""The bytes of uploaded tensors, kept by the client as long as a worker that dies could need them again."""

from __future__ import annotations

from typing import Any

import blake3
import torch

from marid.remote.client.spool import ChunkFile, Spool, chunk_file
from marid.remote.wire.tensors import CHUNK_BYTES, chunks_of, file_pieces, memory_of, packing_of, segments_of

__all__ = ["LARGE", "Content", "FileContent", "content_of"]

LARGE = 1 << 20
"""Bytes from which a tensor is sent by content, in chunks, and may be kept in files."""

_spool = Spool()


class Content:
    """The packed elements of a tensor. ``digests`` name its chunks, where it is large."""

    __slots__ = ("__weakref__", "_data", "_files", "digests", "nbytes")
    path: str | None = None
    """The file that they are in, if any."""
    offset = 0

    def __init__(self, data: torch.Tensor) -> None:
        self._data: torch.Tensor | None = data
        self.nbytes = data.numel() * data.element_size()
        self.digests: tuple[bytes, ...] = ()
        self._files: list[ChunkFile] = []
        if self.nbytes >= LARGE:
            chunks = list(chunks_of(memory_of(data)))
            self.digests = tuple([digest for digest, _ in chunks])

    def pieces(self) -> list[Any]:
        """The bytes, chunk by chunk where it is large. Raises ``OSError`` when its files are gone."""
        data = self._data  # which may be moved to files just now
        if data is None:
            return [file.read() for file in self._files]
        return _cut(memory_of(data)) if self.digests else segments_of(data)

    def spool(self) -> None:
        """It was sent: it need not stay in memory, if it is large."""
        if self._data is not None and self.digests:
            _spool.keep(self)

    def write_out(self) -> None:
        """Move it from memory to files. A disk that is full leaves it there."""
        try:
            files = [chunk_file(digest, piece) for digest, piece in zip(self.digests, self.pieces(), strict=True)]
        except OSError:
            return
        self._files, self._data = files, None


class FileContent:
    """The bytes of a large tensor that are in a file, from ``offset`` on; they are read when they are needed.

    ``digests`` say what they were: bytes that changed since are never taken for them. Raises ``OSError``.
    """

    def __init__(self, path: str, offset: int, nbytes: int) -> None:
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.digests = tuple([blake3.blake3(piece).digest() for piece in file_pieces(path, offset, nbytes)])

    def pieces(self) -> list[Any]:
        """The bytes, chunk by chunk. Raises ``OSError`` when they are not there any more."""
        found = list(file_pieces(self.path, self.offset, self.nbytes))
        if tuple([blake3.blake3(piece).digest() for piece in found]) != self.digests:
            raise OSError(f"{self.path} was changed after tensors were loaded from it: load them again")
        return found

    def spool(self) -> None:
        """It is in a file."""


def content_of(tensor: torch.Tensor) -> Content:
    """The content of a CPU tensor that nobody will write; to be called below all dispatch."""
    packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
    seen = packing.seen(tensor)
    return Content(packing.pack(tensor) if seen is None else seen)


def _cut(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
