"""Compiled parts on disk: found again by later processes of the same user.

An entry is a shared object ``<key>.so`` and ``<key>.json``, which says what it is and is written last. The key is the
SHA-256 of the whole structure; the structure itself lies in the entry and is compared. Every file is written under a
private name and moved into place, so that neither a killed writer nor two at once leave half an entry. Nothing is
believed: an entry that is not this user's own, or could be written by others, is not looked at; one whose checksum is
wrong is removed and made again. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marid.settings import settings

_STALE = 3600  # seconds after which a temporary file has lost its writer
_TEMPORARY = ".writing-"
_FORMAT = 3
_LARGEST_TEXT = 64 << 20


@dataclass(frozen=True)
class Entry:
    """A compiled part: its file, and the conditions under which it is right (``lower.py``)."""

    path: Path
    conditions: list[Any]


def folder() -> Path:
    """Where compiled parts are kept."""
    return settings.cache_dir / "compiled"


@functools.cache
def identity() -> dict[str, Any]:
    """What compiled code depends on beside the part: PyTorch, Python, its ABI and the CPU."""
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
        wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        cpu = "\n".join(line for line in lines if line.startswith(wanted))
    return {
        "format": _FORMAT,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
        "system": f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}",
        "cpu": hashlib.sha256(cpu.encode()).hexdigest(),
    }


def key_of(structure: dict[str, Any]) -> str:
    """The name of an entry."""
    return hashlib.sha256(_text(structure)).hexdigest()


def _text(structure: dict[str, Any]) -> bytes:
    return json.dumps(structure, sort_keys=True, separators=(",", ":")).encode()


class DiskCache:
    """The entries in one folder. ``damaged`` counts those that were wrong, and were thrown away."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.damaged = 0

    def find(self, structure: dict[str, Any]) -> Entry | None:
        """The entry of exactly this structure."""
        key = key_of(structure)
        about, compiled = self.folder / f"{key}.json", self.folder / f"{key}.so"
        try:
            if not self._is_private():
                return None
            text = _read_own(about)
        except OSError:
            return None  # not there, or not to be read
        try:
            content = _read_own(compiled)
            found = json.loads(text)
            if found["sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError("the checksum is wrong")
            if found["checked"] != _checksum(found):
                raise ValueError("the description is damaged")
            if _text(found["structure"]) != _text(structure):
                return None
            with contextlib.suppress(OSError):
                os.utime(about)  # used now
            return Entry(compiled, found["conditions"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.damaged += 1
            self._remove(key)
            return None

    def store(self, structure: dict[str, Any], built: Path, conditions: list[Any]) -> Entry:
        """Put a built file into the cache. Raises ``OSError`` where that cannot be."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._is_private():
            raise PermissionError(f"{self.folder} belongs to, or can be written by, somebody else")
        key, content = key_of(structure), built.read_bytes()
        about: dict[str, Any] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "conditions": conditions,
            "structure": structure,
        }
        about["checked"] = _checksum(about)
        self._clean()
        self._write(self.folder / f"{key}.so", content, 0o700)
        self._write(self.folder / f"{key}.json", json.dumps(about).encode(), 0o600)
        self._evict(key)
        return Entry(self.folder / f"{key}.so", conditions)

    def entries(self) -> list[tuple[float, int, str]]:
        """Time of last use, bytes and key of each entry, the least recently used first."""
        found = []
        for about in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                used = about.stat()
                found.append((used.st_mtime, used.st_size + about.with_suffix(".so").stat().st_size, about.stem))
        return sorted(found)

    def clear(self) -> int:
        """Remove everything; how many entries there were."""
        keys = {path.stem for suffix in (".json", ".so") for path in self.folder.glob(f"*{suffix}")}
        for key in keys:
            self._remove(key)
        self._clean(age=0)
        return len(keys)

    def _is_private(self) -> bool:
        found = os.lstat(self.folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022

    def _write(self, path: Path, content: bytes, mode: int) -> None:
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _remove(self, key: str) -> None:
        for suffix in (".json", ".so"):
            with contextlib.suppress(OSError):
                (self.folder / (key + suffix)).unlink()

    def _evict(self, newest: str) -> None:
        found = self.entries()
        total = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, key in found:
            if total <= self.limit:
                break
            if key != newest:
                self._remove(key)
                total -= nbytes

    def _clean(self, age: float = _STALE) -> None:
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def _checksum(about: dict[str, Any]) -> str:
    return hashlib.sha256(_text({key: about[key] for key in ("sha256", "conditions", "structure")})).hexdigest()


def _read_own(path: Path) -> bytes:
    """A file of this user's that nobody else can write. Raises ``OSError`` for any other."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to, or can be written by, somebody else")
        if found.st_size > _LARGEST_TEXT:
            raise OSError(f"{path} is too large")
        return file.read()
