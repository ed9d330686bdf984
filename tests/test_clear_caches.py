"""``marid.clear_caches()`` (``clear_graph_caches()`` of source document 003)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import marid
from marid.frontend import record
from marid.frontend.engines import local_engine
from marid.native import module
from tests.helpers import DEVICE, on_both, train_step


def _step(x: torch.Tensor) -> torch.Tensor:
    return ((x @ x).relu() + 1).sum()


@pytest.mark.in_process("looks at the memory of the in-process engine")
def test_document_003_programs_plans_and_pools_are_given_back() -> None:
    """The next run builds its program once, and those after it reuse that; values are the same."""
    x = torch.randn(1000, 1000, device=DEVICE)
    expected = [_step(x).item() for _ in range(5)][-1]
    engine = local_engine
    assert len(engine.programs) > 0
    assert engine.arena.nbytes > 0
    assert module.memory_cached() > 0
    known = sum(len(one.known) for one in record._recorders.values())
    assert known > 0

    marid.clear_caches()
    assert len(engine.programs) == 0
    assert engine.arena.nbytes == 0
    assert module.memory_cached() == 0
    assert not any(one.known for one in record._recorders.values())

    before = marid.stats()
    assert [_step(x).item() for _ in range(3)] == [expected] * 3
    after = marid.stats()
    assert after.programs_built - before.programs_built == 1
    assert after.programs_reused - before.programs_reused == 2


def test_what_is_pending_and_what_there_is_stays() -> None:
    """Recorded operations run afterwards, and writes, views and gradients come out as in eager PyTorch."""

    def run(device: str) -> list[torch.Tensor]:
        x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
        y = (x * 2).sum(0)
        z = x.detach()[0]
        if device == DEVICE:
            marid.clear_caches()
        z.add_(1)
        y.square().sum().backward()
        assert x.grad is not None
        return [x.detach(), y.detach(), z, x.grad]

    on_both(run)


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    """Each step after another clearing, with random numbers, running ahead and running at once as they come."""

    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).to(device)
        torch.manual_seed(1)
        losses = []
        for turn in range(24):
            losses.append(train_step(optimizer, model(x).square().mean()).item())
            if device == DEVICE and turn % 3 == 2:
                marid.clear_caches()
        return losses

    on_both(train)


def test_functions_under_marid_compile_record_again() -> None:
    """Their recordings are forgotten with the programs that they hold."""
    function = marid.compile(_step)
    x = torch.randn(16, 16, device=DEVICE)
    expected = [function(x).item() for _ in range(4)][-1]
    assert function.stats().replays > 0
    recordings = function.stats().recordings
    marid.clear_caches()
    assert function.stats().recordings == recordings
    replays = function.stats().replays
    assert [function(x).item() for _ in range(4)] == [expected] * 4
    assert function.stats().recordings == 2 * recordings
    assert function.stats().replays > replays


def test_caches_are_cleared_while_other_threads_run() -> None:
    """They wait for each other, and every value is right."""
    wrong: list[float] = []
    stop = threading.Event()

    def work(seed: float) -> None:
        x = torch.full((32, 32), seed, device=DEVICE)
        while not stop.is_set():
            value = (x + 1).sum().item()
            if value != (seed + 1) * 1024:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        marid.clear_caches()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
