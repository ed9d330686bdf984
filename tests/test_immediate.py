"""Loops that read what little they make: their operations run at once, as they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import marid
from marid.frontend import materialize as materializing
from marid.frontend.handles import recording
from marid.frontend.handles import tape as tape_of
from marid.frontend.materialize import run_pending
from marid.native import module
from tests.helpers import DEVICE

pytestmark = pytest.mark.in_process("operations run at once in this process alone")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations run at once from here on, whatever they make."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    torch.ones(2, device=DEVICE).sum().item()


def _immediate(work: Callable[[], object]) -> int:
    """How many operations of some work run at once."""
    before = marid.stats().ops_immediate
    work()
    return marid.stats().ops_immediate - before


def test_a_loop_that_reads_what_it_makes() -> None:
    """After ``immediate_after`` turns, with the values that the CPU has."""

    def run(device: str) -> list[float]:
        x, seen = torch.linspace(-1, 1, 8).to(device), []
        for _ in range(33):
            x = (x * 1.5).sin()
            x[4:] += x[:4]
            seen.append(x.sum().item())
        return seen

    expected = run("cpu")
    found: list[float] = []
    ran = _immediate(lambda: found.extend(run(DEVICE)))
    assert found == expected
    assert 6 * 8 <= ran <= 9 * 8
    assert marid.stats().materializations <= 27


def test_a_loop_that_makes_much_is_recorded() -> None:
    x = torch.rand(300, 300, device=DEVICE)

    def run() -> None:
        y = x
        for _ in range(40):
            y = (y @ x).tanh()
            y.sum().item()

    assert _immediate(run) == 0


def test_a_loop_that_reads_much_and_makes_little_is_recorded() -> None:
    """As a decoder does, one token at a time."""
    weight, x = torch.rand(512, 512, device=DEVICE), torch.rand(1, 512, device=DEVICE)

    def run() -> None:
        for _ in range(60):
            (x @ weight)[0, 0].item()

    assert _immediate(run) == 0


def test_what_makes_much_is_recorded_again() -> None:
    x = torch.rand(4, device=DEVICE)
    for _ in range(30):
        x = x * 0.5
        x.sum().item()
    assert marid.stats().ops_immediate > 0
    big = torch.rand(2_000_000, device=DEVICE)
    for _ in range(4):
        big = big + 1
    assert not (big * 2).materialized


def test_work_that_is_read_no_more_is_recorded_again() -> None:
    x = torch.rand(4, device=DEVICE)
    for _ in range(30):
        x = x * 0.5
        x.sum().item()
    for _ in range(20_000):
        x = x + 1
    assert not (x * 2).materialized


def test_nothing_runs_where_that_is_forbidden(at_once: None) -> None:
    x = torch.rand(4, device=DEVICE)
    assert (x + 1).materialized
    with marid.no_sync():
        assert not (x + 1).materialized
    assert (x + 1).materialized


def test_what_another_thread_reads_lets_nothing_run_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose operations run at once is a matter of each thread."""
    x = torch.rand(4, device=DEVICE)
    (x + 1).sum().item()
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    other = threading.Thread(target=lambda: torch.ones(2, device=DEVICE).sum().item())
    with marid.no_sync():
        other.start()
        other.join()
        assert not (x + 1).materialized
    (x + 1).sum().item()
    assert (x + 1).materialized


def test_a_write_waits_for_readers_on_the_devices_thread(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materializing, "may_go_ahead", lambda: True)
    x = torch.ones(600, 600, device=DEVICE)
    tape = tape_of(0)
    for _ in range(8):
        tape.immediate = False
        y = x @ x
        run_pending(tape, tape.pending(), ahead=True)  # takes longer than what follows
        tape.immediate = True
        module.allow_immediate(1 << 40)
        x.fill_(0)
        assert y[3, 4].item() == 600
        x.fill_(1)
    assert marid.stats().ops_immediate > 0


def test_numbers_after_a_failed_call_are_the_cpus(at_once: None) -> None:
    """Which fails after it has drawn some."""

    def draw(device: str) -> list[list[float]]:
        torch.manual_seed(1)
        right, wrong = torch.full((40,), 0.5, device=device), torch.full((40,), 0.5, device=device)
        wrong[3] = 2
        found = []
        for p in (right, right, wrong, right, right):
            try:
                found.append(torch.bernoulli(p).tolist())
            except RuntimeError:
                found.append(torch.rand(4, device=device).tolist())
        return found

    assert _immediate(lambda: draw(DEVICE)) >= 3
    assert draw(DEVICE) == draw("cpu")


def test_numbers_after_a_draw_that_is_recorded_are_the_cpus(at_once: None) -> None:
    """Its argument is not there yet, so it does not run at once, and the generator it was given has given nothing."""

    def draw(device: str) -> list[list[float]]:
        torch.manual_seed(1)
        found, x = [], torch.full((40,), 0.5, device=device)
        for turn in range(6):
            with recording():
                p = x.mul(1)
            first = torch.bernoulli(p) if turn % 2 else x
            second = torch.rand(4, device=device)
            found += [first.tolist(), second.tolist(), torch.rand(3, device=device).tolist()]
        return found

    assert _immediate(lambda: draw(DEVICE)) >= 3
    assert draw(DEVICE) == draw("cpu")


def test_a_limit_of_memory_is_kept(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "memory_limit", 1 << 40)
    x = torch.rand(4, device=DEVICE)
    x.sum().item()
    assert not (x + 1).materialized


def test_a_function_is_recorded_whole(at_once: None) -> None:
    """``marid.compile`` makes a program of it."""

    @marid.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    for n in range(6):
        x = torch.full((3,), float(n), device=DEVICE)
        assert torch.equal(function(x).cpu(), (torch.full((3,), float(n)) * 2).exp())
    (stats,) = [one for one in marid.stats().functions if "function" in one.name]
    assert stats.replays > 0


def test_results_say_where_they_come_from(at_once: None) -> None:
    torch.rand(4, device=DEVICE).exp()  # the first is recorded
    y = torch.rand(4, device=DEVICE).exp()
    assert y.materialized
    assert y.operation == "aten::exp"
    assert y.metadata.source.rpartition("/")[2].startswith("test_immediate.py:")


def test_writes_and_views(at_once: None) -> None:
    """Aliases see writes, versions grow, and what autograd saved is protected."""
    base = torch.zeros(4, 3, device=DEVICE)
    row, flat = base[1], base.view(-1)
    row.add_(2)
    assert flat.tolist() == [0.0] * 3 + [2.0] * 3 + [0.0] * 6
    flat[::2] = 5
    assert row.tolist() == [2.0, 5.0, 2.0]
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    y = w.exp()
    z = y * y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_what_was_recorded_before_runs_first(at_once: None) -> None:
    """A write at once does not overtake a reader that has been recorded."""
    with marid.no_sync():
        x = torch.arange(4.0, device=DEVICE)
        y = x * 10
    torch.ones(2, device=DEVICE).sum().item()  # at once from here on
    x.add_(1)
    assert y.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_error_is_pytorchs_at_its_line(at_once: None) -> None:
    table = torch.rand(3, 2, device=DEVICE)
    torch.embedding(table, torch.tensor([0, 2], device=DEVICE))  # the first call of its kind is recorded
    index = torch.tensor([0, 7], device=DEVICE)
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.embedding(table, index)
    assert table.sum().item() == pytest.approx(table.cpu().sum().item())


@pytest.mark.mispredicts
def test_another_layout_than_was_recorded_reaches_nobody(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel returns is not what is known of such calls: it is recorded, laid out as recorded, and counted."""
    from marid.frontend.handles import spec
    from marid.frontend.record import recorder_of

    x = torch.rand(3, 5, device=DEVICE)
    y = x.cos()
    recorder = recorder_of(torch.ops.aten.cos.default)
    wrong = spec((3, 5), (1, 3), 0, torch.float32, 0)
    for known in recorder.known.values():
        if known.spec is y._value.spec:
            monkeypatch.setattr(known, "spec", wrong)
            monkeypatch.setattr(known, "pattern", wrong.pattern._cdata)
    z = x.cos()
    assert z.stride() == (1, 3)
    assert torch.equal(z.cpu(), x.cpu().cos())


@pytest.mark.parametrize("kind", ["batch norm", "dropout", "adam", "gru"])
def test_training_is_the_cpus(at_once: None, kind: str) -> None:
    """Steps with operators that draw, keep statistics, or write many tensors at once."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers: dict[str, Callable[[], nn.Module]] = {
            "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Softmax(-1)),
            "adam": lambda: nn.Linear(6, 3),
            "gru": lambda: nn.GRU(6, 5, batch_first=True),
        }
        model = layers[kind]()
        x = torch.randn((4, 2, 6, 6) if kind == "batch norm" else (4, 3, 6))
        model, x = model.to(device), x.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(6):
            out = model(x)
            loss = (out[0] if isinstance(out, tuple) else out).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(torch.tensor(loss.item()))
        return losses + [value.detach().cpu() for value in model.state_dict().values()]

    for one, other in zip(train(DEVICE), train("cpu"), strict=True):
        assert torch.equal(one, other)
