"""The bytes of uploaded tensors, kept by the client as long as a worker that dies could need them again.

Small ones stay in memory. Large ones go into files named by digest, in a folder of this process that only this user can
read, each content once; a file goes with the last tensor that has its content.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from marid.remote.chunks import CHUNK_BYTES, chunks_of
from marid.remote.packing import packing_of
from marid.remote.tensors import memory_of, segments_of
from marid.settings import settings

__all__ = ["Content", "content_of"]

LARGE = 1 << 20
"""Bytes from which a tensor is sent by content, in chunks, and kept in a file."""


class Content:
    """The packed elements of a tensor. ``digests`` name its chunks, where it is large."""

    __slots__ = ("__weakref__", "_data", "_files", "digests", "nbytes")

    def __init__(self, data: torch.Tensor) -> None:
        self._data: torch.Tensor | None = data
        self.nbytes = data.numel() * data.element_size()
        self.digests: tuple[bytes, ...] = ()
        self._files: list[_File] = []
        if self.nbytes >= LARGE:
            chunks = list(chunks_of(memory_of(data)))
            self.digests = tuple([digest for digest, _ in chunks])

    def pieces(self) -> list[Any]:
        """The bytes, chunk by chunk where it is large. Raises ``OSError`` when its files are gone."""
        if self._data is None:
            return [file.read() for file in self._files]
        if not self.digests:
            return segments_of(self._data)
        return [piece for _, piece in zip(self.digests, _cut(memory_of(self._data)), strict=True)]

    def spool(self) -> None:
        """It was sent: take it out of memory, if it is large. A disk that is full leaves it there."""
        if self._data is None or not self.digests:
            return
        try:
            self._files = [_file(digest, piece) for digest, piece in zip(self.digests, self.pieces(), strict=True)]
        except OSError:
            self._files = []
        else:
            self._data = None


def content_of(tensor: torch.Tensor) -> Content:
    """The content of a CPU tensor that nobody will write; to be called below all dispatch."""
    packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
    seen = packing.seen(tensor)
    return Content(packing.pack(tensor) if seen is None else seen)


def _cut(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


class _File:
    """One chunk on disk, shared by all who have it."""

    def __init__(self, path: Path, data: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
        self._path = path
        weakref.finalize(self, _remove, path).atexit = False

    def read(self) -> bytes:
        return self._path.read_bytes()


_files: weakref.WeakValueDictionary[bytes, _File] = weakref.WeakValueDictionary()
_folder: Path | None = None


def _file(digest: bytes, data: Any) -> _File:
    found = _files.get(digest)
    if found is None:
        found = _files[digest] = _File(_spool_folder() / digest.hex(), data)
    return found


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _spool_folder() -> Path:
    global _folder
    if _folder is None or not _folder.exists():
        above = settings.cache_dir / "spool"
        above.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_dead(above)
        _folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=above))  # readable by this user only
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def _forget_dead(above: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in above.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
