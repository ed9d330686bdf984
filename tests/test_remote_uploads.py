"""Large tensors on their way to a worker: what is kept of them, and what is not sent again."""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import marid
from marid.engine.pages import in_large_pages
from marid.engine.snapshot import snapshot
from marid.remote.client import contents as spooling
from marid.remote.client.contents import Content, Spool, content_of
from marid.remote.client.steps import Sent
from marid.remote.client.uploads import HaveStep, UploadProgress
from marid.remote.launch.connect import connection_of, disconnect
from marid.remote.launch.local import LocalWorker
from marid.remote.wire import requests as ask
from marid.remote.wire.endpoints import make_client, make_worker
from marid.report.traffic import RemoteStats
from tests.remote_helpers import worker_process

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
    monkeypatch.setattr("marid.remote.client.contents.chunk_file", full)
    content.write_out()
    assert bytes(content.pieces()[0]) == bytes(torch.arange(2 * MB, dtype=torch.uint8).numpy().data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_large_snapshots_are_copies(dtype: torch.dtype) -> None:
    base = torch.randint(0, 2, (1200, 1100), dtype=torch.uint8)
    base = base.view(dtype) if dtype.itemsize == 1 else base.to(dtype)
    for one in (base, base.t(), base[:, ::2], base[200:], base[None].expand(3, -1, -1)):
        before = one.clone()
        copied, moved = snapshot(one), one.to("remote_accelerator:5")
        assert copied.stride() == one.stride()
        assert moved.stride() == one.to("cpu", copy=True).stride()
        base.view(torch.uint8).bitwise_xor_(1)
        for found in (copied, moved.cpu()):
            assert (
                torch.equal(found.view(torch.uint8), before.view(torch.uint8))
                if dtype.itemsize == 1
                else (torch.equal(found, before))
            )


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not Path("/proc/self/smaps").exists(),
    reason="needs a kernel with large pages that says where they are wanted",
)
def test_copies_of_large_tensors_are_made_in_large_pages() -> None:
    source = torch.arange(64 * MB + 1, dtype=torch.int64).to(torch.uint8)
    copied = snapshot(source)
    assert torch.equal(copied, source)
    assert _is_in_large_pages(copied)
    with mmap.mmap(-1, 1 * MB) as memory:  # malloc's may have been a large tensor's before
        small = in_large_pages(torch.frombuffer(memory, dtype=torch.uint8))
        assert not _is_in_large_pages(small)
        del small


def _is_in_large_pages(tensor: torch.Tensor) -> bool:
    """Whether large pages are wanted for the middle of it."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *flags = line.split()
        if "-" in first:
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= middle < end
        elif first == "VmFlags:" and inside:
            return "hg" in flags
    raise AssertionError("there is no such memory")


# --- what is not sent again ------------------------------------------------------------------------------------------

DEVICE = "remote_accelerator:6"


@contextlib.contextmanager
def connected(worker: LocalWorker) -> Iterator[None]:
    """A session of this process, which nothing of another one is known of."""
    marid.connect(worker.address, first=6)
    try:
        yield
    finally:
        disconnect(6, force=True)


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    with worker_process(transport="ipc") as one:
        yield one


def weights(seed: int, count: int = 12, size: int = 5 * MB) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-100, 100, (size // 4,), dtype=torch.int32, generator=generator) for _ in range(count)]


def uploaded(tensors: list[torch.Tensor]) -> RemoteStats:
    """Upload them, compare what arrives, and give what that moved; of what came back only sums."""
    marid.reset_stats()
    there = [tensor.to(DEVICE) for tensor in tensors]
    sums = [tensor.sum() for tensor in there]
    marid.materialize(*sums)
    assert [one.item() for one in sums] == [tensor.sum().item() for tensor in tensors]
    found = marid.stats().remote
    assert found is not None
    assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(there[::5], tensors[::5], strict=True))
    return found


def test_weights_are_sent_once_to_a_worker(worker: LocalWorker) -> None:
    tensors = weights(1)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with connected(worker):
        first = uploaded(tensors)
        assert nbytes < first.bytes_up < 1.01 * nbytes
        again = uploaded(tensors)
        assert again.bytes_up < 0.01 * nbytes
        assert again.deduplicated == nbytes
    with connected(worker):  # a session that has sent nothing itself
        other = uploaded(tensors)
        assert other.bytes_up < 0.01 * nbytes
        assert other.deduplicated == nbytes


_CLIENT = """
import sys, torch, marid
marid.connect(sys.argv[1], key=sys.argv[2])
torch.manual_seed(0)
layer = torch.nn.Linear(1500, 1500).to("remote_accelerator")
total = layer.weight.double().sum().item()
print(marid.stats().remote.bytes_up, total)
"""


def test_another_process_of_the_same_owner_sends_weights_by_name(tmp_path: Path) -> None:
    """And one of another owner sends them itself: what a worker has is nobody else's affair."""
    make_worker(tmp_path / "keys")
    ann, bob = make_client(tmp_path / "keys", "ann"), make_client(tmp_path / "keys", "bob")
    found = []
    with worker_process("--keys", str(tmp_path / "keys")) as worker:
        for key in (ann, ann, bob):
            command = [sys.executable, "-c", _CLIENT, worker.address, str(key)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            found.append(done.stdout.split())
    (first, total), (second, same), (other, also) = found
    assert total == same == also
    assert int(first) > 1500 * 1500 * 4
    assert int(second) < 0.01 * int(first)
    assert int(other) > 1500 * 1500 * 4


def test_only_what_is_new_is_sent(worker: LocalWorker) -> None:
    tensors = weights(2)
    with connected(worker):
        uploaded(tensors)
    tensors[3][7] += 1  # in the first chunk of two
    tensors[8] = weights(3, 1)[0]
    with connected(worker):
        found = uploaded(tensors)
    assert 9 * MB < found.bytes_up < 10 * MB


def test_one_question_for_many_tensors(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    written = HaveStep.requests

    def requests(self: HaveStep, sent: Sent) -> list[ask.Request]:
        asked.append(len(self.digests))
        return written(self, sent)

    monkeypatch.setattr(HaveStep, "requests", requests)
    with connected(worker):
        uploaded(weights(4, 12, 2 * MB))
    assert asked == [12]


def test_questions_that_save_nothing_are_not_asked_again(worker: LocalWorker) -> None:
    """A loop that uploads a new batch at each step waits once a step."""
    with connected(worker):
        for step in range(8):
            marid.reset_stats()
            (batch,) = weights(100 + step, 1, 2 * MB)
            assert batch.to(DEVICE).sum().item() == batch.sum().item()
        found = marid.stats().remote
    assert found is not None
    assert found.round_trips == 1
    assert found.messages_up <= 2


def test_a_worker_that_forgets_chunks_is_sent_them_again() -> None:
    """It answers that it has them, and has no room for them any more when they are needed."""
    with worker_process("--chunk-memory", "24MiB") as small:
        tensors = weights(5, 8, 7 * MB)
        for _ in range(2):
            with connected(small):
                uploaded(tensors)
                uploaded(tensors)


def test_a_tensor_that_chunk_memory_cannot_hold_is_refused() -> None:
    with worker_process("--chunk-memory", "8MiB") as small, connected(small):
        there = weights(9, 1, 9 * MB)[0].to(DEVICE)
        with pytest.raises(RuntimeError, match="--chunk-memory"):
            there.cpu()
        assert torch.ones(3, device=DEVICE).sum().item() == 3
        del there


def test_the_worker_is_lost_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    marid.connect(workers=1, first=6)
    try:
        tensors = weights(6, 16)
        written = HaveStep.requests
        killed: list[int] = []

        def requests(self: HaveStep, sent: Sent) -> list[ask.Request]:
            if len(killed) < 2:
                process = connection_of(6).worker.process
                killed.append(process.pid)
                process.kill()
            return written(self, sent)

        monkeypatch.setattr(HaveStep, "requests", requests)
        uploaded(tensors)
        assert len(killed) == 2
    finally:
        disconnect(6, force=True)


def test_a_failure_before_the_answer_is_raised_once(worker: LocalWorker) -> None:
    with connected(worker):
        bad = torch.zeros(3, device=DEVICE)[torch.tensor([5], device=DEVICE)]
        there = [tensor.to(DEVICE) for tensor in weights(7, 10)]
        with pytest.raises(IndexError):
            bad.cpu()
        assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(there, weights(7, 10), strict=True))
        there.clear()  # the error, which is kept, keeps this frame


# --- the bar ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "wanted", "seconds", "shown"),
    [(True, True, 2.0, True), (False, True, 2.0, False), (True, False, 2.0, False), (True, True, 0.5, False)],
    ids=["shown", "no terminal", "switched off", "quick"],
)
def test_a_bar_is_shown_to_who_waits_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, wanted: bool, seconds: float, shown: bool
) -> None:
    written = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    now = [100.0]
    monkeypatch.setattr("marid.remote.client.uploads.time.monotonic", lambda: now[0])
    bar = UploadProgress("worker at tcp://gpu:7070")
    with setting("progress", wanted):
        for _ in range(10):
            bar.add(20 * MB)
        for _ in range(10):
            now[0] += seconds / 10
            bar.done(20 * MB)
    text = written.getvalue()
    assert ("upload to worker at tcp://gpu:7070" in text) == shown
    assert bool(text) == shown
    before = len(text)
    bar.add(10)
    bar.done(10)
    assert len(written.getvalue()) == before  # it has ended


def test_uploads_tell_the_bar(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    monkeypatch.setattr(UploadProgress, "add", lambda self, nbytes: log.append(("add", nbytes)))
    monkeypatch.setattr(UploadProgress, "done", lambda self, nbytes: log.append(("done", nbytes)))
    with connected(worker):
        uploaded(weights(8, 3, 2 * MB))
    assert sorted(log) == [("add", 2 * MB)] * 3 + [("done", 2 * MB)] * 3
