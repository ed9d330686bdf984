"""The device's own thread: work runs there while recording goes on, before it is asked for where it surely will be."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.frontend import ahead, handles, materialize
from marid.frontend.engines import local_engine as engine
from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Draw
from marid.native import module
from tests.helpers import DEVICE, interrupted

pytestmark = [
    pytest.mark.in_process("is about the in-process engine's own thread"),
]

LOOPS = 12


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "_processors", lambda: 1 << 20)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    for index in range(handles.device_count):
        handles.tape(index).chunk = 0
    yield
    torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    for index in range(handles.device_count):
        handles.tape(index).chunk = 0


def _model(device: str) -> Callable[[], torch.Tensor]:
    """A training step with enough operations to be cut in chunks, dropout and a write that is read later."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 16).to(device)
    count = torch.zeros((), device=device)
    torch.manual_seed(1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() + count * 0.1
        loss.backward()
        optimizer.step()
        count.add_(1)
        return loss

    return step


@pytest.fixture(params=["spare", "none"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a processor to spare, a loop runs ahead; without, as one program at its read."""
    if request.param == "none":
        monkeypatch.setattr(ahead, "_processors", torch.get_num_threads)


def _flights() -> int:
    return len(engine._flights)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loop_runs_ahead_and_gives_eager_losses() -> None:
    """Read at the end of each step: from the third on, chunks are handed over while the rest is recorded."""
    step = _model("cpu")
    losses = [step().item() for _ in range(LOOPS)]
    step, chunks = _model(DEVICE), []
    for expected in losses:
        loss = step()
        chunks.append(bool(handles.tape(0).chunk))
        assert loss.item() == expected
    assert chunks[:2] == [False, False]
    assert all(chunks[4:])
    assert marid.stats().pending_nodes == 0


def test_an_optimizers_step_runs_with_the_first_value_that_is_read_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all else that is pending: a training loop has two programs, that of its first turn and that of all others.
    Without an optimizer's step nothing runs that is not needed, however much is pending."""
    monkeypatch.setattr(ahead, "_processors", torch.get_num_threads)

    def train(device: str, steps: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(8)]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12).reshape(3, 4).to(device)
        before, losses = marid.stats().programs_built, []
        for _ in range(6):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if steps:
                optimizer.step()
            losses.append(loss.item())
            if device == DEVICE:
                pending = len(handles.tape(0).pending())
                assert (pending == 0) == steps or len(losses) > 2
        return losses, marid.stats().programs_built - before

    for steps in (True, False):
        materialize._read_loops[0]._lines.clear()
        expected, _ = train("cpu", steps)
        losses, built = train(DEVICE, steps)
        assert losses == expected
        assert built == 2 or not steps


def test_what_cannot_be_done_on_the_devices_thread_is_done_on_the_users(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So is what waits behind it: it counted as run, and somebody reads it."""
    at, refused = MersenneTwisters.at, []

    def at_home(self: MersenneTwisters, draw: Draw) -> torch.Generator:
        if module.queue_is_here():
            refused.append(draw)
            time.sleep(0.05)  # by then somebody waits for what comes after it
            raise RuntimeError("not here")
        return at(self, draw)

    step = _model("cpu")
    losses = [step().item() for _ in range(LOOPS)]
    monkeypatch.setattr(MersenneTwisters, "at", at_home)
    step = _model(DEVICE)
    with caplog.at_level(logging.CRITICAL, logger="marid"):
        assert [step().item() for _ in range(LOOPS)] == losses
    assert refused


def test_reads_at_several_places_and_of_other_tensors() -> None:
    """Values read early, late, twice, and never."""

    def run(device: str) -> list[Any]:
        step = _model(device)
        seen: list[Any] = []
        kept = []
        for index in range(LOOPS):
            loss = step()
            seen.append(loss.item())
            kept.append(loss * 2)
            if index % 3 == 0:
                seen.append(float(loss + 1))
        return [seen, [k.item() for k in kept]]

    assert run(DEVICE) == run("cpu")


def test_what_is_not_read_is_not_run_ahead() -> None:
    """A loop of which half is never needed waits to be asked."""
    x = torch.ones(8, device=DEVICE)
    kept = []
    marid.reset_stats()
    for _ in range(LOOPS):
        y, unread = x, x
        for _ in range(50):
            y, unread = y * 1.5, unread + 1
        kept.append(unread)
        y.sum().item()
    assert marid.stats().ops_executed == LOOPS * 51 + 1
    assert all(not tensor.materialized for tensor in kept)


@pytest.mark.parametrize("hold", [marid.no_sync, marid.capture])
def test_blocks_in_which_nothing_runs_ahead(hold: Callable[[], Any]) -> None:
    """``no_sync`` and ``capture`` see all that is recorded in them, in a loop that runs ahead too."""
    step = _model(DEVICE)
    for _ in range(5):
        step().item()
    torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    before = marid.stats()
    with hold():
        kept = step()
        assert marid.stats().ops_executed == before.ops_executed
    assert not kept.materialized


def _failing(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x
    for position in range(100):
        y = y * 1.01
        if position == 40:
            y = y + x.index_select(0, index)
    return y


@pytest.mark.usefixtures("processor")
def test_an_error_is_raised_where_its_value_is_read() -> None:
    """In the middle of a loop that runs ahead, with both lines; what does not depend on it is right, and the loop goes
    on."""
    x = torch.arange(4.0, device=DEVICE)
    good, bad = (torch.tensor([0, 1, 2, at]) for at in (3, 7))
    plain = _failing(x.cpu(), good)
    for turn in range(LOOPS):
        other = x
        for _ in range(30):
            other = other + 1
        result = _failing(x, (bad if turn == 8 else good).to(DEVICE))
        if turn == 8:
            with pytest.raises(marid.errors.MaterializationError, match="index_select") as raised:
                result.tolist()
            assert "_failing" in str(raised.value) or "test_asynchronous.py" in str(raised.value)
            assert str(raised.value).count("test_asynchronous.py") == 2
            with pytest.raises(IndexError):
                result.sum().item()
        else:
            assert torch.equal(result.cpu(), plain)
        assert torch.equal(other.cpu(), x.cpu() + 30)


@pytest.mark.usefixtures("processor")
def test_an_error_that_nobody_reads_stops_nothing() -> None:
    """It waits, with its operation, for a reader that never comes."""
    x, bad = torch.arange(4.0, device=DEVICE), torch.tensor([9]).to(DEVICE)
    for turn in range(LOOPS):
        y = x
        for _ in range(80):
            y = y + 1
        if turn == 7:
            lost = x.index_select(0, bad)
            z = lost * 2
        assert y.sum().item() == x.cpu().sum().item() + 80 * 4
    with pytest.raises(marid.errors.MaterializationError):
        z.tolist()


def test_ctrl_c_while_waiting() -> None:
    """The wait ends at once, the work does not: the value is there for who reads it again."""
    x = torch.ones(400, 400, device=DEVICE)

    def work() -> torch.Tensor:
        y = x
        for _ in range(300):
            y = torch.sin(y @ x * 1e-3)
        return y.sum()

    expected = [work().item() for _ in range(6)][-1]
    y = work()
    started = time.perf_counter()
    with interrupted(0.05), pytest.raises(KeyboardInterrupt):
        y.item()
    assert time.perf_counter() - started < 5
    assert y.item() == expected


def test_many_threads_record_and_read_at_once() -> None:
    """Each its own loop on one device, and all of them one tensor."""
    shared = torch.arange(64.0, device=DEVICE)
    errors: list[BaseException] = []

    def loop(seed: int) -> None:
        try:
            x = torch.full((64,), float(seed), device=DEVICE)
            plain = x.cpu()
            for _ in range(LOOPS):
                for _ in range(40):
                    x = (x + shared).sin()
                    plain = (plain + torch.arange(64.0)).sin()
                assert torch.equal(x.cpu(), plain)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors


def test_a_fork_while_work_is_in_flight() -> None:
    """The child has its values, and a thread of its own."""
    x = torch.rand(64, device=DEVICE)

    def work(times: int) -> torch.Tensor:
        y = x
        for _ in range(times):
            y = (y * 1.01).sin()
        return y.sum()

    expected = [work(100).item() for _ in range(5)][-1]
    result = work(100)
    child = os.fork()
    if child == 0:
        same = [result.item(), *(work(100).item() for _ in range(5))]
        os._exit(0 if set(same) == {expected} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert result.item() == work(100).item() == expected


def test_warnings_of_kernels_come_to_the_line_that_waits() -> None:
    """And are errors there if the filters say so, with the results safe."""
    x = torch.ones(1, device=DEVICE)

    def work() -> torch.Tensor:
        y = x
        for _ in range(70):
            y = y * 1
        return y.var() + y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            work().tolist()
    result = work()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="degrees of freedom"):
            result.tolist()
    assert math.isnan(result.item())


def test_the_settings_of_a_thread_go_with_its_work() -> None:
    """The number of threads and the treatment of denormal numbers are those where the work was asked for."""
    tiny = torch.tensor([1e-40]).to(DEVICE)

    def halves() -> float:
        y = tiny
        for _ in range(3):
            y = y * 0.5
        return y.item()

    assert halves() == halves() == halves() != 0
    if torch.set_flush_denormal(True):
        try:
            assert halves() == 0
        finally:
            torch.set_flush_denormal(False)
        assert halves() != 0


def test_loops_that_never_read_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In nodes, in flights and in memory."""
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 1000)
    x = torch.zeros(1000, device=DEVICE)
    most = 0
    for _ in range(6000):
        x = x + 1
        most = max(most, _flights())
    assert most <= 16
    assert marid.stats().pending_nodes <= 1000
    assert x.sum().item() == 6000 * 1000


def test_a_write_to_what_is_in_flight() -> None:
    """Reading, writing and viewing values whose flights may not have landed."""

    def run(device: str) -> list[Any]:
        x = torch.zeros(8, device=device)
        seen = []
        for turn in range(LOOPS):
            view = x[2:5]
            for _ in range(70):
                x += 1
            view.mul_(0.5)
            seen.append(view.sum().item())
            x[0] = turn
            seen.append(x.tolist())
        return seen

    assert run(DEVICE) == run("cpu")


def test_without_a_processor_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that use every processor are not disturbed."""
    monkeypatch.setattr(ahead, "_processors", torch.get_num_threads)
    step = _model(DEVICE)
    for _ in range(6):
        step().item()
        assert _flights() == 0
        assert not handles.tape(0).chunk


def test_large_results_are_not_held_from_chunk_to_chunk() -> None:
    """Recording them takes no time beside their kernels."""
    x = torch.ones(512, 2048, device=DEVICE)
    for _ in range(6):
        y = x
        for _ in range(80):
            y = y * 2
        y[0, 0].item()
        assert not handles.tape(0).chunk


def test_without_it() -> None:
    """``asynchronous = False`` runs everything on the thread that reads."""
    before = marid.settings.asynchronous
    marid.settings.asynchronous = False
    try:
        step = _model("cpu")
        losses = [step().item() for _ in range(6)]
        step = _model(DEVICE)
        for expected in losses:
            assert step().item() == expected
            assert _flights() == 0
            assert not handles.tape(0).chunk
    finally:
        marid.settings.asynchronous = before
