"""Memory: nothing leaks, nothing waits for the garbage collector, and loops that never read stay bounded."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.settings import settings
from tests.helpers import DEVICE, on_both, train_step

MEGABYTE = 1 << 20


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def no_collector(nothing_alive: None) -> Iterator[None]:
    """Reference counts alone must do."""
    gc.disable()
    yield
    gc.enable()


# --- freed at once ---------------------------------------------------------------------------------------------------


def _read() -> None:
    x = torch.ones(1000, device=DEVICE)
    (x * 2).sum().item()


def _reused_program() -> None:
    for _ in range(3):
        (torch.ones(1000, device=DEVICE) * 2).sum().item()


def _lists() -> None:
    x = torch.ones(1000, device=DEVICE)
    torch.cat([x, x]).sum().item()
    torch._foreach_add_([x], 1.0)
    x.tolist()


def _several_results() -> None:
    values, _ = torch.ones(1000, device=DEVICE).sort()
    values.tolist()


def _views_and_writes() -> None:
    x = torch.zeros(10, 100, device=DEVICE)
    for row in x.unbind():
        row.add_(1)
    x.t()[3].mul_(2)
    x.sum().item()


def _data_dependent() -> None:
    x = torch.ones(1000, device=DEVICE)
    x.nonzero().sum().item()
    x[x > 0].tolist()


def _autograd() -> None:
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    x.grad.sum().item()


def _training() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Linear(10, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(4, 10, device=DEVICE)).mean()
    loss.backward()
    optimizer.step()
    loss.item()


def _transfers() -> None:
    x = torch.ones(1000).to(DEVICE)
    x.cpu(), x.numpy(), x.to(f"{DEVICE}:1").tolist()


def _never_read() -> None:
    x = torch.ones(1000, device=DEVICE)
    for _ in range(10):
        x = x * 2 + torch.randn(1000, device=DEVICE)


def _looked_at() -> None:
    x = torch.ones(1000, device=DEVICE) * 2
    repr(x), x.metadata, x.inputs, x.kwargs, x.id, x.operation, x.untyped_storage(), x.data_ptr()  # type: ignore[attr-defined]
    x.tolist()


def _captured() -> None:
    with marid.capture() as graph:
        torch.ones(1000).mul(2)
    marid.graph(torch.ones(1000, device=DEVICE) * 2).to_dot()
    del graph


def _wrong() -> None:
    x = torch.ones(1000, device=DEVICE)
    for wrong in (lambda: x.view(7), lambda: x + torch.ones(3, device=DEVICE), lambda: bool(x)):
        with contextlib.suppress(RuntimeError):
            wrong()


WORK: list[Callable[[], None]] = [
    _read,
    _reused_program,
    _lists,
    _several_results,
    _views_and_writes,
    _data_dependent,
    _autograd,
    _training,
    _transfers,
    _never_read,
    _looked_at,
    _captured,
    _wrong,
]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_memory_is_free_as_soon_as_tensors_are_dropped(work: Callable[[], None]) -> None:
    """No bytes and no pending nodes are left, without one run of the garbage collector."""
    work()
    gc.collect()  # what PyTorch itself leaves behind the first time
    before = marid.stats()
    for _ in range(2):
        work()
    after = marid.stats()
    assert (after.memory_allocated, after.pending_nodes) == (before.memory_allocated, before.pending_nodes)


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_tensor_frees_its_node_and_its_inputs() -> None:
    """Pending history goes with the last handle on it."""
    x = torch.ones(10, device=DEVICE)
    y = x * 2
    nodes = [weakref.ref(x._value), weakref.ref(y._value)]  # type: ignore[attr-defined]
    del x
    assert all(node() is not None for node in nodes)
    del y
    assert all(node() is None for node in nodes)


@pytest.mark.usefixtures("no_collector")
def test_running_frees_history() -> None:
    """A value that exists does not hold what it was computed from."""
    x = torch.ones(1000, device=DEVICE)
    source = weakref.ref(x._value)  # type: ignore[attr-defined]
    for _ in range(10):
        x = x * 2
    x.sum().item()
    assert source() is None
    before = marid.stats().memory_allocated
    del x
    assert before - marid.stats().memory_allocated == 4000


@pytest.mark.usefixtures("no_collector")
def test_intermediates_are_freed_during_the_run() -> None:
    """Of a long chain only a few buffers exist at a time."""
    device = torch.remote_accelerator  # type: ignore[attr-defined]
    x = torch.ones(1 << 20, device=DEVICE)
    for _ in range(50):
        x = x + 1
    before = _resident()
    x[0].item()
    assert _resident() - before < 60 * MEGABYTE
    assert device.memory_allocated() <= 2 * 4 * (1 << 20) + 4


@pytest.mark.usefixtures("nothing_alive")
def test_only_what_is_held_outlives_a_run() -> None:
    """Of a chain with two held links, two buffers remain; the others were dropped at their last use."""
    x = torch.ones(1000, device=DEVICE)
    before = marid.stats().memory_allocated
    links = [x := x + 1 for _ in range(20)]
    held = [links[4], links[19]]
    del links, x
    marid.materialize(held[1])
    assert held[0].materialized  # type: ignore[attr-defined]
    assert marid.stats().memory_allocated - before == 2 * 4000
    assert marid.stats().peak_memory - before <= 4 * 4000  # the held ones, and a link with the one before it


def test_what_the_last_operation_reads_does_not_outlive_it() -> None:
    """Of an intermediate that only the asked operation reads, nothing remains."""
    x = torch.ones(1000, device=DEVICE)
    marid.materialize(x)
    before = marid.stats().memory_allocated
    total = (x + 1).sum()
    marid.materialize(total)
    assert marid.stats().memory_allocated - before == 4


def test_a_long_pending_chain_is_freed_without_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping the end of 200,000 pending nodes does not overflow the stack, at a low recursion limit."""
    monkeypatch.setattr(settings, "max_pending_nodes", 10_000_000)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        x = torch.zeros(1, device=DEVICE)
        for _ in range(200_000):
            x = x + 1
        del x
        y = torch.zeros(1, device=DEVICE)
        for _ in range(20_000):
            y = y + 1
        assert y.item() == 20_000
    finally:
        sys.setrecursionlimit(limit)


# --- bounded ---------------------------------------------------------------------------------------------------------


def test_pending_bytes_cut_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that would hold more than the limit are computed before more are recorded."""
    monkeypatch.setattr(settings, "max_pending_bytes", 1 * MEGABYTE)
    held = [torch.full((1 << 16,), i, device=DEVICE) for i in range(40)]
    stats = marid.stats()
    assert stats.automatic_cuts >= 5
    assert stats.pending_bytes <= 2 * MEGABYTE
    assert [int(t[0].item()) for t in held] == list(range(40))


def test_dropped_bytes_do_not_cut_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody holds does not count."""
    monkeypatch.setattr(settings, "max_pending_bytes", 1 * MEGABYTE)
    for _ in range(100):
        torch.ones(1 << 16, device=DEVICE)
    assert marid.stats().automatic_cuts == 0
    assert marid.stats().ops_executed == 0


def test_a_loop_that_never_reads_stays_flat() -> None:
    """20,000 iterations, each with random numbers, views and writes: under 50 MB more."""

    def loop(device: str, count: int) -> list[torch.Tensor]:
        x = torch.zeros(64, device=device)
        total = torch.zeros((), device=device)
        for step in range(count):
            x = x * 0.99 + torch.randn(64, device=device)
            x[step % 8 :].mul_(0.5)
            total += x.sum()
        return [x, total]

    loop(DEVICE, 2_000)
    before = _resident()
    kept = loop(DEVICE, 20_000)
    grown = _resident() - before
    assert grown < 50 * MEGABYTE
    del kept
    on_both(lambda device: loop(device, 300))


@pytest.mark.parametrize("read", ["every step", "never"])
def test_a_training_loop_stays_flat(read: str) -> None:
    """2,000 steps of AdamW with dropout, metrics kept on the device: under 50 MB more."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = torch.zeros((), device=DEVICE)

    def steps(count: int) -> None:
        nonlocal average
        for _ in range(count):
            loss = train_step(optimizer, model(torch.randn(16, 8, device=DEVICE)).square().mean())
            average = average * 0.9 + loss * 0.1
            if read == "every step":
                loss.item()

    steps(200)
    gc.collect()
    before, built = _resident(), marid.stats().programs_built
    steps(2_000)
    assert _resident() - before < 50 * MEGABYTE
    assert marid.stats().programs_built <= built + 3
    assert average.isfinite().item()


def test_changing_shapes_keep_caches_bounded() -> None:
    """A new shape each time builds programs, but does not keep all of them."""
    for size in range(1, settings.cache_programs // 4):
        assert torch.ones(size, device=DEVICE).sum().item() == size
    before = _resident()
    for size in range(2_000, 2_000 + 2 * settings.cache_programs):
        torch.ones(size, device=DEVICE).mul(2).sum().item()
    assert _resident() - before < 50 * MEGABYTE


_GROWING = """
import torch, marid
from pathlib import Path
from torch import nn

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("remote_accelerator")
optimizer = torch.optim.AdamW(layer.parameters())
for length in range(200, 900, 2):
    loss = layer(torch.randn(1, length, 16, device="remote_accelerator")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if length % 4 == 0:
        loss.item()
    if length == 204:
        before = resident()
print(resident() - before)
"""


def test_sizes_that_never_come_again_leave_no_holes() -> None:
    """What is kept of each program keeps blocks of the heap apart; their pages go back to the system."""
    command = [sys.executable, "-c", _GROWING]
    grown = int(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert grown < 600, f"{grown} MB"


_CHANGING = """
import random
from pathlib import Path
import torch, marid

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

torch.set_num_threads(1)
numbers, seen = random.Random(0), []
for turn in range(6000):
    x = torch.ones(numbers.randint(4000, 16000), 64, device="remote_accelerator")
    ((x + 1).relu() * 2).sum().item()
    if turn % 50 == 49:
        seen.append(resident())
print(max(seen) - seen[0])
"""


@pytest.mark.conformance
def test_sizes_that_change_at_every_step_leave_no_holes() -> None:
    """However often their pages have been given back: those count as free in the heap."""
    command = [sys.executable, "-c", _CHANGING]
    grown = int(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert grown < 600, f"{grown} MB"


def test_live_metadata_of_a_pending_tensor_is_small() -> None:
    """A stamp is references to shared objects: sites and scopes are interned."""
    model = nn.Linear(2, 2).to(DEVICE)
    x = torch.ones(1, 2, device=DEVICE)
    nodes: list[Any] = [model(x)._value for _ in range(10)]
    assert len({id(node.scope) for node in nodes}) == 1
    assert len({id(node.site) for node in nodes}) == 1
