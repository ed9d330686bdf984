"""``marid.settings.profile_operators``: what operations take, by module and line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import marid
from marid.frontend.engines import local_engine as engine
from marid.report import operator_times
from tests.helpers import DEVICE

pytestmark = pytest.mark.in_process("operations on a worker are not timed one by one")


@pytest.fixture(autouse=True)
def _from_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    monkeypatch.setattr(marid.settings, "profile_operators", True)
    marid.reset_stats()
    yield
    marid.reset_stats()


def line(marker: str) -> str:
    """``file:line`` of the line in this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{__file__}:{found}"


def counts() -> Counter[str]:
    found: Counter[str] = Counter()
    for row in marid.stats().operators:
        found[row.operator] += row.count
    return found


def test_every_operation_that_runs_is_counted_at_its_line_and_module() -> None:
    """In the loop of the first run, and in the table of the later ones: as many as recorded, and in the time of the
    whole."""
    x = torch.ones(64, 64, device=DEVICE)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(DEVICE)
    marid.materialize(x, *layer.parameters())
    marid.reset_stats()
    started = time.perf_counter()
    for _ in range(5):
        layer(x).relu().sum().backward()  # forward
        marid.materialize(*[p.grad for p in layer.parameters()])
        layer.zero_grad()
    wall = time.perf_counter() - started
    stats = marid.stats()
    assert sum(row.count for row in stats.operators) == stats.ops_executed
    assert 0 < sum(row.seconds for row in stats.operators) < wall
    linear = [row for row in stats.operators if row.operator == "aten::addmm"]
    assert {(row.module_path, row.phase, row.count, row.source) for row in linear} == {
        (name, "forward", 5, line("forward")) for name in ("0", "1")
    }
    assert all(row.bytes == 5 * 4 * (3 * 64 * 64 + 64) for row in linear)
    assert any(row.phase == "backward" and row.operator == "aten::mm" for row in stats.operators)
    assert [row.seconds for row in stats.operators] == sorted((row.seconds for row in stats.operators), reverse=True)


def test_what_takes_long_is_first() -> None:
    x = torch.randn(256, 256, device=DEVICE)
    for _ in range(4):
        torch.linalg.matrix_exp(x @ x).add(1).sum().item()
    first = marid.stats().operators[0]
    assert first.operator == "aten::linalg_matrix_exp"
    assert first.seconds > 0.5 * sum(row.seconds for row in marid.stats().operators)


def test_one_program_from_two_lines_is_told_apart() -> None:
    x = torch.ones(9, device=DEVICE)
    marid.materialize(x)
    marid.reset_stats()
    for _ in range(3):
        x.tan().tolist()  # one
        x.tan().tolist()  # other
    assert marid.stats().programs_built == 1
    assert {(row.source, row.count) for row in marid.stats().operators} == {(line("one"), 3), (line("other"), 3)}


def test_on_the_thread_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marid.frontend.materialize.may_go_ahead", lambda: True)
    w = torch.ones(32, 32, device=DEVICE)
    marid.materialize(w)
    marid.reset_stats()
    lanes = set()
    with marid.on_run(lambda event: lanes.add(event.lane)):
        for _ in range(8):
            x = w
            for _ in range(100):
                x = (x @ w).mul(1 / 32)
            x.sum().item()
    assert "device" in lanes
    assert counts() == {"aten::mm": 800, "aten::mul": 800, "aten::sum": 8}


def test_random_numbers_and_errors_in_between() -> None:
    """Runs that stop: for a generator, and where an operation raises."""
    x = torch.ones(4, 4, device=DEVICE)
    for _ in range(3):
        (torch.rand(4, 4, device=DEVICE) + x).sum().item()
    assert counts()["aten::rand"] == 3
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"out of range|out of bounds"):
            x.cosh().index_select(0, torch.tensor([9], device=DEVICE)).sum().item()
    assert counts()["aten::index_select"] == 0


def test_nothing_when_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "profile_operators", False)
    (torch.ones(4, device=DEVICE) * 2).sum().item()
    assert marid.stats().operators == []


def test_sums_are_merged_by_line_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_times, "_PROFILES", 3)
    x = torch.ones(40, device=DEVICE)
    marid.materialize(x)
    marid.reset_stats()
    for size in [*range(2, 12), *range(2, 12)]:
        x[:size].tan().sum().item()
    assert counts() == {"aten::slice": 20, "aten::tan": 20, "aten::sum": 20}


def test_a_profiler_of_pytorch_shows_operations_with_their_modules() -> None:
    """In the first run, and in the table: within a range that names module and line."""
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).to(DEVICE)
    x = torch.ones(4, 16, device=DEVICE)
    marid.materialize(x, *layer.parameters())
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layer(x).sum().item()  # profiled
        ranges = [event for event in profile.events() if event.name.startswith("marid: ")]
        label = f"marid: forward 0 at {line('profiled')}"
        of_linear = [event for event in ranges if event.name == label]
        inside = [event.name for event in profile.events() if any(_is_within(event, one) for one in of_linear)]
        assert "aten::addmm" in inside
        assert f"marid: forward 1 at {line('profiled')}" in {event.name for event in ranges}


def _is_within(event: Any, outer: Any) -> bool:
    return outer.time_range.start <= event.time_range.start and event.time_range.end <= outer.time_range.end


def test_readings_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(50, device=DEVICE)
    marid.materialize(x)
    seen: list[np.ndarray] = []
    monkeypatch.setattr(operator_times.operator_times, "traced", 1)
    with marid.on_run(lambda event: seen.append((event.began, event.timing.spans, event.ended))):
        for _ in range(3):
            x.exp().mul(2).tan().sum().item()
    for began, spans, ended in seen:
        assert (np.diff(spans) >= 0).all()
        assert began <= spans[0] / 1e9 <= spans[-1] / 1e9 <= ended
