"""What tensors on a worker are for, as it is told: which of them wait on its host first depends on that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import marid
from marid.remote.client.blocks import role_of
from marid.remote.launch import connect as connecting

WORKER = "remote_accelerator:6"


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    marid.connect(workers=1, first=6)
    yield
    connecting.disconnect(6, force=True)


def _role(tensor: torch.Tensor) -> str:
    value = tensor._value  # type: ignore[attr-defined]
    return role_of((value.root or value).concrete.block)


def test_statistics_of_norms_are_buffers() -> None:
    """They are written in a forward, as caches are."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(WORKER)
    norm: nn.BatchNorm2d = model[1]  # type: ignore[assignment]
    made = model(torch.ones(2, 3, 5, 5).to(WORKER))
    marid.materialize(made, *model.buffers())
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    assert {_role(norm.running_mean), _role(norm.num_batches_tracked)} == {"buffer"}
    assert _role(made.detach()) == "activation"


class Cached(nn.Module):
    """Puts what is new behind what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.cat([cache, self.linear(x)], -2)
        return cache.sum(-2), cache


def test_a_cache_that_grows_is_a_cache() -> None:
    """From the empty one on, and over several steps in one program."""
    model, cache = Cached().to(WORKER), torch.empty(0).to(WORKER)
    with torch.no_grad():
        for length in (3, 1, 1):
            made, cache = model(torch.ones(2, length, 4).to(WORKER), cache)
            marid.materialize(made, cache)
            assert _role(cache) == "kv cache"
            assert _role(made) == "activation"
        for _ in range(2):
            made, cache = model(torch.ones(2, 1, 4).to(WORKER), cache)
        marid.materialize(made, cache)
    assert _role(cache) == "kv cache"
    assert cache.shape == (2, 7, 4)
