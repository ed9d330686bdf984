"""The compiled parts on disk: found again, and never believed without a check."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marid.execute.compiled import disk
from marid.execute.compiled.disk import DiskCache, key_of


def _structure(number: int = 0) -> dict[str, Any]:
    return {"part": {"n": number}, "symbols": 0}


@pytest.fixture
def built(tmp_path: Path) -> Path:
    path = tmp_path / "built.so"
    path.write_bytes(b"code" * 1000)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache" / "compiled", 1 << 20)


def test_what_is_stored_is_found_privately(cache: DiskCache, built: Path) -> None:
    assert cache.find(_structure()) is None
    cache.store(_structure(), built, [[">=", ["symbol", 0], 2]])
    found = cache.find(_structure())
    assert found is not None
    assert found.path.read_bytes() == built.read_bytes()
    assert found.conditions == [[">=", ["symbol", 0], 2]]
    assert cache.find(_structure(1)) is None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in cache.folder.iterdir()} == {0}
    assert cache.damaged == 0


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "gone"])
def test_damage_is_noticed_removed_and_rebuilt(cache: DiskCache, built: Path, suffix: str, damage: str) -> None:
    cache.store(_structure(), built, [])
    path = cache.folder / (key_of(_structure()) + suffix)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        changed = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        path.write_bytes({"truncated": content[:50], "empty": b"", "changed": changed}[damage])
    assert cache.find(_structure()) is None
    if (suffix, damage) != (".json", "gone"):
        assert cache.damaged == 1
        assert not list(cache.folder.iterdir())
    cache.store(_structure(), built, [])
    assert cache.find(_structure()) is not None


def test_equal_names_are_not_enough(cache: DiskCache, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure itself is compared."""
    monkeypatch.setattr(disk, "key_of", lambda _: "same")
    cache.store(_structure(0), built, [])
    assert cache.find(_structure(1)) is None
    assert cache.find(_structure(0)) is not None


@pytest.mark.parametrize("what", ["folder", ".so", ".json"])
def test_what_others_could_write_is_not_looked_at(cache: DiskCache, built: Path, what: str) -> None:
    cache.store(_structure(), built, [])
    path = cache.folder if what == "folder" else cache.folder / (key_of(_structure()) + what)
    path.chmod(0o722)
    assert cache.find(_structure()) is None
    if what == "folder":
        with pytest.raises(PermissionError):
            cache.store(_structure(1), built, [])


def test_what_belongs_to_somebody_else_is_not_looked_at(
    cache: DiskCache, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(_structure(), built, [])
    monkeypatch.setattr(disk.os, "geteuid", lambda: os.getuid() + 1)
    assert cache.find(_structure()) is None


def test_a_link_is_not_followed(cache: DiskCache, built: Path, tmp_path: Path) -> None:
    cache.store(_structure(), built, [])
    path = cache.folder / (key_of(_structure()) + ".so")
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert cache.find(_structure()) is None


def test_a_full_disk_leaves_nothing_behind(cache: DiskCache, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        cache.store(_structure(), built, [])
    assert not list(cache.folder.iterdir())
    assert cache.find(_structure()) is None


def test_the_least_recently_used_goes_first(cache: DiskCache, built: Path) -> None:
    cache.limit = 10_000  # two entries
    for number in range(2):
        cache.store(_structure(number), built, [])
        os.utime(cache.folder / f"{key_of(_structure(number))}.json", (number, number))
    assert cache.find(_structure(0)) is not None  # used now
    cache.store(_structure(2), built, [])
    assert [cache.find(_structure(number)) is not None for number in range(3)] == [True, False, True]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit


def test_what_a_killed_writer_left_is_removed(cache: DiskCache, built: Path) -> None:
    cache.store(_structure(), built, [])
    old, new = cache.folder / ".writing-old", cache.folder / ".writing-new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, 0))
    cache.store(_structure(1), built, [])
    assert not old.exists()
    assert new.exists()  # somebody may be writing it
    assert cache.clear() == 2
    assert not list(cache.folder.iterdir())


def _write(folder: Path, built: Path, wrong: Any) -> None:
    cache = DiskCache(folder, 1 << 30)
    for turn in range(60):
        cache.store(_structure(turn % 3), built, [])
        if cache.find(_structure((turn + 1) % 3)) is None and turn > 3:
            with wrong.get_lock():
                wrong.value += 1
    with wrong.get_lock():
        wrong.value += cache.damaged


def test_processes_that_write_at_once_see_whole_entries(cache: DiskCache, built: Path) -> None:
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    processes = [context.Process(target=_write, args=(cache.folder, built, wrong)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert wrong.value == 0
    assert [cache.find(_structure(number)) is not None for number in range(3)] == [True] * 3


def test_deep_nonsense_is_no_entry(cache: DiskCache, built: Path) -> None:
    cache.store(_structure(), built, [])
    (cache.folder / f"{key_of(_structure())}.json").write_text("[" * 100_000)
    assert cache.find(_structure()) is None
    assert cache.damaged == 1


def test_marid_cache_says_and_clears(cache: DiskCache, built: Path) -> None:
    cache.store(_structure(), built, [])
    environment = {**os.environ, "MARID_CACHE_DIR": str(cache.folder.parent)}

    def marid(*arguments: str) -> str:
        command = [sys.executable, "-m", "marid", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert f"{cache.folder}: 1 compiled parts" in marid("cache", "info")
    assert "1 compiled parts removed" in marid("cache", "clear")
    assert not list(cache.folder.iterdir())
    assert "0 compiled parts" in marid("cache", "info")


def test_entries_are_text_and_code_only(cache: DiskCache, built: Path) -> None:
    cache.store(_structure(), built, [])
    about = json.loads((cache.folder / f"{key_of(_structure())}.json").read_text())
    assert about["structure"] == _structure()
    assert sorted(path.suffix for path in cache.folder.iterdir()) == [".json", ".so"]
