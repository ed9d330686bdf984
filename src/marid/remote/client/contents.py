"""The bytes of uploaded tensors, kept by the client as long as a worker that dies could need them again.

The newest are in memory, others in files. Writing files costs more than sending what is in them, so it is left to a
thread that gets what processors have to spare, and is done at all only for what goes beyond
``settings.journal_memory``. The files are in a folder of this process that only this user can read, each content once;
a file goes with the last tensor that has its content.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

import blake3
import torch

from marid.remote.wire.tensors import CHUNK_BYTES, chunks_of, file_pieces, memory_of, packing_of, segments_of
from marid.settings import settings

LARGE = 1 << 20
"""Bytes from which a tensor is sent by content, in chunks, and may be kept in files."""


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


# --- in memory and in files ------------------------------------------------------------------------------------------


_HURRY = 2  # times the memory that may be taken, from which on whoever uploads has to write files too


class Spooled(Protocol):
    """What can be moved from memory to files."""

    nbytes: int

    def write_out(self) -> None:
        """Move it. Leaves it in memory when that cannot be done."""
        ...


class Spool:
    """What is in memory, oldest first. Holds it weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[weakref.ref[Any], int] = {}
        self._writing = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(list(self._held.values()))

    def keep(self, content: Spooled) -> None:
        """One more. Where memory has run out, files are written before this returns."""
        self._held[weakref.ref(content, self._forget)] = content.nbytes
        if self.nbytes <= settings.journal_memory:
            return
        with self._lock:
            start, self._writing = not self._writing, True
        if start:
            threading.Thread(target=self._write, name="marid-spool", daemon=True).start()
        while self.nbytes > _HURRY * settings.journal_memory:
            self._write_oldest()

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self._held.pop(reference, None)

    def _write(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
        while True:
            with self._lock:
                if self.nbytes <= settings.journal_memory:
                    self._writing = False
                    return
            self._write_oldest()

    def _write_oldest(self) -> None:
        try:
            reference = next(iter(self._held))
        except (StopIteration, RuntimeError):  # none, or others come and go just now
            return
        content = reference()
        if self._held.pop(reference, None) is not None and content is not None:
            content.write_out()


class ChunkFile:
    """One chunk on disk, shared by all who have it. Raises ``OSError`` when it cannot be written."""

    def __init__(self, folder: Path, data: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False, buffering=0) as file:
            self._path = Path(file.name)
            weakref.finalize(self, _remove, self._path, os.getpid()).atexit = False
            rest = memoryview(data).cast("B")
            while len(rest):
                rest = rest[file.write(rest) :]

    def read(self) -> bytes:
        """Its bytes."""
        return self._path.read_bytes()


_spool = Spool()
_files: weakref.WeakValueDictionary[bytes, ChunkFile] = weakref.WeakValueDictionary()
_folder: Path | None = None
_naming = threading.Lock()


def chunk_file(digest: bytes, data: Any) -> ChunkFile:
    """The file with the chunk of that name, which is written if it is not there. Raises ``OSError``."""
    with _naming:
        found = _files.get(digest)
        if found is None:
            found = _files[digest] = ChunkFile(_spool_folder(), data)
        return found


def _remove(path: Path, process: int) -> None:
    if process == os.getpid():  # what a fork has is a copy; the files are the parent's
        path.unlink(missing_ok=True)


def _remove_folder(folder: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def _spool_folder() -> Path:
    global _folder
    if _folder is None or not _folder.name.startswith(f"{os.getpid()}-") or not _folder.exists():
        above = settings.cache_dir / "spool"
        above.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_dead(above)
        _folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=above))  # readable by this user only
        atexit.register(_remove_folder, _folder, os.getpid())
    return _folder


def _forget_dead(above: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in above.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
