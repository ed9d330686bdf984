"""Where the bytes of uploaded tensors wait until nobody could need them again: the newest in memory, others in files.

Writing files costs more than sending what is in them, so it is left to a thread that gets what processors have to
spare, and is done at all only for what goes beyond ``settings.journal_memory``. The files are in a folder of this
process that only this user can read, each content once; a file goes with the last tensor that has its content.
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

from marid.settings import settings

__all__ = ["ChunkFile", "Spool", "chunk_file"]

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
