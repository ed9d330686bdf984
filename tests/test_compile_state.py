"""``marid.compile(..., state=...)``: the user says what a function works on beside its arguments."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import marid
from tests.helpers import DEVICE, assert_same

CALLS = 12
scale = 2.0


def _model_and_optimizer(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_training_step_with_its_state_given() -> None:
    """Results and parameters are those of eager PyTorch, also after a hyperparameter and a mode changed; iterators that
    the function reaches are no reason against it."""
    found = []
    for device in ("cpu", DEVICE):
        model, optimizer = _model_and_optimizer(device)
        steps = itertools.count()

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer, steps: Any = steps) -> torch.Tensor:
            next(steps)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = step if device == "cpu" else marid.compile(step, state=(model, optimizer))
        torch.manual_seed(1)
        losses = []
        for call in range(2 * CALLS):
            if call == CALLS:
                optimizer.param_groups[0]["lr"] = 0.01
            elif call == CALLS + 4:
                model.eval()
            losses.append(run(torch.full((3, 4), call / CALLS, device=device)))
        found.append([losses, [p.detach() for p in model.parameters()]])
    assert_same(found[1], found[0])
    assert marid.stats().functions[0].replays >= 2 * CALLS - 8


def test_what_is_not_given_counts_as_fixed() -> None:
    """A global of the function is not watched, what the given object holds is."""
    holder = {"bias": torch.zeros(1, device=DEVICE), "factor": 1.0}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * scale * holder["factor"] + holder["bias"]

    global scale
    compiled = marid.compile(function, state=holder)
    x = torch.ones(1, device=DEVICE)
    try:
        assert [compiled(x).item() for _ in range(4)] == [2.0] * 4
        scale = 5.0
        assert compiled(x).item() == 2.0
        holder["factor"] = 3.0
        assert [compiled(x).item() for _ in range(3)] == [15.0] * 3
        holder["bias"].fill_(1.0)
        assert compiled(x).item() == 16.0
    finally:
        scale = 2.0
    assert compiled.stats().replays == 5


def test_a_tensor_that_is_not_given_is_named_with_its_line() -> None:
    hidden = torch.ones(3, device=DEVICE)
    compiled = marid.compile(lambda x: x + hidden, state=())
    for _ in range(CALLS):
        assert compiled(torch.ones(3, device=DEVICE)).tolist() == [2.0] * 3
    assert compiled.stats().replays == 0
    [reason] = compiled.stats().fallbacks
    assert "neither an argument nor reachable" in reason
    assert "test_compile_state.py" in reason
