"""A worker that is killed costs time, never a result: what lives on it is done again on another one, bit for bit."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.errors import MaterializationError, WorkerLostError
from marid.frontend.engines import engine_of
from marid.remote.client.engine import RemoteEngine
from marid.remote.client.journal import take_checkpoint
from marid.remote.client.runs import RunStep
from marid.remote.client.window import Window
from marid.remote.launch import connect as connecting
from marid.report.traffic import traffic
from tests import remote_helpers
from tests.remote_helpers import worker_process
from tests.remote_runs import decode, same, train

DEVICE = "remote_accelerator:7"


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    marid.connect(workers=1, first=7)
    yield
    connecting.disconnect(7, force=True)


def engine() -> RemoteEngine:
    found = engine_of(7)
    assert isinstance(found, RemoteEngine)
    return found


def kill() -> None:
    """End the worker in the middle of whatever it does."""
    remote_helpers.kill(7)


def killing(points: set[int]) -> Callable[[int], None]:
    return lambda step: kill() if step in points else None


def test_training_goes_on_after_the_worker_was_killed() -> None:
    before = traffic.recoveries
    assert same(train(DEVICE, 12, killing({0, 6, 11})), train("cpu", 12))
    assert traffic.recoveries == before + 3


def test_decoding_goes_on_after_the_worker_was_killed() -> None:
    assert same(decode(DEVICE, 10, killing({2, 9})), decode("cpu", 10))


@pytest.mark.conformance
@pytest.mark.parametrize("work", [train, decode])
def test_killed_at_many_points(work: Callable[..., list[torch.Tensor]]) -> None:
    """200 points in all, also in the middle of a step."""
    rng = random.Random(0)
    expected = work("cpu", 25)
    for _ in range(20):
        points = set(rng.sample(range(25), 5))
        assert same(work(DEVICE, 25, killing(points)), expected), points


def test_only_what_is_needed_is_done_again() -> None:
    """What is dead is not; a second life of the worker holds no more than the first did."""
    gc.collect()
    kept = torch.arange(4.0, device=DEVICE) * 2
    kept.cpu()
    for _ in range(20):
        (torch.randn(100, device=DEVICE) * 3).sum().item()
    replays = traffic.replays
    kill()
    assert kept.sum().item() == 12.0
    assert traffic.replays - replays == 1  # arange and its double are one program
    assert engine().worker_stats()["tensors"] <= 3


def test_a_write_is_not_doubled() -> None:
    """The worker may have done what it did not answer any more; it is done once all the same."""
    x = torch.zeros(3, device=DEVICE)
    view = x[1:]
    for round in range(4):
        x.add_(1)
        view.mul_(2)
        if round == 2:
            kill()
        x.sum().item()
    expected = torch.zeros(3)
    for _ in range(4):
        expected.add_(1)
        expected[1:].mul_(2)
    assert torch.equal(x.cpu(), expected)


def _written_around_a_failure() -> torch.Tensor:
    """Five three times, by one write before an operation that has failed and one behind it."""
    x = torch.zeros(3, device=DEVICE)
    x.add_(1)
    bad = x[torch.tensor([7], device=DEVICE)]
    x.mul_(5)
    with pytest.raises(MaterializationError, match="out of bounds"):
        bad.cpu()
    return x


def test_what_had_run_of_a_failed_program_is_done_again() -> None:
    x = _written_around_a_failure()
    kill()
    assert x.tolist() == [5.0, 5.0, 5.0]


def test_what_failed_is_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation that failed was to make does not exist, whoever holds its handle: a checkpoint leaves it."""
    memory, held = engine().remote, []
    made = memory.made

    def noted(*args: Any) -> Any:
        held.append(made(*args))
        return held[-1]

    monkeypatch.setattr(memory, "made", noted)
    x = _written_around_a_failure()
    take_checkpoint(engine().delivery)
    kill()
    assert x.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("sends", [0, 1, 2, 3])
def test_ctrl_c_while_things_are_done_again(monkeypatch: pytest.MonkeyPatch, sends: int) -> None:
    """A worker that was not told everything is not used: whoever reads next has all done again on another one."""
    x = torch.zeros(3, device=DEVICE)
    for _ in range(3):
        x.add_(1)
        x.sum().item()
    enqueue, count = Window.enqueue, 0

    def interrupted(window: Window, *args: Any) -> int | None:
        nonlocal count
        if window is not lost:
            count += 1
            if count > sends:
                raise KeyboardInterrupt
        return enqueue(window, *args)

    lost = engine().link._window
    with monkeypatch.context() as patched:
        patched.setattr(Window, "enqueue", interrupted)
        kill()
        with pytest.raises(KeyboardInterrupt):
            x.cpu()
    x.add_(1)
    assert x.tolist() == [4.0, 4.0, 4.0]


def test_checkpoints_bound_what_is_done_again() -> None:
    """After a checkpoint, a lost worker gets the state as it was then, views included, and the steps since."""
    expected = train("cpu", 8)

    def at(step: int) -> None:
        if step == 4:
            take_checkpoint(engine().delivery)
        if step == 6:
            kill()

    replays = traffic.replays
    assert same(train(DEVICE, 8, at), expected)
    assert traffic.checkpoints
    assert traffic.replays - replays < 40


def test_views_and_dtypes_survive_a_checkpoint() -> None:
    base = torch.arange(12.0, device=DEVICE).reshape(3, 4) * 1
    column, flipped, bits = base[:, 1], base.t(), base.view(torch.int32)
    z = torch.complex(base, base + 1)
    conj = z.conj()
    marid.materialize(column, flipped, bits, conj)
    take_checkpoint(engine().delivery)
    kill()
    column.add_(100)
    expected = torch.arange(12.0).reshape(3, 4) * 1
    z = torch.complex(expected, expected + 1)
    expected[:, 1].add_(100)
    assert torch.equal(flipped.cpu(), expected.t())
    assert flipped.cpu().stride() == expected.t().stride()
    assert torch.equal(bits.cpu(), expected.view(torch.int32))
    assert torch.equal(conj.cpu(), z.conj())


def test_bytes_behind_the_last_whole_number_survive_a_checkpoint() -> None:
    """Memory is brought to the host whole, whatever the dtype of the tensor that it is asked for by."""
    base = torch.arange(7, dtype=torch.uint8, device=DEVICE) + 1
    numbers = base[:4].view(torch.int32)
    marid.materialize(numbers)
    rest = base[3:]
    marid.materialize(rest)
    del base
    take_checkpoint(engine().delivery)
    kill()
    rest.add_(10)
    assert rest.tolist() == [14, 15, 16, 17]
    assert numbers.view(torch.uint8).tolist() == [1, 2, 3, 14]


def test_memory_that_was_read_through_larger_numbers_is_whole() -> None:
    base = torch.arange(7, dtype=torch.uint8, device=DEVICE) + 1
    numbers = base[:4].view(torch.int32)
    marid.materialize(numbers, base)
    assert numbers.untyped_storage().nbytes() == 7
    assert list(numbers.untyped_storage()) == [1, 2, 3, 4, 5, 6, 7]
    assert base.untyped_storage()[6] == 7


def test_a_journal_that_costs_too_much_takes_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from marid.remote.client import journal
    from marid.remote.client import journal as checkpoint

    monkeypatch.setattr(journal, "_MOST", 10)
    monkeypatch.setattr(checkpoint, "_EVERY", 0.0)
    before = traffic.checkpoints
    assert same(train(DEVICE, 12, killing({10})), train("cpu", 12))
    assert traffic.checkpoints > before
    assert sum(isinstance(step, RunStep) for step in engine().queue.journal.steps) <= 4


def test_uploads_come_back_from_files() -> None:
    """A large upload is kept on disk, not in memory, and is sent again from there."""
    large = torch.randn(600_000)
    x = large.to(DEVICE)
    assert x.sum().item() == large.sum().item()
    kill()
    assert torch.equal(x.cpu(), large)


def test_what_cannot_be_recovered_names_tensor_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from marid.remote.client.contents import Content

    lost, fine = torch.randn(600_000).to(DEVICE), torch.ones(2, device=DEVICE)
    marid.materialize(lost, fine)

    def gone(self: Content) -> list[Any]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Content, "pieces", gone)
    kill()
    assert fine.tolist() == [1.0, 1.0]
    with pytest.raises(WorkerLostError, match=r"float32 tensor of shape \[600000\].*\n.*test_remote_recovery.py:\d+"):
        lost.sum().item()


def test_a_worker_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so where the value is read; the value is there once a worker is."""
    x = torch.ones(3, device=DEVICE) * 3
    connection: Any = connecting.connection_of(7)

    def none(reason: str) -> Any:
        raise WorkerLostError(f"no worker: {reason}")

    with monkeypatch.context() as patched:
        patched.setattr(connection, "reopen", none)
        kill()
        with pytest.raises(WorkerLostError, match="no worker"):
            x.cpu()
    assert x.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("started_here", [True, False])
def test_a_worker_that_is_gone_is_not_waited_for_at_the_end(started_here: bool) -> None:
    """Nor is another one started, to be asked what it has done."""
    with worker_process() as other:
        marid.connect(*([] if started_here else [other.address]), workers=int(started_here), first=6)
        x = torch.arange(5.0, device="remote_accelerator:6") * 2
        assert x.sum().item() == 20.0
        connection: Any = connecting.connection_of(6)
        worker = connection.worker if started_here else other
        worker.process.kill()
        worker.process.wait()
        started = time.monotonic()
        connecting.disconnect(6, force=True)
        assert time.monotonic() - started < 10
        assert not started_here or connection.worker is worker
