"""``marid.compile``: replays do what the Python would have done, or the Python runs."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import marid
from marid.errors import SyncForbiddenError, UnsupportedOperationError
from tests.helpers import DEVICE, assert_same

SCALE = 2.0


def _batches(count: int, rows: int = 5, columns: int = 8) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(7)
    return [torch.randn(rows, columns, generator=source) for _ in range(count)]


def _compare(make: Callable[[str], Callable[..., Any]], calls: int = 6, replays: int | None = None) -> Any:
    """``make(device)`` gives a function of a batch and what else to look at; eager and compiled do the same."""
    torch.manual_seed(0)
    eager = make("cpu")
    torch.manual_seed(0)
    compiled = marid.compile(make(DEVICE))
    expected, lazy = [], []
    torch.manual_seed(1)
    expected = [eager(batch) for batch in _batches(calls)]
    torch.manual_seed(1)
    lazy = [compiled(batch.to(DEVICE)) for batch in _batches(calls)]
    assert_same(lazy, expected)
    if replays is not None:
        assert compiled.stats().replays == replays, compiled.stats()
    return compiled


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _trainer(optimizer: Callable[[Any], Any], dropout: float = 0.0, module: Any = None) -> Any:
    def make(device: str) -> Any:
        model = (
            module()
            if module
            else torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 4)
            )
        )
        model.to(device)
        own = optimizer(model.parameters())

        def step(x: torch.Tensor) -> Any:
            own.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            own.step()
            return loss.detach(), {name: p.detach().clone() for name, p in model.named_parameters()}

        return step

    return make


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw, at once": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
}


# Those that look at numbers on the host, or change them in another way, run as Python.
NOT_REPLAYED = ("nadam", "radam", "asgd")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_steps(name: str) -> None:
    """Losses and parameters of ten steps, whether the optimizer can be replayed or not."""
    make = _trainer(OPTIMIZERS[name], dropout=0.3)
    _compare(make, calls=10, replays=0 if name in NOT_REPLAYED else 7)


def test_training_with_state_of_modules() -> None:
    """Batch normalisation writes its running statistics."""
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))  # noqa: E731
    make = _trainer(OPTIMIZERS["momentum"], module=layers)
    _compare(make, calls=8, replays=5)


def _step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_adamw_that_keeps_its_counter_on_the_device() -> None:
    """``capturable=True``: the same parameters as without ``marid.compile``, bit for bit."""
    found = []
    for wrap in (lambda f: f, marid.compile):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)

        step = _step_of(model, optimizer)
        run = wrap(step)
        losses = [run(batch.to(DEVICE)) for batch in _batches(8)]
        found.append([loss.item() for loss in losses] + [p.tolist() for p in model.parameters()])
    assert found[0] == found[1]
    assert marid.stats().functions[0].replays == 5


def test_optimizers_that_look_at_their_counters_say_so() -> None:
    """RAdam asks whether a number from its counter is large enough: never replayed, and the reason is told."""
    compiled = _compare(_trainer(OPTIMIZERS["radam"]), calls=12, replays=0)
    assert any("of the CPU is read" in reason for reason in compiled.stats().fallbacks), compiled.stats()


def test_counters_on_the_host_are_followed() -> None:
    """Adam's bias corrections are other numbers at each step: also after the learning rate changed, a state dict was
    loaded, parameters were frozen for some steps (their counters lag behind), and a scheduler outside."""
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        step = _step_of(model, optimizer)
        run = marid.compile(step) if device == DEVICE else step
        losses: list[Any] = []
        for change in range(6):
            if change == 1:
                scheduler.step()
            elif change == 2:
                model[0].requires_grad_(False)
            elif change == 3:
                model[0].requires_grad_(True)
            elif change == 4:
                for counter in [state["step"] for state in optimizer.state.values()][:2]:
                    counter.fill_(1000.0)
            elif change == 5:
                saved = optimizer.state_dict()
                for state in saved["state"].values():
                    state["step"] = torch.tensor(2.0)
                optimizer.load_state_dict(saved)
            losses += [run(batch.to(device)).item() for batch in _batches(5)]
        found.append(losses + [p.tolist() for p in model.parameters()])
    assert found[0] == found[1]
    assert marid.stats().functions[0].replays >= 12


@pytest.mark.in_process("a worker's errors come where something is read, when the Python has gone on")
def test_counters_go_back_when_a_replay_fails() -> None:
    """An error before the optimizer's step leaves its counter as it is."""
    w = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.Adam([w], lr=0.1)

    def step(index: torch.Tensor) -> None:
        optimizer.zero_grad()
        w.index_select(0, index).sum().backward()
        optimizer.step()

    compiled = marid.compile(step)
    for _ in range(4):
        compiled(torch.tensor([0, 1], device=DEVICE))
    assert compiled.stats().replays == 1
    with pytest.raises(IndexError):
        compiled(torch.tensor([0, 9], device=DEVICE))
    assert [state["step"].item() for state in optimizer.state.values()] == [4.0]
    compiled(torch.tensor([0, 1], device=DEVICE))
    assert [state["step"].item() for state in optimizer.state.values()] == [5.0]


@pytest.mark.parametrize("name", ["adam", "adamw, at once", "adamax", "adagrad"])
def test_numbers_that_stay_for_some_steps(name: str) -> None:
    """``1 - beta**step`` is nearly 1 after many steps: the same number for some steps, and another one then. Counters
    that are set back are no such steps."""
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device, torch.float64)
        optimizer = OPTIMIZERS[name](model.parameters())
        step = _step_of(model, optimizer)
        run = marid.compile(step) if device == DEVICE else step
        losses: list[Any] = []
        for start, rate in ((0, 0.01), (31_000, 0.02), (29_000, 0.02), (5, 0.02), (31_000, 0.03), (31_000, 0.03)):
            optimizer.param_groups[0]["lr"] = rate
            for state in optimizer.state.values():
                state["step"].fill_(float(start))
            batches = [torch.full((3, 4), call / 25, dtype=torch.float64) for call in range(25)]
            losses += [run(batch.to(device)).item() for batch in batches]
        found.append(losses + [p.tolist() for p in model.parameters()])
    assert found[0] == found[1]
    stats = marid.stats().functions[0]
    assert stats.replays >= 100, stats
    assert not any("not watched" in reason for reason in stats.fallbacks)


def test_counters_that_meet() -> None:
    """One optimizer takes one step, another one of the same rates takes two: their counters are equal once, and numbers
    of one are not taken for those of the other."""
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 2).to(device) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
        steps = [_step_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]

        def step(x: torch.Tensor, steps: Any = steps) -> Any:
            return steps[0](x), steps[1](x), steps[1](x * 2)

        run = marid.compile(step) if device == DEVICE else step
        losses: list[Any] = []
        for start in (None, (4.0, 3.0), (7.0, 3.0), (0.0, 0.0)):
            for optimizer, value in zip(optimizers, start or (), strict=False):
                for state in optimizer.state.values():
                    state["step"].fill_(value)
            batches = _batches(6, rows=3, columns=4)
            losses += [[loss.item() for loss in run(batch.to(device))] for batch in batches]
        found.append(losses + [p.tolist() for model in models for p in model.parameters()])
    assert found[0] == found[1]
    stats = marid.stats().functions[0]
    assert stats.replays >= 6
    assert any("of two counters" in reason for reason in stats.fallbacks), stats


def test_counters_that_the_function_reads_itself() -> None:
    """What it does with the value is not known."""
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = _step_of(model, optimizer)

        def scaled(x: torch.Tensor, step: Any = step, state: Any = optimizer.state) -> torch.Tensor:
            loss = step(x)
            return loss * (2 if next(iter(state.values()))["step"].item() > 5 else 1)

        run = marid.compile(scaled) if device == DEVICE else scaled
        found.append([run(torch.ones(3, 4, device=device)).item() for _ in range(10)])
    assert found[0] == found[1]
    stats = marid.stats().functions[0]
    assert stats.replays == 0
    assert any("of the CPU is read" in reason and "test_compile.py" in reason for reason in stats.fallbacks), stats


def test_random_numbers_advance_as_eagerly() -> None:
    """All kinds of draws, an odd number of normal ones (whose second half waits), and draws that nobody uses."""

    def make(device: str) -> Any:
        def run(x: torch.Tensor) -> Any:
            torch.rand(3, device=device)  # dropped
            odd = torch.randn(3, device=device)
            noise = torch.randn_like(x) + torch.rand(x.shape, device=device)
            return (
                odd,
                F.dropout(x, 0.4) + noise,
                torch.randint(0, 9, (4,), device=device),
                torch.randperm(5, device=device),
            )

        return run

    compiled = _compare(make, calls=7, replays=5)
    after = torch.randn(4, device=DEVICE)
    torch.manual_seed(1)
    eager = make("cpu")
    for batch in _batches(7):
        eager(batch)
    assert torch.equal(after.cpu(), torch.randn(4))
    torch.manual_seed(5)
    again = compiled(_batches(1)[0].to(DEVICE))
    torch.manual_seed(5)
    assert_same(again, eager(_batches(1)[0]))


def test_a_generator_of_the_user() -> None:
    """One that the function can reach is drawn from at each replay; one that it makes, or seeds, is not replayed."""

    def make(device: str) -> Any:
        source = torch.Generator(device).manual_seed(3)
        return lambda x: x + torch.rand(x.shape, generator=source, device=device)

    _compare(make, replays=4)

    def seeding(device: str) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return x + torch.rand(x.shape, device=device)

        return run

    _compare(seeding, replays=0)


def test_held_results_are_never_overwritten() -> None:
    """Each call returns memory of its own, also for views and for results that are written afterwards."""
    compiled = marid.compile(lambda x: ((x * 2)[1:], x + 1))
    held = [compiled(torch.full((4, 3), float(call), device=DEVICE)) for call in range(6)]
    held[4][0].add_(100)
    for call, (view, total) in enumerate(held):
        assert view.tolist() == [[2.0 * call + (100 if call == 4 else 0)] * 3] * 3
        assert total.tolist() == [[call + 1.0] * 3] * 4
    assert compiled.stats().replays == 4


def test_results_that_are_arguments_or_views_of_them() -> None:
    """Identity, aliases and views come out as from the Python."""
    state = torch.zeros(4, device=DEVICE)

    def run(x: torch.Tensor, keep: Any) -> Any:
        state.add_(x)
        x.mul_(2)
        return x, x[1:], x.detach(), state, state[:2], keep, [x.view(2, 2)]

    compiled = marid.compile(run)
    total = torch.zeros(4)
    for call in range(6):
        x = torch.full((4,), float(call), device=DEVICE)
        same, tail, alias, own, part, keep, (square,) = compiled(x, "kept")
        total += call
        assert same is x
        assert own is state
        assert keep == "kept"
        tail.add_(1)
        square[0, 0] = 9
        assert x.tolist() == alias.tolist() == [9.0, *[2.0 * call + 1] * 3]
        assert part.tolist() == total[:2].tolist()
        state.sub_(0)
        assert state.tolist() == total.tolist()
    assert compiled.stats().replays == 4


def test_two_results_that_share_memory() -> None:
    """A result and a view of it, and two handles of one value."""

    def run(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y[1:], y.detach()

    compiled = marid.compile(run)
    for call in range(5):
        whole, part, alias = compiled(torch.full((3,), float(call), device=DEVICE))
        whole.mul_(2)
        part[0] = -1
        assert whole.tolist() == alias.tolist() == [2.0 * call + 2, -1.0, 2.0 * call + 2]
        assert part.tolist() == whole.tolist()[1:]
    assert compiled.stats().replays == 3


def test_arguments_that_share_memory() -> None:
    """A recording of two tensors does not serve a call with one tensor twice, or with a view."""
    compiled = marid.compile(lambda a, b: (a.add_(1), b.mul_(2), a + b)[2])
    for call in range(4):
        for how in ("apart", "same", "view"):
            a = torch.full((3,), float(call), device=DEVICE)
            b = a if how == "same" else a[:] if how == "view" else torch.full((3,), float(call), device=DEVICE)
            expected = (call + 1) * 4.0 if how != "apart" else call * 3.0 + 1
            assert compiled(a, b).tolist() == [expected] * 3, how
    assert compiled.stats().replays >= 4


def test_structures_and_keywords() -> None:
    """Nested containers in and out, keywords in any order, defaults, tuples of results."""

    def run(batch: dict[str, Any], *rest: Any, scale: float = 2.0, flag: Any = False) -> Any:
        first, (second, third) = batch["a"], batch["b"]
        return {
            "sum": first + second,
            "rest": [r * scale for r in rest],
            "split": torch.split(third, 1),
            "flag": flag,
            "none": None,
        }

    compiled = marid.compile(run)
    x = torch.arange(4.0)
    for call in range(3):
        for keywords in ({}, {"scale": 3.0}, {"flag": True, "scale": 3.0}, {"scale": 3.0, "flag": True}):
            args = ({"a": x * call, "b": (x + 1, x + call)}, x, x * 2)
            lazy = compiled(*torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), args), **keywords)
            assert_same(lazy, run(*args, **keywords))
    assert compiled.stats().replays == 12 - 6


def test_numbers_are_told_apart() -> None:
    """1, 1.0 and True; 0.0 and -0.0; NaN; each is a kind of its own."""
    compiled = marid.compile(lambda x, n: x / n if n is not None else x)
    x = torch.tensor([1, 2])
    for _ in range(3):
        for number in (1, 1.0, True, 0.0, -0.0, float("nan"), float("inf"), None):
            assert_same(compiled(x.to(DEVICE), number), x / number if number is not None else x)


def test_state_that_python_changes_is_never_stale() -> None:
    """Counters, lists, globals, closures, attributes: what changes is seen at the next call."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0
            self.seen: list[int] = []

    counter, factor, config = Counter(), 1.0, {"bias": 0.0}

    def counting(x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        return x * counter.count

    def appending(x: torch.Tensor) -> torch.Tensor:
        counter.seen.append(1)
        return x * len(counter.seen)

    def depending(x: torch.Tensor) -> torch.Tensor:
        return x * factor * SCALE + config["bias"] + counter.count

    x = torch.ones(2, device=DEVICE)
    for function in (counting, appending):
        compiled = marid.compile(function)
        assert [compiled(x).tolist()[0] for _ in range(12)] == [float(n) for n in range(1, 13)]
        assert compiled.stats().replays == 0
    compiled = marid.compile(depending)
    for factor in (1.0, 2.0):
        for config["bias"] in (0.0, 5.0):
            for counter.count in (3, 4):
                for _ in range(3):
                    assert compiled(x).tolist()[0] == factor * SCALE + config["bias"] + counter.count
    assert compiled.stats().replays == 8


def test_globals_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a function calls another one."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    compiled = marid.compile(lambda x: inner(x))
    x = torch.ones(1, device=DEVICE)
    assert [compiled(x).item() for _ in range(4)] == [2.0] * 4
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert [compiled(x).item() for _ in range(4)] == [3.0] * 4
    assert compiled.stats().replays == 4


def test_hyperparameters_and_modes_are_watched() -> None:
    """Learning rates, ``train``/``eval``, frozen parameters, ``no_grad``, autocast: the next call follows."""

    def make(device: str) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer

    def step_of(model: Any, optimizer: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model, optimizer = make(device)
        step = step_of(model, optimizer)
        run = marid.compile(step) if device == DEVICE else step
        torch.manual_seed(1)
        losses = []
        for change in range(5):
            if change == 1:
                optimizer.param_groups[0]["lr"] = 0.03
            elif change == 2:
                model.eval()
            elif change == 3:
                model[0].requires_grad_(False)
            elif change == 4:
                model.train()
            losses += [run(batch.to(device)).item() for batch in _batches(4)]
        found.append(losses + [p.tolist() for p in model.parameters()])
    assert found[0] == found[1]
    assert marid.stats().functions[0].replays >= 8


def test_parameters_that_are_replaced() -> None:
    """``load_state_dict`` writes in place; another parameter object, or other ``.data``, is seen."""
    model = torch.nn.Linear(3, 2).to(DEVICE)
    with torch.no_grad():
        run = marid.compile(lambda x: model(x))
        x = torch.ones(1, 3, device=DEVICE)
        for change in range(4):
            if change == 1:
                model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            elif change == 2:
                model.weight = torch.nn.Parameter(torch.full((2, 3), 2.0, device=DEVICE))
            elif change == 3:
                model.bias.data = torch.full((2,), 5.0, device=DEVICE)
            for _ in range(3):
                assert run(x).tolist() == F.linear(x.cpu(), model.weight.cpu(), model.bias.cpu()).tolist()
    assert run.stats().replays >= 5


def test_pending_writes_and_reads_keep_their_order() -> None:
    """What was recorded before a replay runs before it, and sees what was there then."""
    state = torch.zeros(2, device=DEVICE)
    compiled = marid.compile(lambda x: state.add_(x).sum())
    for call in range(5):
        before = state * 10
        x = torch.ones(2, device=DEVICE)
        x.mul_(call)
        total = compiled(x)
        after = state * 10
        x.zero_()
        state.mul_(1)
        assert total.item() == 2.0 * sum(range(call + 1))
        assert before.tolist() == [10.0 * sum(range(call))] * 2
        assert after.tolist() == [10.0 * sum(range(call + 1))] * 2
    assert compiled.stats().replays == 3


def test_a_call_runs_what_it_needs_and_nothing_else() -> None:
    """What makes the arguments, and what reads state that is written; recorded and replayed."""
    state = torch.zeros(2, device=DEVICE)
    weight = torch.full((2,), 3.0, device=DEVICE).sqrt()
    compiled = marid.compile(lambda x: state.add_(x * weight).sum())
    assert weight.tolist()
    for call in range(5):
        other = torch.full((2,), float(call), device=DEVICE).exp()
        before, of_weight = state * 10, weight * 10
        x = torch.ones(2, device=DEVICE) * 2
        total = compiled(x)
        after = state * 10
        assert not other.materialized
        assert not of_weight.materialized
        expected = torch.full((2,), 3.0).sqrt() * 2 * call
        assert torch.allclose(before.cpu(), expected * 10)
        assert torch.allclose(after.cpu(), (expected + torch.full((2,), 3.0).sqrt() * 2) * 10)
        assert torch.allclose(total.cpu(), (expected + torch.full((2,), 3.0).sqrt() * 2).sum())
        assert_same(of_weight.cpu(), torch.full((2,), 3.0).sqrt() * 10)
    assert compiled.stats().replays == 3


def test_gradients_that_accumulate() -> None:
    """``zero_grad`` every third call: gradients are there or not, and are added to where they are."""

    def make(device: str) -> Any:
        model = torch.nn.Linear(8, 2).to(device)
        calls = [0]

        def run(x: torch.Tensor) -> None:
            model(x).square().sum().backward()

        run = marid.compile(run) if device == DEVICE else run

        def outer(x: torch.Tensor) -> Any:
            if calls[0] % 3 == 0:
                model.zero_grad()
            calls[0] += 1
            run(x)
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        return outer

    torch.manual_seed(0)
    eager = make("cpu")
    torch.manual_seed(0)
    lazy = make(DEVICE)
    for batch in _batches(12):
        assert_same(lazy(batch.to(DEVICE)), eager(batch))
    assert marid.stats().functions[0].replays >= 6


def test_data_from_the_host() -> None:
    """CPU arguments and constants are uploaded again; what is computed on the host from them is not replayed."""
    own = torch.zeros(3)

    def fine(x: torch.Tensor) -> torch.Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
        constant.add_(1)
        return x.to(DEVICE) * constant + own.to(DEVICE) + torch.tensor(0.5)

    compiled = marid.compile(fine)
    for call in range(6):
        own.fill_(call)
        assert compiled(torch.full((3,), float(call))).tolist() == [call * f + call + 0.5 for f in (2.0, 3.0, 4.0)]
    assert compiled.stats().replays == 4
    bad: list[Callable[[torch.Tensor], Any]] = [
        lambda x: (x * 2).to(DEVICE),
        lambda x: torch.ones(1, device=DEVICE) * x[0].item(),
        lambda x: torch.ones(1, device=DEVICE) * x.tolist()[0],
        lambda x: torch.ones(1, device=DEVICE) * float(x.numpy()[0]),
        lambda x: torch.ones(1, device=DEVICE) * float(np.asarray(x)[0]),
        lambda x: torch.ones(1, device=DEVICE) * float(np.from_dlpack(x)[0]),
        lambda x: torch.ones(1, device=DEVICE) * float(torch.Tensor.numpy(x)[0]),
        lambda x: torch.ones(1, device=DEVICE) * max(getattr(x, "tolist")()),  # noqa: B009
        lambda x: torch.full((1,), 1.0 if x[0] > 2 else 2.0, device=DEVICE),
        lambda x: torch.ones(1, device=DEVICE) * (x[0].clone() * 1),
    ]
    for index, function in enumerate(bad):
        run = marid.compile(function)
        for call in (1, 1, 1, 5, 1, 7):
            function_result = function(torch.full((1,), float(call))).tolist()
            assert run(torch.full((1,), float(call))).tolist() == function_result, index
        assert run.stats().replays == 0, index


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(), lambda: torch.rand(()).item()])
def test_numbers_drawn_on_the_host(draw: Callable[[], float]) -> None:
    """They are other ones at each call."""
    compiled = marid.compile(lambda x: x + draw())
    found = {compiled(torch.zeros(1, device=DEVICE, dtype=torch.float64)).item() for _ in range(12)}
    assert len(found) == 12
    assert compiled.stats().replays == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: x.cpu().sum(),
        lambda x: float(x.numpy()[0]),
        lambda x: x.nonzero().shape[0],
        lambda x: len(x[x > 0]),
        lambda x: torch.remote_accelerator.synchronize() or 1.0,  # pyright: ignore[reportAttributeAccessIssue]
    ],
)
def test_reads_inside(read: Callable[[torch.Tensor], Any]) -> None:
    """They fall back and say so; ``fullgraph`` raises at their line, and the function stays usable."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y * read(y)

    compiled = marid.compile(run)
    for call in (1.0, 2.0, -3.0, 4.0):
        assert_same(
            compiled(torch.full((2,), call, device=DEVICE)),
            run(torch.full((2,), call)) if read.__code__.co_names[0] != "torch" else torch.full((2,), call * 2),
        )
    stats = compiled.stats()
    assert (stats.recordings, stats.replays, stats.plain) == (1, 0, 3)
    assert "test_compile.py" in next(iter(stats.fallbacks))
    strict = marid.compile(run, fullgraph=True)
    for _ in range(2):
        with pytest.raises(SyncForbiddenError, match=r"test_compile\.py"):
            strict(torch.ones(2, device=DEVICE))


def test_fullgraph_refuses_what_changes() -> None:
    """Also without a read, once it is clear that there will be no replay."""
    number = ctypes.c_double()

    def function(x: torch.Tensor) -> torch.Tensor:
        number.value += 1
        return x + number.value

    compiled = marid.compile(function, fullgraph=True)
    for _ in range(marid.settings.compile_recordings - 1):
        compiled(torch.ones(1, device=DEVICE))
    with pytest.raises(UnsupportedOperationError, match="a number changed"):
        compiled(torch.ones(1, device=DEVICE))


def test_results_kept_elsewhere_are_no_secret() -> None:
    """A result that the function stores where nobody can follow is stored at each call."""
    kept: list[torch.Tensor] = []
    store = kept.append  # a builtin method: what it is bound to is not followed
    compiled = marid.compile(lambda x: store(x * 2))
    for call in range(12):
        compiled(torch.full((1,), float(call), device=DEVICE))
    assert [t.item() for t in kept] == [2.0 * call for call in range(12)]
    assert compiled.stats().replays == 0


def test_what_is_put_into_an_argument_is_there_after_each_call() -> None:
    def append(x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        kept.append(1)
        return x * 2

    def switch(x: torch.Tensor, _kept: list[Any]) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    for function in (append, switch):
        compiled = marid.compile(function)
        for call in range(12):
            kept: list[Any] = []
            with torch.enable_grad():
                assert compiled(torch.full((1,), float(call), device=DEVICE), kept).item() == 2.0 * call
                assert (kept, torch.is_grad_enabled()) == (([1], True) if function is append else ([], False))
        assert compiled.stats().replays == 0


def test_what_a_recording_raises_leaves_the_function_usable() -> None:
    """The exception is the user's, and nothing is remembered of that call."""
    fail = [True]

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if fail[0]:
            raise KeyError("mine")
        return y

    compiled = marid.compile(run)
    with pytest.raises(KeyError, match="mine"):
        compiled(torch.ones(1, device=DEVICE))
    fail[0] = False
    assert [compiled(torch.ones(1, device=DEVICE)).item() for _ in range(4)] == [2.0] * 4
    assert compiled.stats().replays == 2
    with pytest.raises(RuntimeError, match="must match"):
        marid.compile(lambda a, b: a + b)(torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE))


@pytest.mark.in_process("a worker's errors come where something is read, when the Python has gone on")
def test_errors_of_a_replay_name_both_lines() -> None:
    """An index out of range at the fourth call: where it was written, where it was read; later calls are fine."""
    table = torch.arange(5.0, device=DEVICE)
    compiled = marid.compile(lambda index: table.index_select(0, index))
    good = torch.tensor([1, 2], device=DEVICE)
    for _ in range(3):
        assert compiled(good).tolist() == [1.0, 2.0]
    with pytest.raises(IndexError, match="out of range") as caught:
        compiled(torch.tensor([1, 9], device=DEVICE))
    assert isinstance(caught.value, marid.errors.MaterializationError)
    assert str(caught.value).count("test_compile.py") == 2
    assert compiled(good).tolist() == [1.0, 2.0]
    assert compiled.stats().replays == 2


def test_nothing_is_kept_alive() -> None:
    """Results and arguments of replays are freed with their last holder."""
    compiled = marid.compile(lambda x: (x @ x).relu())
    for _ in range(3):
        compiled(torch.ones(64, 64, device=DEVICE))
    gc.collect()
    before = torch.remote_accelerator.memory_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(5):
        compiled(torch.ones(64, 64, device=DEVICE))
    assert torch.remote_accelerator.memory_allocated() == before  # pyright: ignore[reportAttributeAccessIssue]


def test_threads() -> None:
    """Several at once, through one compiled function and through several: what one records, no other one runs."""
    torch.ones(1, device=DEVICE)
    wrong: list[Any] = []

    def work(number: int, shared: Any) -> None:
        own = marid.compile(lambda x: x * number + 1)
        try:
            for call in range(25):
                x = torch.full((4,), float(call + number), device=DEVICE)
                expected = torch.full((4,), (call + number) * ((call + number) * number + 1.0)).cumsum(0)
                if shared(x, own(x)).tolist() != expected.tolist():
                    wrong.append((number, call))
        except Exception as error:
            wrong.append((number, error))

    for _ in range(4):
        shared = marid.compile(lambda x, y: (x * y).cumsum(0))
        threads = [threading.Thread(target=work, args=(number, shared)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


_go, _done = threading.Event(), threading.Event()


class _Interlude:
    """Something in whose finaliser, which no recording looks into, another thread comes to its turn."""

    def __del__(self) -> None:
        _go.set()
        _done.wait(5)
        _done.clear()


def test_what_another_thread_runs_is_not_missing_in_a_replay() -> None:
    """A training in another thread runs all that is pending, while a function is recorded."""
    total = torch.zeros(3, device=DEVICE)
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    calls = 6

    def trains() -> None:
        while _go.wait(5):
            _go.clear()
            weight.square().sum().backward()
            optimizer.step()
            weight.sum().item()
            _done.set()

    @marid.compile
    def adds(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        _Interlude()
        return x * 2

    thread = threading.Thread(target=trains, daemon=True)
    thread.start()
    for _ in range(calls):
        adds(torch.ones(3, device=DEVICE))
    assert total.tolist() == [float(calls)] * 3


def test_methods_modules_and_decorators() -> None:
    """A module, a method of a class, a decorator with and without arguments, one inside of another."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2))

        @marid.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            return self.total * 2

    model = Model().to(DEVICE)
    outer = marid.compile(model)
    assert [outer(torch.ones(2, device=DEVICE)).tolist()[0] for _ in range(5)] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert outer.stats().replays == 3
    assert [model(torch.ones(2, device=DEVICE)).tolist()[0] for _ in range(4)] == [12.0, 14.0, 16.0, 18.0]
    assert dict(outer.named_buffers()).keys() == {"total"}

    @marid.compile(fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Doubled."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Doubled.")
    assert torch.func.vmap(double)(torch.ones(3, device=DEVICE)).tolist() == [2.0] * 3


def test_under_no_sync_a_replay_is_no_read() -> None:
    """And it counts as a run."""
    compiled = marid.compile(lambda x: x.exp().sum())
    x = torch.ones(3, device=DEVICE)
    with marid.no_sync():
        results = [compiled(x) for _ in range(4)]
        epoch = marid.epoch()
        results.append(compiled(x))
        assert marid.epoch() == epoch + 1
    assert len({result.item() for result in results}) == 1
    assert marid.stats().functions[0].replays == 3
    marid.reset_stats()
    assert marid.stats().functions == []
    assert compiled.stats().calls == 0


def test_sizes_are_kinds() -> None:
    """Each size is recorded for itself."""
    compiled = marid.compile(lambda x: x.reshape(-1).narrow(0, 0, x.shape[0]) * x.shape[0])
    for _ in range(3):
        for rows in (2, 3, 5):
            x = torch.arange(rows * 2.0).view(rows, 2)
            assert_same(compiled(x.to(DEVICE)), x.reshape(-1).narrow(0, 0, rows) * rows)
    assert compiled.stats().replays == 3


class _State(NamedTuple):
    total: torch.Tensor
    parts: tuple[torch.Tensor, ...]


def test_named_tuples_are_read_like_tuples() -> None:
    """A new one at each call, as a model's state is, is no new kind of argument."""

    def step(x: torch.Tensor, state: _State) -> tuple[torch.Tensor, _State]:
        state = _State(state.total + x, tuple([part * x for part in state.parts]))
        return state.total.sum() + state.parts[0].sum(), state

    compiled = marid.compile(step)
    state, other = (_State(torch.zeros(3).to(d), (torch.ones(3).to(d), torch.ones(1).to(d))) for d in ("cpu", DEVICE))
    for turn in range(8):
        x = torch.arange(3.0) + turn
        expected, state = step(x, state)
        found, other = compiled(x.to(DEVICE), other)
        assert type(other) is _State
        assert_same(found, expected)
        assert_same(other.parts[1], state.parts[1])
    assert compiled.stats().replays >= 4


def test_too_many_kinds_of_arguments_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = marid.compile(lambda x, number: x + number)
    for number in range(marid.settings.compile_kinds + 20):
        compiled(torch.ones(2, device=DEVICE), number)
    assert [record.message for record in caplog.records if "more than 64 kinds of arguments" in record.message]
    assert len(caplog.records) == 1
    assert compiled.stats().fallbacks == {"more than 64 kinds of arguments (MARID_COMPILE_KINDS)": 20}


def test_gradients_through_a_compiled_module() -> None:
    """The most usual way of all: the model is compiled, loss, backward and optimizer are not."""

    def make(device: str) -> Any:
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.GELU(),
            torch.nn.Dropout(0.3),
            torch.nn.LayerNorm(16),
            torch.nn.Linear(16, 4),
        ).to(device)
        run = marid.compile(model) if device == DEVICE else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> Any:
            x = x.clone().requires_grad_()
            optimizer.zero_grad()
            out = run(x * 2)
            loss = out.square().sum() + out.sum()
            loss.backward()
            optimizer.step()
            return (
                loss.detach(),
                out.detach(),
                x.grad,
                [p.grad.clone() for p in model.parameters() if p.grad is not None],
            )

        return step

    torch.manual_seed(0)
    eager = make("cpu")
    torch.manual_seed(0)
    lazy = make(DEVICE)
    torch.manual_seed(1)
    expected = [eager(batch) for batch in _batches(8)]
    torch.manual_seed(1)
    assert_same([lazy(batch.to(DEVICE)) for batch in _batches(8)], expected)
    assert marid.stats().functions[0].replays == 6


def test_several_outputs_with_gradients() -> None:
    """Gradients may come for any of them, in any layout; what does not require gradients stays so."""
    w = torch.linspace(-1, 1, 12).view(3, 4)
    own = {device: w.clone().to(device).requires_grad_() for device in ("cpu", DEVICE)}

    def make(device: str) -> Any:
        weight = own[device]
        return lambda x, y: ((x @ weight).sin(), {"b": weight.exp() * y}, (x * 2).detach(), x.sum())

    eager, compiled = make("cpu"), marid.compile(make(DEVICE))
    for call in range(9):
        x, y = torch.randn(2, 3), torch.randn(3, 4).requires_grad_(call % 2 == 0)
        found = []
        for device, run in (("cpu", eager), (DEVICE, compiled)):
            a, b = x.to(device), y.detach().to(device).requires_grad_(y.requires_grad)
            first, rest, plain, total = run(a, b)
            loss = [first.sum(), rest["b"].square().sum(), (first.t() @ first).sum() + rest["b"].mean()][call % 3]
            loss.backward()
            found.append([first.detach(), rest["b"].detach(), plain, total, _grad(own[device]).clone(), b.grad])
        assert_same(found[1], found[0])
    assert compiled.stats().replays >= 4


def test_backward_of_a_replay_has_the_errors_of_pytorch() -> None:
    """A second backward, a saved tensor that was written in between, a second derivative."""
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    compiled = marid.compile(lambda x: (x * w).exp())
    x = torch.ones(3, device=DEVICE)
    for _ in range(3):
        y = compiled(x)
    assert compiled.stats().replays == 1
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()
    w.grad = None
    y = compiled(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert _grad(w).tolist() == (2 * torch.ones(3).exp()).tolist()
    for target in (x, w.data):
        y = compiled(x)
        if target is x:
            x.mul_(1)
        else:
            y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    (first,) = torch.autograd.grad(compiled(x).sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        first.sum().backward()


def test_losses_after_backward_are_spent() -> None:
    """``return loss`` after ``loss.backward()``: it requires gradients, and another backward raises."""
    w = torch.ones(3, device=DEVICE, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = (x * w).square().sum()
        loss.backward()
        return loss

    compiled = marid.compile(run)
    for _ in range(5):
        w.grad = None
        loss = compiled(torch.ones(3, device=DEVICE))
        assert loss.requires_grad
        assert not loss.is_leaf
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        assert _grad(w).tolist() == [2.0] * 3
    assert compiled.stats().replays == 3


def test_gradients_to_what_nobody_knows() -> None:
    """A graph that leaves the function: never cut off, the Python runs."""
    hidden = torch.ones(3, device=DEVICE, requires_grad=True)
    derived = hidden * 2
    compiled = marid.compile(lambda x: (x * derived).sum())
    for _ in range(4):
        (gradient,) = torch.autograd.grad(compiled(torch.ones(3, device=DEVICE)), hidden, retain_graph=True)
        assert gradient.tolist() == [2.0] * 3
    frozen = marid.compile(lambda x: (x.mul_(2), x)[1])
    for _ in range(4):
        leaf = torch.ones(3, device=DEVICE, requires_grad=True)
        frozen(leaf * 1).sum().backward()
        assert _grad(leaf).tolist() == [2.0] * 3


def test_dynamic_dimensions() -> None:
    """Marks are kept, checked, and sizes of marked dimensions are no further kinds of arguments."""
    x = torch.zeros(2, 3, device=DEVICE)
    marid.mark_dynamic(x, 0)
    marid.mark_dynamic(x, -1)
    with pytest.raises(IndexError):
        marid.mark_dynamic(x, 2)
    marid.settings.compile_kinds = 3
    try:
        for dims, replayed in ((None, 3), ({0: 0}, 10), ({"x": 0}, 10)):
            compiled = marid.compile(lambda x: x * x.shape[0], dynamic_dims=dims)
            for rows in range(1, 11):
                for _ in range(3):
                    y = torch.ones(rows, 2)
                    lazy = compiled(x=y.to(DEVICE)) if dims == {"x": 0} else compiled(y.to(DEVICE))
                    assert_same(lazy, y * rows)
            assert compiled.stats().replays == replayed
    finally:
        marid.settings.compile_kinds = 64


def test_modules_of_marids_own_package_hold_parameters_too() -> None:
    # As RWKV-7's does.
    kind = type("Scaled", (torch.nn.Linear,), {"__module__": "marid.models"})
    _compare(lambda device: kind(8, 3).to(device), replays=4)


def test_autocast_reaches_into_what_is_composed() -> None:
    """Of operators on its lists, below autograd: a replay computes what the function did by itself."""

    def make(device: str) -> Any:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device).eval()
        turn = torch.eye(2, 3).to(device)

        def step(x: torch.Tensor) -> Any:
            with torch.autocast(device, torch.bfloat16):
                grid = F.affine_grid(turn.expand(5, 2, 3), [5, 1, 4, 2], align_corners=False)
                shown = F.grid_sample(x.view(5, 1, 4, 2), grid, align_corners=False)
                with torch.no_grad():
                    encoded = layer(x.view(5, 1, 8))
            return grid, shown, encoded, shown.sum()

        return step

    assert _compare(make).stats().replays > 0
