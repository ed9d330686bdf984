"""Mistakes that other lazy engines made, one test each (the list is in the design, under "Traps that broke others").

The traps that only a compiled tier or a remote worker can fall into are tested with those.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import pytest
import torch
from torch import nn

import marid
from marid.settings import settings
from tests.helpers import DEVICE, assert_same, on_both, train_step


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return train_step(optimizer, model(x).square().mean())


def test_random_op_in_a_never_synced_loop_keeps_the_tape_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever read, yet the pending work stays under the limit, and the result is what eager gives."""
    monkeypatch.setattr(settings, "max_pending_nodes", 500)
    monkeypatch.setattr(settings, "immediate_bytes", 0)  # as for larger tensors

    def noisy(device: str) -> torch.Tensor:
        x = torch.zeros(8, device=device)
        for _ in range(2_000):
            x = x * 0.9 + torch.randn(8, device=device)
            assert marid.stats().pending_nodes <= 3_000
        return x

    on_both(noisy)
    assert marid.stats().automatic_cuts >= 3


def test_dropped_random_results_leave_the_tape() -> None:
    """A random result that nobody holds is no pending work, and still moves the generator on."""

    def draw(device: str) -> torch.Tensor:
        for _ in range(100):
            torch.rand(3, device=device)
        return torch.rand(3, device=device)

    last = on_both(draw)
    del last
    assert marid.stats().ops_executed == 1
    assert marid.stats().pending_nodes == 0


def test_equal_scalars_stay_separate_parameters() -> None:
    """``lr == momentum`` builds a program; changing one of them later must not change the other."""

    def combine(device: str) -> list[torch.Tensor]:
        x = torch.arange(3.0, device=device)
        return [(x * a + b).sub(1, alpha=c) for a, b, c in [(0.5, 0.5, 0.5), (0.5, 0.25, 2.0), (2.0, 0.5, 0.25)]]

    on_both(combine)
    assert marid.stats().programs_built <= 2  # the three sums are one program, read three times


def test_optimizer_with_lr_equal_to_momentum_then_different() -> None:
    """The same trap through a real optimizer."""

    def train(device: str) -> list[torch.Tensor]:
        model = _model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
        x = torch.ones(2, 4, device=device)
        losses = []
        for lr in (0.1, 0.1, 0.5, 0.01):
            optimizer.param_groups[0]["lr"] = lr
            losses.append(_step(model, optimizer, x))
        return losses

    on_both(train)


def test_every_steady_step_is_the_same_program() -> None:
    """Once the optimizer has its state, a step is recognised: nothing new is built."""
    model = _model(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.ones(2, 4, device=DEVICE)
    for _ in range(3):
        _step(model, optimizer, x).item()
    built = marid.stats().programs_built
    for _ in range(10):
        _step(model, optimizer, x).item()
    assert marid.stats().programs_built == built


def test_learning_rate_change_builds_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate is a parameter of the program, not part of it."""
    monkeypatch.setattr(settings, "immediate_bytes", 0)  # from the ninth turn on there would be no program
    model = _model(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.ones(2, 4, device=DEVICE)
    for _ in range(3):
        _step(model, optimizer, x).item()
        schedule.step()
    built = marid.stats().programs_built
    for _ in range(10):
        _step(model, optimizer, x).item()
        schedule.step()
    assert marid.stats().programs_built == built


def test_data_reassigned_under_a_live_view() -> None:
    """A view keeps looking at the old memory when its base gets new data."""

    def reassign(device: str) -> list[torch.Tensor]:
        base = torch.arange(6.0, device=device)
        view = base[2:4]
        base.data = torch.zeros(6, device=device)
        view.add_(10)
        base.mul_(3).add_(1)
        return [base, view]

    on_both(reassign)


def test_data_reassigned_while_a_reader_is_pending() -> None:
    """What was recorded before ``.data =`` read the old memory."""

    def reassign(device: str) -> list[torch.Tensor]:
        base = torch.arange(6.0, device=device)
        before = base * 2
        other = torch.ones(6, device=device)
        base.data = other
        base.add_(1)
        return [before, base, other]

    on_both(reassign)


@pytest.mark.parametrize("read_first", [False, True])
def test_split_pieces_written_in_place(read_first: bool) -> None:
    """Pieces of a split are views of one storage: each write is seen by the base and by overlapping views."""

    def write(device: str) -> list[torch.Tensor]:
        base = torch.arange(12.0, device=device).reshape(4, 3)
        if read_first:
            base.sum().item()
        first, second = base.split(2)
        column = base[:, 0]
        first.mul_(10)
        second[0].zero_()
        column.neg_()
        return [base, first, second, column]

    on_both(write)


def test_split_pieces_written_in_place_after_an_empty_base() -> None:
    """The storage of a base that is still pending is shared too."""

    def write(device: str) -> list[torch.Tensor]:
        base = torch.empty(2, 3, device=device)
        for index, piece in enumerate(base.unbind()):
            piece.fill_(index)
        return [base]

    on_both(write)


def test_live_views_are_outputs() -> None:
    """A view held by the user survives the run of a program that did not ask for it, and still shares memory."""

    def keep(device: str) -> list[torch.Tensor]:
        base = torch.arange(6.0, device=device) * 2
        view = base.view(2, 3)[1]
        total = base.sum()
        total.item()
        base.add_(1)
        view.mul_(2)
        return [view, base, total]

    on_both(keep)


def test_view_outlives_its_base() -> None:
    """Only the view is held when the program runs."""

    def keep(device: str) -> torch.Tensor:
        view = (torch.arange(6.0, device=device) * 2)[1:3]
        view.add_(1)
        return view

    on_both(keep)


def test_metrics_accumulated_and_never_read_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running total that nobody reads is a chain that grows each step: it is cut, and right in the end."""
    monkeypatch.setattr(settings, "max_pending_nodes", 1_000)
    monkeypatch.setattr(settings, "immediate_bytes", 0)  # as for larger tensors

    def accumulate(device: str) -> list[torch.Tensor]:
        total = torch.zeros((), device=device)
        worst = torch.zeros((), device=device)
        x = torch.ones(4, device=device)
        for step in range(3_000):
            x = x * 0.999
            total += x.sum()
            worst = torch.maximum(worst, x[step % 4])
        return [total, worst]

    on_both(accumulate)
    assert marid.stats().automatic_cuts >= 3


def test_use_from_a_second_thread() -> None:
    """A tensor recorded in one thread is used, written and read in another."""
    base = torch.arange(4.0, device=DEVICE) * 2
    results = []

    def work() -> None:
        base.add_(1)
        results.append((base * 3).sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [48.0]
    assert base.tolist() == [1.0, 3.0, 5.0, 7.0]


def test_a_failure_on_the_device_does_not_end_the_process() -> None:
    """An operation that fails when it runs raises where it is read; other work goes on."""
    fine = torch.ones(3, device=DEVICE) * 2
    bad = fine[torch.tensor([99], device=DEVICE)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            bad.sum().item()
    assert fine.tolist() == [2.0, 2.0, 2.0]
    assert (fine + 1).tolist() == [3.0, 3.0, 3.0]


def test_held_output_is_not_overwritten_by_the_next_run() -> None:
    """Results of one program, run again and again, are separate tensors."""
    x = torch.arange(4.0, device=DEVICE)
    held = []
    for scale in range(1, 6):
        y = x * scale
        y.sum().item()
        held.append(y)
    assert marid.stats().programs_reused >= 3
    for scale, y in enumerate(held, 1):
        assert_same(y, torch.arange(4.0) * scale)


def test_buffers_are_not_reused_while_held() -> None:
    """Memory behind a tensor, a view, a CPU copy or an array of the user is not taken for other results."""
    x = torch.arange(64.0, device=DEVICE)
    y = x + 1
    view, array, copied = y[10:20], y.numpy(), y.cpu()
    del y
    gc.collect()
    for _ in range(20):
        ((x * 7 + 3).exp_().sum() * 0).item()
    assert_same(view, (torch.arange(64.0) + 1)[10:20])
    assert_same(copied, torch.arange(64.0) + 1)
    assert array.tolist() == (torch.arange(64.0) + 1).tolist()


def test_arrays_and_cpu_copies_do_not_follow_later_writes() -> None:
    """What was read is a snapshot."""
    x = torch.zeros(3, device=DEVICE)
    array, copied, concrete = x.numpy(), x.cpu(), x.materialize()
    x.add_(1)
    x.sum().item()
    assert array.tolist() == copied.tolist() == concrete.tolist() == [0.0, 0.0, 0.0]
    copied.add_(5)
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_cache_compares_keys_and_not_only_hashes() -> None:
    """Python's ``hash(-1) == hash(-2)`` and ``1 == 1.0 == True``: different operations all the same."""
    assert hash(-1) == hash(-2)

    def collide(device: str) -> list[torch.Tensor]:
        x = torch.arange(6.0, device=device).reshape(2, 3)
        y = torch.zeros(2, 3, 4, device=device)
        found = [x.sum(-1), x.sum(-2), y.transpose(-1, 0), y.transpose(-2, 0), y.select(-1, 0), y.select(-2, 0)]
        found += [torch.full((2,), fill, device=device) for fill in (1, 1.0, True, 0, 0.0, False, -1, -2)]
        found += [x + 1, x + 1.0, x + True, x.long() + 1, x.long() + 1.0, x.long() + True]
        return found

    on_both(collide)


def test_zero_and_minus_zero_are_different_parameters() -> None:
    """``0.0 == -0.0`` too."""
    values = [torch.full((2,), fill, device=DEVICE) for fill in (0.0, -0.0, 0.0)]
    assert [v.signbit().all().item() for v in values] == [False, True, False]


def test_producer_with_other_readers_is_still_there() -> None:
    """Reading one consumer must not swallow what others need."""

    def read(device: str) -> list[torch.Tensor]:
        x = torch.arange(4.0, device=device)
        shared = (x * 2).exp()
        first, second = shared + 1, shared.sum()
        first.tolist()
        return [second, shared, first]

    on_both(read)


def test_a_value_is_computed_once_however_often_it_is_read() -> None:
    """Reading, and reading through other consumers, does not run an operation again."""
    x = torch.arange(4.0, device=DEVICE)
    y = (x * 2).exp()
    y.sum().item()
    executed = marid.stats().ops_executed
    y.tolist(), y.cpu(), (y.sum().item(), y.tolist())
    assert marid.stats().ops_executed == executed + 1  # the second sum


def test_long_chain_is_cut_on_the_way() -> None:
    """A chain of 100,000 operations with some of its links held: each link has its own value."""
    x = torch.zeros(1, device=DEVICE)
    held = {}
    for index in range(1, 100_001):
        x = x + 1
        if index % 9_999 == 0:
            held[index] = x
    assert marid.stats().automatic_cuts >= 4
    assert x.item() == 100_000
    assert all(link.item() == index for index, link in held.items())


def test_chain_deeper_than_the_pending_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 pending nodes at once: cut, program, run, graph, and deallocation without recursion."""
    monkeypatch.setattr(settings, "max_pending_nodes", 1_000_000)
    x = torch.zeros(1, device=DEVICE)
    for _ in range(100_000):
        x = x + 1
    assert len(marid.graph(x)) == 100_001
    dropped = x
    for _ in range(100_000):
        dropped = dropped * 2
    del dropped
    assert x.item() == 100_000


def test_metadata_is_not_cached_by_object_identity() -> None:
    """Tensors that come and go at the same address have their own metadata."""
    seen = set()
    for index in range(50):
        x = torch.zeros(index + 1, device=DEVICE)
        assert x.metadata.tensor_shape == (index + 1,)
        assert x.metadata.operation_type == "aten::zeros"
        seen.add(x.id)
        del x
        y = torch.ones(2, index + 1, device=DEVICE)
        assert y.metadata.operation_type == "aten::ones"
    assert len(seen) == 50


def test_module_paths_are_not_cached_by_object_identity() -> None:
    """Modules that come and go at the same address have their own paths."""
    for name in ("first", "second", "third") * 5:
        parent = nn.Module()
        child = nn.Linear(2, 2).to(DEVICE)
        parent.add_module(name, child)
        parent.forward = lambda x, child=child: child(x)
        assert parent(torch.ones(1, 2, device=DEVICE)).metadata.module_path == name
        del parent, child


def test_content_is_never_sampled() -> None:
    """Two large tensors that differ in one element are different inputs."""
    a, b = torch.zeros(1 << 16), torch.zeros(1 << 16)
    b[12_345] = 1
    assert [marid.LazyTensor.lift(t).sum().item() for t in (a, b, a)] == [0.0, 1.0, 0.0]


def test_memory_outlives_everything_but_a_reassigned_view() -> None:
    """After ``y.data = x[2:]`` only ``y`` holds the memory of ``x``, all of which can still be asked for."""

    def run(device: str) -> list[object]:
        x = torch.arange(6.0, device=device) * 2
        y = torch.zeros(1, device=device)
        y.data = x[2:]
        del x
        whole = torch.empty(0, device=device)
        first = y.tolist()
        whole.set_(y.untyped_storage(), 0, (6,), (1,))
        return [first, whole, copy.deepcopy(y)]

    on_both(run)


@pytest.mark.usefixtures("either_way")
def test_memory_that_is_written_to_itself() -> None:
    """Through views that add a dimension, as PyTorch sees that they are the same, element by element."""

    def run(device: str) -> list[object]:
        x = torch.arange(3.0).to(device)
        for _ in range(3):
            x[None] = x.view(3)
            x[(None,)] = x
            x[None, ...] = x
            x[:, None] = x[:, None]
            x[:2] = x[1]
        return [x]

    on_both(run)


@pytest.mark.in_process("a worker's memory is not looked at after an error")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", ["cat", "hstack", "stack", "mv", "svdvals"])
def test_an_output_that_was_resized_before_an_error(name: str) -> None:
    """As PyTorch leaves it: of another size, and usable."""
    calls = {
        "cat": lambda m: torch.cat([m[:1], m + 1], out=m),
        "hstack": lambda m: torch.hstack([m, m], out=m),
        "stack": lambda m: torch.stack([m, m], out=m),
        "mv": lambda m: torch.mv(m, m[0], out=m),
        "svdvals": lambda m: torch.linalg.svdvals(m, out=m),
    }

    def run(device: str) -> list[object]:
        m = torch.arange(9.0).reshape(3, 3).to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the other size
            with pytest.raises((RuntimeError, IndexError)):
                calls[name](m)
        return [m.shape, m.stride(), (m + 1).shape, len(m.tolist())]

    on_both(run)
