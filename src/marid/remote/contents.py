"""The bytes of uploaded tensors, kept by the client as long as a worker that dies could need them again."""

from __future__ import annotations

from typing import Any

import torch

from marid.remote.chunks import CHUNK_BYTES, chunks_of
from marid.remote.packing import packing_of
from marid.remote.spool import ChunkFile, Spool, chunk_file
from marid.remote.tensors import memory_of, segments_of

__all__ = ["LARGE", "Content", "content_of"]

LARGE = 1 << 20
"""Bytes from which a tensor is sent by content, in chunks, and may be kept in files."""

_spool = Spool()


class Content:
    """The packed elements of a tensor. ``digests`` name its chunks, where it is large."""

    __slots__ = ("__weakref__", "_data", "_files", "digests", "nbytes")

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


def content_of(tensor: torch.Tensor) -> Content:
    """The content of a CPU tensor that nobody will write; to be called below all dispatch."""
    packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
    seen = packing.seen(tensor)
    return Content(packing.pack(tensor) if seen is None else seen)


def _cut(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
