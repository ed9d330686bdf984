"""Planned memory: programs that repeat put their blocks in one slab, and nothing that anybody holds is ever in it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.engine.inprocess import InProcessEngine
from marid.execute.arena import Placement
from marid.execute.memory_plan import MemoryPlan, Trace, plan
from marid.frontend.engines import local_engine as engine
from marid.native import module
from tests.helpers import DEVICE, assert_same, on_both, seeded, train_step

pytestmark = [
    pytest.mark.in_process("reads the memory plans of the in-process engine"),
]

PROGRAMS = 2_000
CONFORMANCE_PROGRAMS = 100_000


@pytest.fixture(autouse=True)
def every_program_is_planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    marid.reset_stats()
    yield
    torch.remote_accelerator.empty_cache()


# --- placing -------------------------------------------------------------------------------------------------------


def _random_trace(rng: random.Random) -> Trace:
    """Blocks of random sizes and lifetimes; some outlive the run."""
    alive: list[int] = []
    sizes: list[int] = []
    events: list[int] = []
    for _ in range(rng.randrange(1, 40)):
        if alive and rng.random() < 0.45:
            events.append(~alive.pop(rng.randrange(len(alive))))
        else:
            alive.append(len(sizes))
            events.append(len(sizes))
            sizes.append(rng.choice([1, 63, 64, 65, 4096, rng.randrange(1, 1 << 20)]))
    while alive and rng.random() < 0.9:
        events.append(~alive.pop())
    return Trace(sizes, events)


def _check(trace: Trace) -> None:
    found = plan(trace)
    living: dict[int, tuple[int, int]] = {}
    for event in trace.events:
        if event < 0:
            living.pop(~event, None)
            continue
        offset = found.offsets[event]
        if ~event not in trace.events:
            assert offset == -1
            continue
        assert offset >= 0
        assert offset % 64 == 0
        end = offset + trace.sizes[event]
        assert end <= found.peak
        for start, stop in living.values():
            assert end <= start or stop <= offset, (trace, found)
        living[event] = (offset, end)
    assert found.lower_bound <= found.peak <= found.unplanned


def _check_many(count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        _check(_random_trace(rng))


def test_blocks_that_live_together_never_overlap() -> None:
    _check_many(PROGRAMS)


@pytest.mark.conformance
def test_blocks_of_many_programs_never_overlap() -> None:
    _check_many(CONFORMANCE_PROGRAMS)


def test_the_smallest_of_very_many_blocks_stay_outside() -> None:
    """Placing takes quadratic time, so there is a limit."""
    count = 10_000
    trace = Trace([64 + i for i in range(count)], [*range(count), *[~i for i in range(count)]])
    found = plan(trace)
    assert sum(offset < 0 for offset in found.offsets) == count - 8192
    assert found.offsets[-1] >= 0


def test_an_empty_trace_has_an_empty_plan() -> None:
    assert plan(Trace([], [])).peak == 0


# --- running -------------------------------------------------------------------------------------------------------


def _repeatedly(function: Callable[[str], Any], times: int = 6) -> None:
    """The results of every repetition, compared at the end, when later runs have used the memory again."""
    torch.manual_seed(0)
    expected = [function("cpu") for _ in range(times)]
    torch.manual_seed(0)
    lazy = []
    for _ in range(times):
        result = function(DEVICE)
        marid.materialize(result)
        lazy.append(result)
    assert_same(lazy, expected)


def _placements() -> list[Placement]:
    """Every placement of every cached program."""
    programs = engine.programs.values()  # pyright: ignore[reportAttributeAccessIssue]
    return [form.planned for program in programs for form in program.specialisations if form.planned is not None]


def _plans() -> list[MemoryPlan]:
    return [placement.plan for placement in _placements() if placement.plan is not None]


@pytest.fixture
def own_programs() -> None:
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("own_programs")
def test_a_program_that_repeats_follows_its_plan() -> None:
    """The third run is the first to follow; it takes no memory but that of its result."""
    a = torch.rand(1000, device=DEVICE)

    def run() -> torch.Tensor:
        y = ((a * 2 + 1).sin() * (a + 3)).cos()
        marid.materialize(y)
        return y

    results = [run() for _ in range(5)]
    assert len(_plans()) == 1
    [found] = _plans()
    assert found.lower_bound <= found.peak <= 1.05 * found.lower_bound < found.unplanned
    assert (marid.stats().planned_peak, marid.stats().planned_lower_bound) == (found.peak, found.lower_bound)
    assert marid.stats().unplanned_bytes == found.unplanned
    for result in results:
        assert torch.equal(result, results[0])
    slab = engine.arena.nbytes  # pyright: ignore[reportAttributeAccessIssue]
    assert slab >= found.peak
    torch.remote_accelerator.empty_cache()
    assert engine.arena.nbytes == 0  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(run(), results[0])


def _outputs_and_views(device: str) -> Any:
    x = torch.rand(64, 64, device=device)
    y = (x @ x).relu()
    return y, y.t(), (y + 1)[3:], y.sum(0), y.max()


def _writes(device: str) -> Any:
    x = torch.rand(64, 64, device=device)
    y = x + 1
    y[3].mul_(2)
    z = y.view(-1)[::2]
    z.add_(y.sum())
    return y.exp(), z


def _random_numbers(device: str) -> Any:
    x = torch.randn(5000, device=device)
    return nn.functional.dropout(x * 2, 0.3) + torch.rand_like(x)


def _lists(device: str) -> Any:
    x = torch.rand(64, 32, device=device)
    parts = x.split(16)
    values, indices = (x * 2).sort(dim=1)
    return torch.cat([part + i for i, part in enumerate(parts)]), values, indices, torch.linalg.svdvals(x)


def _layers(device: str) -> Any:
    x = torch.rand(4, 3, 16, 16, device=device)
    weight = torch.rand(8, 3, 3, 3, device=device, requires_grad=True)
    y = nn.functional.max_pool2d(nn.functional.conv2d(x, weight).relu(), 2)
    (grad,) = torch.autograd.grad(nn.functional.layer_norm(y, y.shape[1:]).square().sum(), weight)
    return y.detach(), grad


@pytest.mark.parametrize("work", [_outputs_and_views, _writes, _random_numbers, _lists, _layers])
def test_results_outlive_later_runs(work: Callable[[str], Any]) -> None:
    """What is held keeps its values while the slab is used again, and equals what eager computes."""
    _repeatedly(work)


def test_a_training_loop_follows_one_plan() -> None:
    """Losses and weights bit for bit; the plan is within 5 % of the lower bound."""

    def train(device: str) -> Any:
        layers = [nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
        model = seeded(nn.Sequential(*layers), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = torch.rand(16, 32, device=device), torch.randint(8, (16,), device=device)
        losses = [train_step(optimizer, nn.functional.cross_entropy(model(x), y)).item() for _ in range(12)]
        return losses, [p.detach() for p in model.parameters()]

    on_both(train)
    stats = marid.stats()
    assert 0 < stats.planned_lower_bound <= stats.planned_peak <= 1.05 * stats.planned_lower_bound
    assert stats.planned_peak < 0.55 * stats.unplanned_bytes  # gradients outlive the step, and are in both


@pytest.mark.usefixtures("own_programs")
def test_one_program_with_many_shapes() -> None:
    """Each set of shapes that comes twice has a plan of its own; the others run without."""
    weight = torch.rand(16, 16)
    lazy_weight = weight.to(DEVICE)
    for size in [*range(1, 6), *range(1, 6), *range(1, 40), *range(1, 6)]:
        x = torch.rand(size, 16)
        expected = ((x @ weight).tanh() @ weight).softmax(-1)
        assert torch.equal(((x.to(DEVICE) @ lazy_weight).tanh() @ lazy_weight).softmax(-1).cpu(), expected)
    assert len(engine.programs) == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert 5 <= len(_plans()) <= 16


@pytest.mark.usefixtures("own_programs")
def test_a_failing_run_keeps_what_it_made() -> None:
    """An operation that fails in a run that follows a plan: what ran before stays readable, and stays right."""
    table = torch.rand(100, 50, device=DEVICE)

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = table * 2
        z = y + 1
        picked = torch.index_select(z, 0, torch.tensor([index], device=DEVICE)).exp()
        return z.cos() + picked.sum(), picked

    expected = run(3)[0].cpu()
    for _ in range(4):
        assert torch.equal(run(3)[0].cpu(), expected)
    kept = []
    for _ in range(3):
        bad, _ = run(1000)
        with pytest.raises(IndexError):
            bad.cpu()
        kept.append(bad)
        for _ in range(3):
            assert torch.equal(run(3)[0].cpu(), expected)
    assert len(_plans()) >= 1


@pytest.mark.usefixtures("own_programs")
def test_a_program_of_very_many_blocks_follows_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that stay outside of the slab do not lead away from the plan."""
    x = torch.rand(4)
    lazy = x.to(DEVICE)

    def chain(start: torch.Tensor) -> torch.Tensor:
        kept = [start + i for i in range(8_300)]
        return torch.stack([torch.stack(kept[i : i + 100]).sum() for i in range(0, len(kept), 100)])

    expected = chain(x)
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 100_000)
    for _ in range(4):
        assert torch.equal(chain(lazy).cpu(), expected)
    assert [p.plan is not None for p in _placements()] == [True]


class _Distraction:
    """Allocates when it dies, which is in the middle of a run."""

    made: list[torch.Tensor] = []

    def __init__(self, size: int) -> None:
        self.size, self.cycle = size, self

    def __del__(self) -> None:
        self.made.append(torch.full((self.size,), float(self.size)))


def test_finalizers_that_allocate_during_a_run() -> None:
    """What they made is theirs, also when it took the place of a planned block."""
    x = torch.rand(1000, device=DEVICE)
    expected = ((x * 2 + 1).sin() * 3).cpu()
    threshold = gc.get_threshold()
    try:
        for repetition in range(60):
            for size in (1000, 250, 7):
                _Distraction(size)
            gc.set_threshold(1 + repetition % 7)
            assert torch.equal(((x * 2 + 1).sin() * 3).cpu(), expected)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    for _ in range(3):
        assert torch.equal(((x * 2 + 1).sin() * 3).cpu(), expected)
    assert any(placement.plan is not None for placement in _placements())
    assert len(_Distraction.made) == 180
    for made in _Distraction.made:
        assert bool((made == len(made)).all())
    _Distraction.made.clear()


def test_another_thread_frees_results_during_runs() -> None:
    """Blocks go back from wherever they are dropped."""
    x = torch.rand(30_000, device=DEVICE)
    expected = ((x * 2).sin() + 1).cpu()
    held: list[torch.Tensor] = []
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            if held:
                held.pop()
            else:
                time.sleep(0)

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for _ in range(300):
            y = (x * 2).sin() + 1
            marid.materialize(y)
            held.append(y)
            del y
        result = (x * 2).sin() + 1
        assert torch.equal(result.cpu(), expected)
    finally:
        stop.set()
        thread.join()


def test_a_large_slab_is_replaced_when_only_small_ones_are_needed() -> None:
    """A program that ran once does not hold its memory for ever."""

    def run(size: int) -> None:
        x = torch.rand(size, device=DEVICE)
        for _ in range(4):
            ((x * 2).sin() * 3).sum().item()

    run(1 << 20)
    large = engine.arena.nbytes  # pyright: ignore[reportAttributeAccessIssue]
    assert large >= 4 << 20
    for _ in range(40):
        run(1 << 10)
    assert engine.arena.nbytes < large / 2  # pyright: ignore[reportAttributeAccessIssue]


def test_freed_results_are_used_again_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of results go to a pool that never holds more than ``pool_bytes``."""
    x = torch.rand(1 << 18, device=DEVICE)
    addresses = set()
    for _ in range(10):
        y = (x * 2).sin() + 1
        marid.materialize(y)
        addresses.add(y._value.concrete.data_ptr())
        del y
    assert module.memory_cached() >= 1 << 20
    assert len(addresses) < 10
    results = []
    for _ in range(200):
        results.append((x * 2).sin() + 1)
        marid.materialize(results[-1])
    del results
    assert module.memory_cached() <= marid.settings.pool_bytes
    assert module.memory_cached() > 1 << 20
    monkeypatch.setattr(marid.settings, "pool_bytes", 1 << 20)
    assert module.memory_cached() <= 1 << 20
    torch.remote_accelerator.empty_cache()
    assert module.memory_cached() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_free_and_allocate() -> None:
    """Nothing is locked in a child, and its frees touch only its own copy; also after a second engine was made."""
    InProcessEngine()
    x = torch.rand(100_000, device=DEVICE)
    held = [(x * 2).sin() + 1 for _ in range(4)]
    for y in held:
        marid.materialize(y)
    plain = held[0].cpu()
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0 if plain[:100].clone().tolist() == plain[:100].tolist() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(held[0].cpu(), plain)


def test_every_number_of_dropped_results() -> None:
    """The same code with other results held is another program, with another plan."""
    x = torch.rand(500, device=DEVICE)
    plain = x.cpu()
    for keep in itertools.chain(range(8), range(8), range(8)):
        a = x * 2
        b = a.sin()
        c = b + a
        held = [t for bit, t in enumerate((a, b, c)) if keep >> bit & 1]
        d = c.cos()
        del a, b, c
        assert torch.equal(d.cpu(), ((plain * 2).sin() + plain * 2).cos())
        for t in held:
            assert t.cpu().isfinite().all()


_pending: list[torch.Tensor] = []


def _materialize_others(x: torch.Tensor) -> torch.Tensor:
    while _pending and x.device.type == "cpu":
        marid.materialize(_pending.pop())
    return x.clone()


_runs_inside = torch.library.Library("marid_test_memory", "DEF")
_runs_inside.define("runs_inside(Tensor x) -> Tensor")
_runs_inside.impl("runs_inside", _materialize_others, "CPU")
_runs_inside.impl("runs_inside", _materialize_others, "Meta")


def test_a_run_inside_of_a_run() -> None:
    """An operator that makes another tensor concrete, as a finalizer may too."""
    x = torch.rand(1000, device=DEVICE)
    expected, other = ((x.cpu() * 2).sin() + 1) * 3, (x.cpu() + 1).exp()
    for _ in range(8):
        y = ((torch.ops.marid_test_memory.runs_inside(x * 2).sin()) + 1) * 3
        inner = [(x + 1).exp() for _ in range(3)]
        _pending.extend(inner)
        assert torch.equal(y.cpu(), expected)
        assert not _pending
        for z in inner:
            assert torch.equal(z.cpu(), other)
