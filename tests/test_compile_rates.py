"""Learning rates that change from call to call, under ``marid.compile``: the numbers that come of them are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop

import marid

DEVICE = "remote_accelerator"
TURNS = 40


def trained(device: str, make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer, int], None]) -> Any:
    """The weights after some turns, and on the device what became of the calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    optimizer = make([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    function = step if device == "cpu" else marid.compile(step)
    losses = []
    for turn in range(TURNS):
        torch.manual_seed(turn)
        losses.append(function(torch.randn(8, 4).to(device), torch.randint(3, (8,)).to(device)))
        schedule(optimizer, turn)
    weights = [p.detach().cpu() for p in model.parameters()]
    return losses, weights, None if device == "cpu" else function.stats()


def both(make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer, int], None]) -> Any:
    """What became of the calls; losses and weights are those of the CPU."""
    expected, weights, _ = trained("cpu", make, schedule)
    found, others, stats = trained(DEVICE, make, schedule)
    assert found == expected
    assert all(map(torch.equal, weights, others))
    return stats


def warmed_up(optimizer: Optimizer, turn: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (turn + 2) / TURNS


def apart(optimizer: Optimizer, turn: int) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-2 * (turn + 2 + number) / TURNS


def one_of_two(optimizer: Optimizer, turn: int) -> None:
    optimizer.param_groups[1]["lr"] = 1e-2 * (turn + 2) / TURNS


def late(optimizer: Optimizer, turn: int) -> None:
    if turn == TURNS // 2:
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = (1e-3, 2e-3)[number]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda groups: SGD(groups, lr=1e-2),
    "SGD with momentum and decay": lambda groups: SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD in a loop": lambda groups: SGD(groups, lr=1e-2, foreach=False),
    "Adam": lambda groups: Adam(groups, lr=1e-2),
    "AdamW": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1),
    "AdamW in a loop": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False),
    "Adamax": lambda groups: Adamax(groups, lr=1e-2),
    "Adagrad": lambda groups: Adagrad(groups, lr=1e-2, lr_decay=0.01),
    "Adadelta": lambda groups: Adadelta(groups, lr=1e-2),
    "RMSprop": lambda groups: RMSprop(groups, lr=1e-2),
    "RMSprop with momentum": lambda groups: RMSprop(groups, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("schedule", [warmed_up, apart], ids=["together", "apart"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rate_that_changes_at_each_step_is_followed(make: Any, schedule: Any) -> None:
    assert both(make, schedule).replays > TURNS - 12


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW"]], ids=["SGD", "AdamW"])
def test_rates_of_some_groups_change(make: Any) -> None:
    assert both(make, one_of_two).replays > TURNS - 12


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW"]], ids=["SGD", "AdamW"])
def test_rates_that_were_equal_part_late(make: Any) -> None:
    """Numbers of two groups were equal in all recordings, and cannot be told from each other: Python runs again."""
    assert both(make, late).replays > TURNS // 2


def test_schedulers_of_pytorch_are_followed() -> None:
    schedules: dict[int, Any] = {}

    def cosine(optimizer: Optimizer, _turn: int) -> None:
        if id(optimizer) not in schedules:
            optimizer._opt_called = True  # type: ignore[attr-defined]  (or PyTorch warns, since it did not see the step)
            schedules[id(optimizer)] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TURNS)
        schedules[id(optimizer)].step()

    assert both(OPTIMIZERS["AdamW"], cosine).replays > TURNS - 14


def test_a_number_of_the_users_own_that_equals_one_of_the_rate_stays() -> None:
    def train(device: str) -> Any:
        weight = torch.ones(3).to(device).requires_grad_()
        optimizer = SGD([weight], lr=0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            return torch.add(weight.detach(), x, alpha=-0.5)

        function = step if device == "cpu" else marid.compile(step)
        found = []
        for turn in range(30):
            optimizer.param_groups[0]["lr"] = 0.5 if turn < 10 else 0.5 / turn
            found.append(function(torch.arange(3.0).to(device)).cpu())
        return found, None if device == "cpu" else function.stats()

    expected, _ = train("cpu")
    found, stats = train(DEVICE)
    assert all(map(torch.equal, found, expected))
    assert stats.replays > 15


def test_a_rate_that_the_function_changes_runs_as_python() -> None:
    def train(device: str) -> Any:
        weight = torch.ones(3).to(device).requires_grad_()
        optimizer = SGD([weight], lr=0.5)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9

        function = step if device == "cpu" else marid.compile(step)
        for _ in range(12):
            function(torch.arange(3.0).to(device))
        return weight.detach().cpu(), None if device == "cpu" else function.stats()

    expected, _ = train("cpu")
    found, stats = train(DEVICE)
    assert torch.equal(found, expected)
    assert stats.replays == 0
    assert any("'lr'" in reason for reason in stats.fallbacks)


def decaying(device: str, optimizer_of: Any, factor_of: Any) -> list[torch.Tensor]:
    """What 30 calls return, of a step whose rate falls from call to call."""
    weight = torch.ones(3).to(device).requires_grad_()
    optimizer = optimizer_of([weight], lr=0.5)
    factor = factor_of(optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.detach() * factor()

    function = step if device == "cpu" else marid.compile(step)
    found = []
    for turn in range(30):
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + turn)
        found.append(function(torch.arange(3.0).to(device)).cpu())
    return found


class Halving(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if group["lr"] < 0.1:
                    p.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (SGD, lambda optimizer: lambda: 2.0 if optimizer.param_groups[0]["lr"] > 0.1 else 1.0),
        (Halving, lambda _: lambda: 1.0),
    ],
    ids=["a function", "an optimizer"],
)
def test_code_of_the_users_own_that_looks_at_a_rate_sees_each(optimizer: Any, factor: Any) -> None:
    assert all(map(torch.equal, decaying(DEVICE, optimizer, factor), decaying("cpu", optimizer, factor)))
