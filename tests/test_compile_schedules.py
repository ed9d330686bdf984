"""Schedules that a function under ``marid.compile`` moves on: replays move them on as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, RAdam, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import marid

DEVICE = "remote_accelerator"
CALLS = 50

Step = Callable[[torch.Tensor], Any]


def both(make: Callable[[Any, Optimizer, str], tuple[Any, Step]], optimizer_of: Any = SGD, calls: int = CALLS) -> Any:
    """A step of an optimizer and a schedule, on the device and on the CPU, gives and leaves the same."""
    made = []
    for device in ("cpu", DEVICE):
        weight = torch.ones(3).to(device).requires_grad_()
        optimizer = optimizer_of([weight], lr=0.05)
        optimizer._opt_called = True  # or PyTorch warns, where a schedule is made behind a step
        made.append((weight, optimizer, *make(weight, optimizer, device)))
    (weight, optimizer, schedule, eager), (own, own_optimizer, own_schedule, lazy) = made
    compiled = marid.compile(lazy)
    for call in range(calls):
        x = 0.1 * torch.arange(3.0) + (call % 7 == 6)
        expected, found = eager(x), compiled(x.to(DEVICE))
        assert repr(found) == repr(expected), (call, compiled.stats())
        assert own_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"], (call, compiled.stats())
        assert own_schedule.state_dict().get("last_epoch") == schedule.state_dict().get("last_epoch")
        assert own_schedule.get_last_lr() == schedule.get_last_lr()
    assert torch.equal(own.detach().cpu(), weight.detach())
    return compiled.stats()


def usual(schedule_of: Callable[[Optimizer], Any], ahead: bool = False) -> Any:
    """A step of training; the schedule moves on behind the optimizer's step, or ``ahead`` of it."""

    def make(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
        schedule = schedule_of(optimizer)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = (weight * x).square().sum()
            loss.backward()
            if ahead:
                schedule.step()
            optimizer.step()
            if not ahead:
                schedule.step()
            return loss.item()

        return schedule, step

    return make


class Counted(lr_scheduler.ExponentialLR):
    counted = 0

    def step(self, epoch: int | None = None) -> None:
        Counted.counted += 1
        super().step(epoch)


class Moved:
    """Something that is called like a function and has no code."""

    def __get__(self, schedule: Any, owner: type) -> Any:
        return self if schedule is None else lambda: lr_scheduler.ExponentialLR.step(schedule)


class Called(lr_scheduler.ExponentialLR):
    step = Moved()  # type: ignore[assignment]


class Own(LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.5 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


FOLLOWED: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, CALLS),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 5, 0.5)]
    ),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=9), lr_scheduler.ExponentialLR(o, 0.9)], [9]
    ),
    "warm-up and back": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200, cycle_momentum=False),
}


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("name", FOLLOWED)
def test_schedules_of_pytorch_are_moved_on(name: str, optimizer: Any) -> None:
    assert both(usual(FOLLOWED[name]), optimizer).replays > CALLS // 2


def test_a_check_in_place_of_a_replay_finds_nothing_changed() -> None:
    stats = both(usual(lambda o: lr_scheduler.CosineAnnealingLR(o, 300)), AdamW, calls=150)
    assert stats.replays > 130
    assert not any("not watched" in reason for reason in stats.fallbacks)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: Counted(o, 0.9),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200),
        lambda o: Called(o, 0.9),
        Own,
    ],
)
def test_other_schedules_run_as_python(schedule: Callable[[Optimizer], Any]) -> None:
    Counted.counted = 0
    optimizer = AdamW if not isinstance(schedule, type) else SGD
    both(usual(schedule), optimizer)
    if Counted.counted:
        assert Counted.counted == 2 * (CALLS + 1)


def test_rates_that_are_not_followed_are_those_of_the_schedule() -> None:
    both(usual(FOLLOWED["step"]), RAdam)


def to_a_place(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)

    @pytest.mark.filterwarnings("ignore")
    def step(x: torch.Tensor) -> float:
        (weight * x).sum().backward()
        optimizer.step()
        schedule.step(3)
        return weight.detach().sum().item()

    return schedule, step


def looked_at(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: torch.Tensor) -> Any:
        (weight * x).sum().backward()
        optimizer.step()
        schedule.step()
        return weight.detach().sum().item(), schedule.get_last_lr()[0]

    return schedule, step


def counted_elsewhere(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = [0]

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        schedule.step()
        seen[0] += schedule.last_epoch
        return weight.detach().sum().item() * seen[0]

    return schedule, step


# Moved on before the step, a rate stays for some calls, and then another one is used.
AHEAD = usual(lambda o: lr_scheduler.StepLR(o, 9, 0.5), ahead=True)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("make", [AHEAD, to_a_place, looked_at, counted_elsewhere])
def test_what_is_not_followed_is_right(make: Any) -> None:
    both(make)


def test_a_plateau_is_seen_by_python() -> None:
    def make(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)

        def step(x: torch.Tensor) -> float:
            (weight * x).sum().backward()
            optimizer.step()
            schedule.step(1.0)
            return weight.detach().sum().item()

        return schedule, step

    both(make)


@pytest.mark.in_process("tests of numbers are replayed where what runs is in this process")
def test_a_schedule_is_moved_on_once_where_a_test_fails() -> None:
    def make(weight: Any, optimizer: Optimizer, _device: str) -> tuple[Any, Step]:
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 200)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = (weight * x).square().sum()
            loss.backward()
            optimizer.step()
            if x.sum() > 1:
                schedule.step()
            schedule.step()
            return loss.item()

        return schedule, step

    stats = both(make, calls=80)
    assert stats.guard_failures > 5
    assert stats.replays > 20


def test_a_schedule_that_somebody_else_moves_too() -> None:
    schedules: list[Any] = []

    def make(weight: Any, optimizer: Optimizer, device: str) -> tuple[Any, Step]:
        schedule, step = usual(FOLLOWED["cosine"])(weight, optimizer, device)
        schedules.append(schedule)
        return schedule, step

    def moving(weight: Any, optimizer: Optimizer, device: str) -> tuple[Any, Step]:
        schedule, step = make(weight, optimizer, device)
        if device != "cpu":
            return schedule, step
        calls = [0]

        def stepped(x: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] in (20, 30):
                for one in schedules:
                    one.step()
            return step(x)

        return schedule, stepped

    assert both(moving).replays > CALLS // 2
