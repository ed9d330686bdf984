"""``marid.on_record``, ``on_build``, ``on_run`` and ``on_materialize``: what tools are told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid.frontend import handles
from tests.helpers import DEVICE
from tests.remote_helpers import connected

pytestmark = pytest.mark.in_process("one test has a worker of its own")
HOOKS = [marid.on_record, marid.on_build, marid.on_run, marid.on_materialize]


def line(marker: str) -> str:
    """``file:line`` of the line in this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{__file__}:{found}"


def test_each_operation_is_told_with_module_phase_and_line() -> None:
    """Fast path, slow path, backward and what runs at once because its shape depends on data."""
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(DEVICE)
    x = torch.ones(2, 3, device=DEVICE)
    events: list[Any] = []
    with marid.on_record(events.append):
        for _ in range(3):
            y = layer(x)
            y.sum().backward()  # backward
        y.nonzero()
    x.mul(2)
    assert [e.module_path for e in events if e.operator == "aten::addmm"] == ["0"] * 3
    backward = [e for e in events if e.phase == "backward"]
    assert {e.source for e in backward} == {line("backward")}
    assert {"aten::mm", "aten::t", "aten::sum"} <= {e.operator for e in backward}
    assert "aten::nonzero" in {e.operator for e in events}
    assert "aten::mul" not in {e.operator for e in events}


def test_a_program_is_told_when_it_is_built_and_when_it_runs() -> None:
    built: list[Any] = []
    ran: list[Any] = []
    waited: list[Any] = []
    with marid.on_build(built.append), marid.on_run(ran.append), marid.on_materialize(waited.append):
        for _ in range(3):
            x = torch.full((7, 3), 2.0, device=DEVICE)
            x.tanh().erfinv().sum().item()  # read
    assert [e.source for e in built] == [line("read")]
    assert built[0].operators == ("aten::full", "aten::tanh", "aten::erfinv", "aten::sum")
    assert [e.operators for e in ran] == [built[0].operators] * 3
    assert all(e.queued <= e.began < e.ended and e.lane in ("user", "device") for e in ran)
    assert [(e.reason, e.source) for e in waited] == [("item()", line("read"))] * 3


def test_what_runs_ahead_is_told_by_the_thread_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marid.frontend.materialize.may_go_ahead", lambda: True)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    events: list[Any] = []
    threads: set[int] = set()

    def listen(event: Any) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    w = torch.ones(32, 32, device=DEVICE)
    with marid.on_run(listen):
        for _ in range(8):
            x = w
            for _ in range(100):
                x = (x @ w).mul(1 / 32)
            x.sum().item()
    assert {event.lane for event in events} == {"user", "device"}
    assert threads == {threading.get_ident()}
    assert all(event.queued <= event.began < event.ended for event in events)


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_listener_raises_reaches_the_line_and_nothing_is_lost(
    hook: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values afterwards are those of eager PyTorch, also of what was written in place."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)

    def fails(event: Any) -> None:
        raise ZeroDivisionError("of the listener")

    x = torch.arange(12.0, device=DEVICE)
    expected = torch.arange(12.0)
    marid.materialize(x)
    for _ in range(1 if hook is marid.on_build else 3):
        with hook(fails), pytest.raises(ZeroDivisionError, match="of the listener") as raised:
            x.mul_(3).cosh_().add_(x.sum()).sum().item()  # raises
        assert f"{raised.traceback[0].path}:{raised.traceback[0].lineno + 1}" == line("raises")
        if hook is not marid.on_record:  # there the first operation was not recorded
            expected.mul_(3).cosh_().add_(expected.sum())
        assert x.tolist() == pytest.approx(expected.tolist(), nan_ok=True)
        x.fill_(0.5), expected.fill_(0.5)


def test_random_numbers_are_not_lost_with_an_operation_that_was_not_recorded() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)

    def fails(event: Any) -> None:
        raise ZeroDivisionError

    torch.manual_seed(3)
    with marid.on_record(fails), pytest.raises(ZeroDivisionError):
        torch.rand(4, device=DEVICE)
    assert torch.rand(4, device=DEVICE).tolist() == expected.tolist()


def test_a_listener_may_use_tensors_and_is_not_told_of_that() -> None:
    values: list[Any] = []
    w = torch.ones(3, device=DEVICE)

    def listen(event: Any) -> None:
        values.append(w.exp().sum().item())

    handles_ = [hook(listen) for hook in HOOKS]
    (torch.ones(5, device=DEVICE) * 2).sum().item()
    for handle in handles_:
        handle.remove()
    assert len(values) >= 6
    assert len(set(values)) == 1


def test_removing() -> None:
    """Twice does nothing, and of two listeners that are one function one is left."""
    events: list[Any] = []
    first, second = marid.on_run(events.append), marid.on_run(events.append)
    first.remove()
    first.remove()
    torch.ones(3, device=DEVICE).sum().item()
    assert len(events) == 1
    second.remove()
    torch.ones(3, device=DEVICE).sum().item()
    assert len(events) == 1
    with pytest.raises(TypeError, match="callable"):
        marid.on_run(3)  # pyright: ignore[reportArgumentType]


def test_operations_are_recorded_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they would run at once; and run at once again afterwards."""
    monkeypatch.setattr(marid.settings, "immediate_after", 2)
    x = torch.ones(4, device=DEVICE)

    def turn() -> None:
        x.mul(2).add(1).sum().item()

    for _ in range(8):
        turn()
    assert handles.tape(0).immediate
    events: list[Any] = []
    with marid.on_record(events.append):
        for _ in range(3):
            turn()
    assert [e.operator for e in events].count("aten::mul") == 3
    handles.tape(0).immediate = False


def test_a_worker_is_a_lane() -> None:
    with connected(6):
        built: list[Any] = []
        ran: list[Any] = []
        with marid.on_run(ran.append), marid.on_build(built.append):
            for _ in range(2):
                torch.full((3,), 0.25, device=f"{DEVICE}:6").acos().sum().item()
        assert [event.lane for event in ran] == ["worker 6"] * 2
        assert all(event.operators[-1] == "aten::sum" and event.seconds > 0 for event in ran)
        assert len(built) == 1


def test_intercepts_are_printed_where_logging_is_not_set_up() -> None:
    program = "import torch, marid\nx = torch.ones(2, device='remote_accelerator')\nfor _ in range(3):\n    x = x * 2\n"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MARID_LOG_INTERCEPTS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("recorded aten::mul at <string>:4") == 3
