"""Lines, scopes and what is known of both, where several threads come to them for the first time at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from marid.semantics.scopes import current_scope, current_site
from tests.helpers import DEVICE

pytestmark = pytest.mark.in_process("looks at what this process recorded")

_THREADS = 4


def _at_once(work: Callable[[], Any]) -> list[Any]:
    """What several threads get that do the same at the same time."""
    start, found = threading.Barrier(_THREADS), []

    def run() -> None:
        start.wait()
        found.append(work())

    threads = [threading.Thread(target=run) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _line(number: int) -> Callable[[], Any]:
    """Code that no other function shares."""
    made: dict[str, Any] = {"current_site": current_site}
    exec(compile(f"def line():\n    return current_site(), {number}\n", f"user_{number}.py", "exec"), made)
    return made["line"]


def test_a_line_is_one_site_for_all_threads(switching: None) -> None:
    for number in range(300):
        line = _line(number)
        sites = [site for site, _ in _at_once(line)] + [line()[0]]
        assert len(set(map(id, sites))) == 1
        assert str(sites[0]) == f"user_{number}.py:2"


def test_a_scope_is_one_object_for_all_threads(switching: None) -> None:
    class Seen(nn.Module):
        def forward(self) -> Any:
            return current_scope()

    for _ in range(300):
        module = nn.ModuleDict({"part": type("Part", (Seen,), {})()})
        module.forward = module["part"].forward  # a module whose part is called through it
        scopes = [*_at_once(module), module()]
        assert len(set(map(id, scopes))) == 1


def test_threads_that_train_at_once(switching: None) -> None:
    """Each with its own model, by lines that are new to all of them."""

    def train(device: str, seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(8, 8, generator=generator).mul(0.3) for _ in range(3)]
        weights = [weight.to(device).requires_grad_() for weight in weights]
        h = torch.randn(5, 8, generator=generator).to(device)
        losses = []
        for _ in range(4):
            out = h
            for weight in weights:
                out = torch.tanh(out @ weight)
            loss = out.square().mean()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight.sub_(weight.grad * 0.1)
                    weight.grad.zero_()
            losses.append(loss.item())
        return losses

    seeds = iter(range(_THREADS))
    found = _at_once(lambda: (seed := next(seeds), train(DEVICE, seed)))
    assert len(found) == _THREADS
    for seed, losses in found:
        assert losses == train("cpu", seed)
