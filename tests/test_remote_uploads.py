"""Large tensors on their way to a worker: what is kept of them, and what is not sent again."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import marid
from marid.engine.pages import in_large_pages
from marid.engine.snapshot import snapshot
from marid.remote import spool as spooling
from marid.remote.contents import Content, content_of
from marid.remote.spool import Spool

MB = 1 << 20


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it did not happen within a minute"
        time.sleep(0.01)


@contextlib.contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    before = getattr(marid.settings, name)
    setattr(marid.settings, name, value)
    try:
        yield
    finally:
        setattr(marid.settings, name, before)


# --- what is kept ----------------------------------------------------------------------------------------------------


class Kept:
    """Content that notes when it is written out."""

    def __init__(self, nbytes: int, log: list[int], can: bool = True) -> None:
        self.nbytes, self._log, self._can = nbytes, log, can

    def write_out(self) -> None:
        if self._can:
            self._log.append(self.nbytes)


def test_the_newest_stay_in_memory_and_the_oldest_are_written_first() -> None:
    spool, log = Spool(), []
    with setting("journal_memory", 100):
        held = [Kept(nbytes, log) for nbytes in (40, 41, 42, 43)]
        for one in held:
            spool.keep(one)
        eventually(lambda: spool.nbytes <= 100)
    assert log == [40, 41]


def test_who_uploads_too_much_writes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread that never gets a processor, memory stays bounded all the same."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    spool, log = Spool(), []
    with setting("journal_memory", 100):
        held = [Kept(60, log) for _ in range(10)]
        for one in held:
            spool.keep(one)
            assert spool.nbytes <= 200
    assert len(log) == 7


def test_what_nobody_holds_is_not_written() -> None:
    spool, log = Spool(), []
    with setting("journal_memory", 100):
        for _ in range(10):
            spool.keep(Kept(90, log))
    gc.collect()
    assert spool.nbytes == 0
    assert len(log) < 10


def test_files_have_what_memory_had_and_go_with_the_content() -> None:
    data = torch.randint(0, 256, (9 * MB + 5,), dtype=torch.uint8)
    content, same = content_of(data), content_of(data.clone())
    in_memory = b"".join(bytes(piece) for piece in content.pieces())
    content.write_out()
    same.write_out()
    folder = spooling._folder
    assert folder is not None
    files = set(folder.iterdir())
    assert len(files) >= 3
    assert b"".join(bytes(piece) for piece in content.pieces()) == in_memory == bytes(data.numpy().data)
    del content
    gc.collect()
    assert set(folder.iterdir()) == files  # the other one has the same bytes
    del same
    gc.collect()
    assert len(set(folder.iterdir()) & files) == len(files) - 3


def test_a_full_disk_leaves_content_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(digest: bytes, data: object) -> None:
        raise OSError(28, "No space left on device")

    content = Content(torch.arange(2 * MB, dtype=torch.uint8))
    monkeypatch.setattr("marid.remote.contents.chunk_file", full)
    content.write_out()
    assert bytes(content.pieces()[0]) == bytes(torch.arange(2 * MB, dtype=torch.uint8).numpy().data)


@pytest.mark.parametrize("count", [0, 1, 1 << 20, (4 << 20) + 3, (9 << 20) + 1])
def test_memory_of_large_pages_is_memory(count: int) -> None:
    tensor = in_large_pages(torch.empty(count, dtype=torch.uint8))
    tensor.fill_(7)
    assert tensor.sum(dtype=torch.int64).item() == 7 * count
    tensor.resize_(count + 10)


def test_snapshots_of_large_tensors_keep_strides() -> None:
    base = torch.randn(1200, 1100)
    for one in (base, base.t(), base[:, ::2], base.as_strided((1000, 1000), (1, 1)), base.to(torch.complex64).conj()):
        copied = snapshot(one)
        assert copied.stride() == one.stride()
        assert torch.equal(copied, one)
        assert copied.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()
