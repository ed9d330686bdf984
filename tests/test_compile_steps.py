"""Random training steps under ``marid.compile``: each call gives what the same step on the CPU gives, bit for bit.

A step has one of PyTorch's optimizers, a schedule that is moved on by it or between calls, state that it replaces or
writes, and results that it reads or not. In between, somebody else changes rates, modes and state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

import marid

DEVICE = "remote_accelerator"
CALLS = 30

OPTIMIZERS: list[Callable[..., optim.Optimizer]] = [
    lambda groups, **given: optim.SGD(groups, **given),
    lambda groups, **given: optim.SGD(groups, momentum=0.9, nesterov=True, **given),
    lambda groups, **given: optim.SGD(groups, momentum=0.9, dampening=0.1, maximize=True, **given),
    lambda groups, **given: optim.Adam(groups, **given),
    lambda groups, **given: optim.AdamW(groups, **given),
    lambda groups, **given: optim.AdamW(groups, amsgrad=True, **given),
    lambda groups, **given: optim.Adamax(groups, **given),
    lambda groups, **given: optim.Adagrad(groups, lr_decay=0.1, **given),
    lambda groups, **given: optim.Adadelta(groups, **given),
    lambda groups, **given: optim.RMSprop(groups, centered=True, **given),
    lambda groups, **given: optim.RMSprop(groups, momentum=0.9, **given),
    lambda groups, **given: optim.NAdam(groups, **given),
    lambda groups, **given: optim.ASGD(groups, **given),
]
SCHEDULES: list[Callable[[optim.Optimizer], Any]] = [
    lambda _: None,
    lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, CALLS),
    lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
]
INSIDE: list[Callable[[optim.Optimizer], Any]] = [
    *SCHEDULES[1:],
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    lambda optimizer: lr_scheduler.ChainedScheduler([one(optimizer) for one in SCHEDULES[1:3]]),
    lambda optimizer: lr_scheduler.SequentialLR(optimizer, [one(optimizer) for one in SCHEDULES[1:3]], [9]),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * CALLS, cycle_momentum=False),
]


class Step:
    """The step of a seed on a device, with its state."""

    def __init__(self, chosen: random.Random, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        width = chosen.choice([3, 8])
        extra = [nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Dropout(0.3)]
        layers = [nn.Linear(4, width), chosen.choice([nn.Tanh, nn.ReLU, nn.GELU])()]
        layers += [layer for layer in extra if chosen.random() < 0.3]
        self.model = nn.Sequential(*layers, nn.Linear(width, 3)).to(device)
        self.parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [{"params": self.parameters}]
        if chosen.random() < 0.5:
            decay = chosen.choice([0.0, 0.01])
            groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "weight_decay": decay}]
        given = {"lr": chosen.choice([1e-2, 0.1]), "weight_decay": chosen.choice([0.0, 0.05])}
        self.optimizer = chosen.choice(OPTIMIZERS)(groups, foreach=chosen.choice([None, None, False]), **given)
        self.state = {"average": torch.zeros(3).to(device), "sum": torch.zeros(()).to(device)}
        self.history = [torch.zeros(3).to(device)]
        self.last = torch.zeros(8, 3).to(device)
        kinds = ["average", "history", "attribute", "places", "sum", "clipping", "twice"]
        self.does = {kind for kind in kinds if chosen.random() < 0.35}
        self.returns = chosen.choice(["number", "list", "dict", "tensor", "arithmetic", "variables", "written", "none"])
        self.sets_to_none = chosen.random() < 0.5
        self.schedule = chosen.choice(INSIDE)(self.optimizer) if chosen.random() < 0.4 else None
        self.moves = chosen.choice(["last", "last", "last", "first", "twice"])

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        if "twice" in self.does:
            (loss * 0.5).backward(retain_graph=True)
        loss.backward()
        if "clipping" in self.does:
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
        if self.schedule is not None and self.moves == "first":
            self.schedule.step()
        self.optimizer.step()
        if self.schedule is not None and self.moves == "last":
            self.schedule.step()
        if self.schedule is not None and self.moves == "twice" and loss.detach() > 0.5:
            self.schedule.step()
            self.schedule.step()
        out = logits.detach()
        if "average" in self.does:
            self.state["average"] = 0.9 * self.state["average"] + 0.1 * out.mean(0)
        if "history" in self.does:
            self.history[0] = self.history[0] + out.sum(0)
        if "attribute" in self.does:
            self.last = out - self.last
        if "sum" in self.does:
            self.state["sum"].add_(out.sum())
        if "places" in self.does:
            self.history[0], self.state["average"] = self.state["average"], self.history[0]
        if self.returns == "number":
            return loss.item()
        if self.returns == "list":
            return [loss.item(), out.sum(0).tolist()]
        if self.returns == "dict":
            return {"loss": loss.item(), "out": out.cpu(), "average": self.state["average"]}
        if self.returns == "tensor":
            return out
        if self.returns == "arithmetic":
            return loss.item() / len(x) + 1, 100.0 * (out.argmax(1) == y).sum().item() / len(y)
        if self.returns == "variables":
            value = loss.item()
            total = self.state["sum"].item()
            return value, total, self.last
        if self.returns == "written":
            return loss.item(), out.mul_(2).sum().item(), out
        return None

    def leaves(self) -> list[Any]:
        """All that the calls have changed."""
        return flat([self.parameters, list(self.model.buffers()), self.state, self.history, self.last])


class Between:
    """What happens between the calls of a step. Nothing of it can be reached from the step."""

    def __init__(self, chosen: random.Random, step: Step) -> None:
        self.random, self.step = chosen, step
        self.schedule = chosen.choice(SCHEDULES)(step.optimizer) if step.schedule is None else None

    def go_on(self, call: int) -> None:
        """The schedule moves on, or somebody sets rates; modes and state change now and then."""
        step = self.step
        if self.schedule is not None:
            self.schedule.step()
        elif call == CALLS // 2 or self.random.random() < 0.2:
            for number, group in enumerate(step.optimizer.param_groups):
                group["lr"] = self.random.choice([1e-2, 1e-3, 0.1]) / (1 + number)
        if self.random.random() < 0.05:
            step.model.train(not step.model.training)
        if self.random.random() < 0.05:
            step.state["average"] = torch.ones_like(step.state["average"])
        if self.random.random() < 0.03:
            step.history[0] = step.state["average"]


def flat(thing: Any) -> list[Any]:
    """The leaves of a result, tensors on the CPU."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        return [leaf for item in thing for leaf in flat(item)]
    return [thing.detach().cpu() if isinstance(thing, Tensor) else thing]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    return type(one) is type(other) and repr(one) == repr(other)


def run(seed: int) -> int:
    """Compare all calls of a seed; how many were replays."""
    choices = random.Random(seed), random.Random(seed)
    eager, lazy = (Step(one, seed, device) for one, device in zip(choices, ("cpu", DEVICE), strict=True))
    others = [Between(one, step) for one, step in zip(choices, (eager, lazy), strict=True)]
    compiled = marid.compile(lazy)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    for call in range(CALLS):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        expected, found = flat(eager(x, y)), flat(compiled(x.to(DEVICE), y.to(DEVICE)))
        where = f"seed {seed}, call {call}, {eager.does}, returns {eager.returns}: {compiled.stats()}"
        assert len(expected) == len(found), where
        assert all(map(same, expected, found)), where
        for one in others:
            one.go_on(call)
        if call % 7 == 6:
            assert all(map(same, eager.leaves(), lazy.leaves())), where
    return compiled.stats().replays


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("first", range(0, 24, 6))
def test_random_steps(first: int) -> None:
    assert sum(map(run, range(first, first + 6))) > 6 * CALLS // 12


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("first", range(100, 1100, 50))
def test_many_random_steps(first: int) -> None:
    assert sum(map(run, range(first, first + 50))) > 50 * CALLS // 4
