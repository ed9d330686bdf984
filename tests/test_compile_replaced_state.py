"""State that a function replaces by a result, under ``marid.compile``: entries, attributes, globals and variables."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import marid
from marid.errors import MaterializationError

DEVICE = "remote_accelerator"


def both(make: Callable[[str], Callable[[Tensor], Any]], calls: int = 30) -> Any:
    """What became of the calls on the device, each of which returned what that on the CPU did."""
    eager, compiled = make("cpu"), marid.compile(make(DEVICE))
    for turn in range(calls):
        torch.manual_seed(turn)
        x = torch.randn(4, 4)
        expected, found = eager(x), compiled(x.to(DEVICE))
        assert torch.equal(found.cpu(), expected), turn
    return compiled.stats()


def test_weights_in_a_dict_that_each_step_replaces() -> None:
    def make(device: str) -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        target = torch.tensor([0, 1, 2, 0]).to(device)

        def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

        def step(x: Tensor) -> Tensor:
            gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(weights, x, target)
            for name, gradient in gradients.items():
                weights[name] = weights[name] - 0.1 * gradient.mean(dim=0)
            return weights["weight"].sum()

        return step

    assert both(make).replays > 20


def test_an_attribute_of_a_module_that_carries_a_hidden_state() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 5)
            self.register_buffer("hidden", torch.zeros(4, 5))
            self.last = torch.zeros(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.cell(x, self.hidden)
            self.last, self.hidden = self.hidden, hidden
            return hidden - self.last

    def make(device: str) -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        cell = Cell().to(device)
        cell.last = cell.last.to(device)
        return torch.no_grad()(lambda x: cell(x))

    assert both(make).replays > 20


def test_a_variable_of_a_closure_and_an_entry_of_a_list() -> None:
    def make(device: str) -> Callable[[Tensor], Tensor]:
        mean, history = torch.zeros(4, 4).to(device), [torch.zeros(4, 4).to(device) for _ in range(2)]

        def step(x: Tensor) -> Tensor:
            nonlocal mean
            mean = 0.9 * mean + 0.1 * x
            history[0], history[1] = history[1], mean
            return history[0] + history[1]

        return step

    both(make)  # in two places from the second call on: it may run as Python, and is right


def test_two_tensors_change_places() -> None:
    def make(device: str) -> Callable[[Tensor], Tensor]:
        state = {"now": torch.zeros(4, 4).to(device), "next": torch.ones(4, 4).to(device)}

        def step(x: Tensor) -> Tensor:
            state["now"].add_(x)
            state["now"], state["next"] = state["next"], state["now"]
            return state["now"] * 2

        return step

    assert both(make).replays > 20


def test_what_somebody_else_puts_there_is_used() -> None:
    state = {"sum": torch.zeros(2, device=DEVICE)}

    @marid.compile
    def step(x: Tensor) -> Tensor:
        state["sum"] = state["sum"] + x
        return state["sum"] * 1

    one = torch.ones(2, device=DEVICE)
    for _ in range(10):
        step(one)
    assert step.stats().replays > 5
    state["sum"] = torch.full((2,), 100.0, device=DEVICE)
    assert step(one).tolist() == [101.0, 101.0]
    assert state["sum"].tolist() == [101.0, 101.0]
    state["sum"] = torch.full((3,), 7.0, device=DEVICE)
    assert step(torch.ones(3, device=DEVICE)).tolist() == [8.0, 8.0, 8.0]
    state["sum"] = torch.zeros(2)  # one of the CPU
    assert step(torch.ones(2)).tolist() == [1.0, 1.0]
    state["sum"] = torch.zeros(2, device=DEVICE, requires_grad=True)
    result = step(one)
    assert result.requires_grad
    del state["sum"]
    state["sum"] = torch.zeros(2, device=DEVICE)
    assert step(one).tolist() == [1.0, 1.0]


def test_one_tensor_in_two_places_stays_in_the_other() -> None:
    def make(device: str) -> Callable[[Tensor], Tensor]:
        first = torch.ones(4, 4).to(device)
        state = {"a": first, "b": first}

        def step(x: Tensor) -> Tensor:
            state["a"] = state["a"] + x
            return state["a"] + state["b"]

        return step

    both(make)


def test_old_tensors_are_let_go() -> None:
    state = {"sum": torch.zeros(2, device=DEVICE)}

    @marid.compile
    def step(x: Tensor) -> None:
        state["sum"] = state["sum"] + x

    old = []
    for _ in range(12):
        old.append(weakref.ref(state["sum"]))
        step(torch.ones(2, device=DEVICE))
    assert step.stats().replays > 5
    gc.collect()
    assert sum(one() is not None for one in old) <= 3
    assert state["sum"].tolist() == [12.0, 12.0]


def test_a_tensor_with_a_history_that_is_kept_runs_as_python() -> None:
    def make(device: str) -> Callable[[Tensor], Tensor]:
        weight = torch.ones(4, 4).to(device).requires_grad_()
        state = {"kept": torch.zeros(4, 4).to(device)}

        def step(x: Tensor) -> Tensor:
            state["kept"] = weight * x
            return state["kept"].detach() + 1

        return step

    assert both(make).replays == 0


@pytest.mark.in_process("a worker's errors come later")
def test_a_failing_replay_replaces_nothing() -> None:
    state = {"sum": torch.zeros(2, device=DEVICE), "index": torch.zeros(1, dtype=torch.int64, device=DEVICE)}

    @marid.compile
    def step(x: Tensor) -> Tensor:
        state["sum"] = state["sum"] + x
        return x.index_select(0, state["index"])

    one = torch.ones(2, device=DEVICE)
    for _ in range(8):
        step(one)
    before = state["sum"].tolist()
    state["index"].fill_(5)
    with pytest.raises(MaterializationError, match="index out of range"):
        step(one)
    assert state["sum"].tolist() == before
