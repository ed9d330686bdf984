"""``marid.settings.memory_limit``: what does not fit is refused before it runs, and the forecast is right."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import marid
from marid.errors import MemoryLimitError
from marid.frontend import handles
from marid.frontend.materialize import bytes_of, pending_nodes
from marid.graph.analysis import forecast
from marid.graph.program import bind
from tests.helpers import DEVICE, assert_same

MIB = 1 << 20


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """10 MiB more than what other tests have left on the device."""
    gc.collect()
    room = bytes_of(range(handles.device_count)) + 10 * MIB
    monkeypatch.setattr(marid.settings, "memory_limit", room)
    return room


def _mebibytes(count: int) -> torch.Tensor:
    return torch.ones(count, MIB // 4, device=DEVICE)


@pytest.mark.usefixtures("limit")
def test_what_does_not_fit_is_refused_and_says_what_is_large() -> None:
    """Nothing has run, and the same value can be read once there is room."""
    before = marid.stats().ops_executed
    large = _mebibytes(6) + 1
    total = (large * 2).sum()  # 6 MiB each: two of them at once are too many
    with pytest.raises(MemoryLimitError, match=r"would take 12\.0 MiB at once.*leaves 10\.0 MiB") as caught:
        total.item()
    lines = str(caught.value).splitlines()
    assert any("6.0 MiB" in line and "aten::add" in line and __file__ in line for line in lines)
    assert any("read at" in line and __file__ in line for line in lines)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert marid.stats().ops_executed == before
    del large
    with pytest.raises(MemoryLimitError):
        total.item()
    marid.settings.memory_limit += 3 * MIB
    assert total.item() == 6 * MIB


@pytest.mark.usefixtures("limit")
def test_what_is_resident_counts() -> None:
    """Until it is dropped."""
    kept = _mebibytes(7)
    marid.materialize(kept)
    other = _mebibytes(4)
    with pytest.raises(MemoryLimitError, match=r"leaves 3\.0 MiB"):
        marid.materialize(other)
    del kept
    assert_same(other, torch.ones(4, MIB // 4))


@pytest.mark.usefixtures("limit")
def test_long_chains_fit() -> None:
    """Results die at their last use."""
    x = _mebibytes(4)
    for _ in range(50):
        x = x * 1.0
    assert_same(x, torch.ones(4, MIB // 4))


@pytest.mark.usefixtures("limit")
def test_a_tape_that_is_run_because_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that happens to be there does not raise; the one that waits does."""
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 16)
    kept = [_mebibytes(2) for _ in range(40)]
    with pytest.raises(MemoryLimitError):
        torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    del kept[3:]
    assert_same(kept, [torch.ones(2, MIB // 4)] * 3)


def _read_twice(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return y * (y * 2 + 3)


FORECASTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "one result": (lambda x: x + 1, MIB),
    "an argument and a result": (lambda x: (x + 1) * 2, 2 * MIB),
    "a chain": (lambda x: ((x + 1) * 2 + 3) * 4, 2 * MIB),
    "one that is read again": (_read_twice, 3 * MIB),
    "a view of what is dropped": (lambda x: (x + 1).view(-1)[:5] * 2, MIB + 20),
    "writes": (lambda x: (x + 1).add_(1).mul_(2), MIB),
    "a view": (lambda x: (x + 1).t().sum(), MIB + 4),
    "a view of an input": (lambda x: x.t(), 0),
    "one of several results": (lambda x: torch.topk(x, 2).values, 8),
}


@pytest.mark.parametrize("name", FORECASTS)
def test_the_forecast_counts_memory_not_tensors(name: str) -> None:
    """Views and writes take nothing; a view keeps what it lies in; what is used later stays."""
    function, expected = FORECASTS[name]
    x = _mebibytes(1)
    marid.materialize(x)
    result = function(x)
    task = bind(handles.tape(0).cut(pending_nodes(result)))
    assert forecast(task.build(), task.specs).nbytes == expected
