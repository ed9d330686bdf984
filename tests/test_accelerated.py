"""The engine of a process for an accelerator of its machine, which the processor plays: ``pytest --captured`` runs any
test on it, and ``tests/test_cuda.py`` is for a real one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.engine.accelerated import AcceleratedEngine
from marid.errors import MaterializationError
from marid.frontend.engines import assign, local_engine
from tests.helpers import DEVICE, assert_same
from tests.simulated_graphs import Apart

THERE = f"{DEVICE}:3"


class _Counting(Apart):
    """Counts what is waited for."""

    waits = uploads = 0

    def wait(self) -> bool:
        self.waits += 1
        return True

    def wait_for_uploads(self) -> None:
        self.uploads += 1


@pytest.fixture
def engine() -> Iterator[AcceleratedEngine]:
    made = _Counting.engine()
    assign([(3, made)])
    yield made
    assign([(3, local_engine)])


def _trained(device: str, steps: int = 8) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 4)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(5, 3, 8).to(device), torch.randint(4, (5,)).to(device)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *[one.detach().cpu() for one in (*model.parameters(), *model.buffers())]]


def test_training_is_captured_and_the_cpus(engine: AcceleratedEngine) -> None:
    for found, expected in zip(_trained(THERE), _trained("cpu"), strict=True):
        assert_same(torch.as_tensor(found), torch.as_tensor(expected))
    assert engine.captured.replays > 0
    assert marid.stats().fallbacks == {}


def test_a_read_waits_and_running_does_not(engine: AcceleratedEngine) -> None:
    device: Any = engine.accelerator
    engine.upload(torch.ones(4))
    assert device.uploads == 1
    x = torch.ones(4).to(THERE)
    y = x + 1
    marid.materialize(y)
    assert device.waits == 0
    assert y.tolist() == [2.0] * 4
    assert device.waits == 1
    torch.remote_accelerator.synchronize(THERE)
    assert device.waits > 1


def test_what_was_uploaded_and_downloaded_is_a_copy(engine: AcceleratedEngine) -> None:
    source = torch.arange(6.0)
    there = source.to(THERE)
    source.zero_()
    here = there.cpu()
    there += 1
    assert (here.tolist(), there.tolist()) == ([0.0, 1, 2, 3, 4, 5], [1.0, 2, 3, 4, 5, 6])


def test_files_have_memory_once(engine: AcceleratedEngine) -> None:
    """Also where what is saved has yet to run, and not of memory that was written since it was saved last."""
    x = torch.randn(4, 6).to(THERE)
    for _ in range(2):
        file = io.BytesIO()
        torch.save([x, x.t(), x[1]], file)
        file.seek(0)
        whole, turned, row = torch.load(file, map_location="cpu")
        assert_same(whole, x.cpu())
        whole.fill_(7)
        assert turned.eq(7).all()
        assert row.eq(7).all()
        x *= 2


def test_an_error_names_the_line_and_ends_nothing(engine: AcceleratedEngine) -> None:
    x, indices = torch.ones(3).to(THERE), torch.tensor([5]).to(THERE)
    bad = x[indices]
    with pytest.raises(MaterializationError, match=r"test_accelerated\.py"):
        bad.item()
    assert x.sum().item() == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_makes_the_device_ready_again(engine: AcceleratedEngine) -> None:
    """Where PyTorch refuses that, as on CUDA, it says so at once."""
    x = torch.ones(3).to(THERE)
    assert x.sum().item() == 3
    pid = os.fork()
    if not pid:
        os._exit(0 if "accelerator" not in engine.__dict__ else 1)
    assert os.waitpid(pid, 0)[1] == 0
