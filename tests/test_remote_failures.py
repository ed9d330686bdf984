"""Devices that are workers when something fails: calls, Ctrl-C, switches; it ends, says why, and all goes on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.errors import MaterializationError, WorkerLostError
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import run_everything
from marid.remote.client.link import Link
from marid.remote.launch import connect as connecting
from tests.helpers import interrupted
from tests.remote_helpers import end

DEVICE = "remote_accelerator:5"
PATIENCE = 60  # seconds, after which a test hangs


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    marid.connect(workers=1, first=5)
    yield
    connecting.disconnect(5, force=True)


@pytest.fixture
def ends() -> Iterator[None]:
    """Fail rather than hang."""
    with interrupted(PATIENCE, TimeoutError):
        yield


def on(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


# --- operators that run at once --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: torch.bincount(on(-1)), RuntimeError),
        (lambda: torch.multinomial(on(-1.0, 2.0), 1).tolist(), RuntimeError),
        (lambda: torch.masked_select(on(1, 2), on(True, False, True)), RuntimeError),
        (lambda: torch.linalg.lstsq(torch.full((2, 2), float("nan"), device=DEVICE), on([1.0], [1.0])), RuntimeError),
        (lambda: torch.repeat_interleave(on(-1, 2)), RuntimeError),
        (lambda: torch.unique(on(1, 2), dim=3), IndexError),
    ],
)
def test_a_call_that_fails_raises_once_and_ends(call: Callable[[], Any], error: type[Exception]) -> None:
    """An operator that runs at once may fail with anything: it is not asked again."""
    with pytest.raises(error):
        call()
    assert torch.nonzero(on(0, 1)).tolist() == [[1]]


def _failed() -> torch.Tensor:
    return on(1.0, 2.0)[on(7)]


@pytest.mark.usefixtures("ends")
def test_a_call_behind_what_failed() -> None:
    """Of something else it is done; of what has failed it raises why, read before or not."""
    lost = _failed()
    assert torch.nonzero(on(0, 1) + 1).tolist() == [[0], [1]]
    for _ in range(2):
        with pytest.raises(MaterializationError, match="out of bounds"):
            torch.nonzero(lost + 1)
    with pytest.raises(MaterializationError):
        lost.cpu()
    with pytest.raises(MaterializationError):
        torch.nonzero(lost)


@pytest.mark.usefixtures("ends")
def test_a_call_on_what_a_failed_replay_made() -> None:
    compiled = marid.compile(lambda x, index: x.index_select(0, index))
    x = on(1.0, 2.0, 3.0)
    for _ in range(4):
        compiled(x, on(1, 2)).tolist()
    lost = compiled(x, on(1, 9))
    for _ in range(2):
        with pytest.raises(MaterializationError):
            torch.nonzero(lost)
    assert compiled(x, on(0)).tolist() == [1.0]


@pytest.mark.usefixtures("ends")
def test_calls_on_a_worker_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says so as long as there is none, and is done once there is."""
    x = on(0.0, 3.0) * 2
    x.cpu()
    connection: Any = connecting.connection_of(5)

    def none(reason: str) -> Any:
        raise WorkerLostError(f"no worker: {reason}")

    with monkeypatch.context() as patched:
        patched.setattr(connection, "reopen", none)
        end(connection.worker)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="no worker"):
                torch.nonzero(x)
            with pytest.raises(WorkerLostError, match="no worker"):
                torch.bincount(on(-1))
    assert torch.nonzero(x).tolist() == [[1]]


@pytest.mark.usefixtures("ends")
def test_a_call_on_a_lost_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have it any more: each call says so, and calls on others are done."""
    lost, fine = torch.randn(600_000).to(DEVICE), torch.arange(2, device=DEVICE)
    fine.sum().item(), lost.sum().item()
    _lose(monkeypatch)
    for _ in range(2):
        with pytest.raises(WorkerLostError, match="600000"):
            torch.nonzero(lost)
        assert torch.nonzero(fine).tolist() == [[1]]


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    "read",
    [
        lambda lost: lost[:3].tolist(),
        lambda lost: lost.sum().item(),
        lambda lost: [half.cpu() for half in lost.split(300_000)],
        lambda lost: lost.add_(1)[:1].cpu(),
    ],
)
def test_what_is_made_of_a_lost_tensor(read: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations were under way when the worker was lost."""
    lost = torch.randn(600_000).to(DEVICE)
    lost.sum().item()
    _lose(monkeypatch)
    for _ in range(2):
        with pytest.raises(WorkerLostError, match="600000"):
            read(lost)


@pytest.mark.usefixtures("ends")
def test_a_write_behind_what_needs_a_lost_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it overwrites was read by the same program, and is read again before."""
    lost, x = torch.randn(600_000).to(DEVICE), torch.arange(2.0, device=DEVICE)
    lost.sum().item(), x.sum().item()
    _lose(monkeypatch)
    y, z = x + 1, lost * 2
    run_everything(handles.tape(5), wait=False)
    x.add_(10)
    run_everything(handles.tape(5), wait=False)
    assert (x.tolist(), y.tolist()) == ([10.0, 11.0], [1.0, 2.0])
    with pytest.raises(WorkerLostError, match="600000"):
        z.sum().item()


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("device", [5, 0])
def test_a_write_behind_what_fails(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on its way when that was seen: it is done again, before what was recorded since reads its memory."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that device 0 runs ahead, too
    try:
        for turn in range(4):
            x = torch.arange(2.0).repeat(1000).to(f"remote_accelerator:{device}")
            far = torch.tensor([70_000]).to(x.device)
            x.sum().item(), far.sum().item()
            wrong = x.repeat(100).exp().sum() + x.index_select(0, far).sum()
            run_everything(handles.tape(device), wait=False)
            x.add_(10)
            run_everything(handles.tape(device), wait=False)
            y = x * 2
            if turn % 2:
                run_everything(handles.tape(device), wait=False)
            assert (x[:2].tolist(), y[:2].tolist()) == ([10.0, 11.0], [20.0, 22.0])
            with pytest.raises(MaterializationError, match="index"):
                wrong.item()
    finally:
        torch.set_num_threads(threads)


def _lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the worker, and forget what was sent to it."""
    from marid.remote.client.contents import Content

    def gone(self: Content) -> list[Any]:
        raise OSError("the disk is gone")

    connection: Any = connecting.connection_of(5)
    monkeypatch.setattr(Content, "pieces", gone)
    end(connection.worker)


def test_asking_for_a_lost_tensor_keeps_no_frames() -> None:
    """Each who asks gets an error of its own: what lives in the frames that one has passed is nobody else's affair."""
    lost = on(1.0, 2.0) * 2
    lost.cpu()
    lost._value.concrete.block.error = WorkerLostError("gone")  # pyright: ignore[reportAttributeAccessIssue]
    freed = []

    class Mine:
        def __del__(self) -> None:
            freed.append(True)

    def ask() -> None:
        mine = Mine()
        with pytest.raises(WorkerLostError, match="gone"):
            lost.cpu()
        del mine

    def ask_and_keep() -> None:
        mine = Mine()
        assert mine
        lost.cpu()

    ask()
    with contextlib.suppress(WorkerLostError):
        ask_and_keep()
    assert freed == [True, True]


_LEFT = """
import os, signal, torch, marid
from marid.remote.launch.connect import connection_of
marid.connect(workers=1)
kept = torch.ones(3, device="remote_accelerator") * 2
print(kept.tolist())
os.kill(connection_of(0).worker.process.pid, signal.SIGKILL)
"""


def test_a_worker_that_is_lost_at_the_end_is_not_replaced() -> None:
    """Nobody will read what it held."""
    done = subprocess.run([sys.executable, "-c", _LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0]\n")
    assert done.stderr == ""


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def _slow(x: torch.Tensor) -> torch.Tensor:
    for _ in range(400):
        x = torch.sin(x @ x * 1e-3)
    return x.sum()


def test_ctrl_c_again_and_again_loses_nothing() -> None:
    """What is stopped is pending again, once; the value is there for who reads it again."""
    x = torch.ones(300, 300, device=DEVICE)
    expected = _slow(x).item()
    count = torch.zeros((), device=DEVICE)
    for turn in range(6):
        y = _slow(x)
        count.add_(1)
        with interrupted(0.005 + 0.01 * turn), contextlib.suppress(KeyboardInterrupt):
            y.item()
        assert y.item() == expected
        assert count.item() == turn + 1
    assert marid.stats().pending_nodes == 0


def test_ctrl_c_with_the_answer_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has come, and is taken by whoever reads next; one that comes while the worker is stopped is too."""
    reach, left = Link.reach, 2

    def interrupted(link: Link, *args: Any) -> None:
        nonlocal left
        reach(link, *args)
        if left:
            left -= 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Link, "cancel", lambda _: None)  # too late to stop anything
    monkeypatch.setattr(Link, "reach", interrupted)
    x = on(1.0, 2.0) * 2
    with pytest.raises(KeyboardInterrupt):
        x.cpu()
    assert x.tolist() == [2.0, 4.0]
    left = 1
    with pytest.raises(KeyboardInterrupt):
        torch.nonzero(x)
    assert torch.nonzero(x).tolist() == [[0], [1]]


def test_ctrl_c_leaves_replays_alone() -> None:
    """What they write cannot be taken back: the wait ends, they do not."""
    w = torch.ones(300, 300, device=DEVICE)

    def step() -> torch.Tensor:
        w.add_(1)
        return _slow(w) * 0

    compiled = marid.compile(step)
    for _ in range(4):
        compiled()
    for _ in range(3):
        y = compiled()
        with interrupted(0.01), contextlib.suppress(KeyboardInterrupt):
            y.item()
        assert y.item() == 0
    assert torch.equal(w.cpu(), torch.full((300, 300), 8.0))


# --- what the host knows ---------------------------------------------------------------------------------------------


def test_memory_on_a_worker_is_counted() -> None:
    before = torch.remote_accelerator.memory_allocated(5)  # pyright: ignore[reportAttributeAccessIssue]
    x = on(1.0) + torch.zeros(1000, device=DEVICE)
    x.sum().item()
    after = torch.remote_accelerator.memory_allocated(5)  # pyright: ignore[reportAttributeAccessIssue]
    assert after - before >= 4000
    del x
    assert torch.remote_accelerator.memory_allocated(5) < after - 3999  # pyright: ignore[reportAttributeAccessIssue]


def test_a_long_program_goes_in_parts_and_keeps_only_what_is_needed() -> None:
    """More operations than fit into one request: what is dropped between them is freed on the worker."""
    x = torch.ones(10, device=DEVICE)
    x.sum().item()
    engine: Any = engine_of(5)
    before = engine.worker_stats()["tensors"]
    for _ in range(9000):
        x = x + 1
    assert x.sum().item() == 90_010.0
    assert engine.worker_stats()["tensors"] - before <= 1


def test_functions_that_return_what_they_are_given() -> None:
    """A program without operations."""
    compiled = marid.compile(lambda x, twice: x * 2 if twice else x)
    for value in range(1, 6):
        assert compiled(on(value), False).tolist() == [value]
        assert compiled(on(value), True).tolist() == [2 * value]
