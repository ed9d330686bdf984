"""What passes are given: a part as a graph that computes what was recorded, and its description again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marid
from marid.execute.compiled.describe import describe
from marid.execute.compiled.passes.rewriter import Rewriter
from marid.execute.compiled.passes.storages import Storages
from tests.helpers import DEVICE, assert_same
from tests.partitions import Bound, bound, change, compute
from tests.random_work import Writer

pytestmark = pytest.mark.in_process("reads what the in-process engine would compile")

aten = torch.ops.aten

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def _run(work: Callable[..., Any], *tensors: torch.Tensor) -> list[Bound]:
    given = [t.to(DEVICE) for t in tensors]
    marid.materialize(*given)

    def run() -> None:
        found = work(*given)
        marid.materialize(*(found if isinstance(found, tuple) else (found,)), *given)

    return bound(run)


def _rewriters(found: list[Bound]) -> list[tuple[dict[str, Any], Rewriter]]:
    made = []
    for one in found:
        for part in one.parts():
            description = describe(part, one.program, one.specs, one.params)
            numbers = [number.value(one.params) for number in part.numbers]
            made.append((description, Rewriter(description, numbers, set())))
    return made


def _views_and_writes(x: torch.Tensor) -> Any:
    y = x.exp() + 1
    z = y.t()[1:]
    z.mul_(2)
    y[0].fill_(0.5)
    return z.sum(0), (y * x).log().tanh()


def _lists(x: torch.Tensor) -> Any:
    parts = list((x * 2).tanh().split(2))
    torch._foreach_mul_(parts, [2.0, 3.0])
    torch._foreach_addcmul_(parts, parts, parts, value=0.5)
    values, means = torch.var_mean(torch.cat(parts), 1)
    return values.sqrt() + means, torch.stack(parts).exp()


def _training(x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(x.device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.log_softmax(model(x), -1).square().mean().backward()
        optimizer.step()
    return tuple(p.detach() for p in model.parameters())


@pytest.mark.parametrize("work", [_views_and_writes, _lists, _training])
def test_a_graph_says_what_was_recorded(work: Callable[..., Any]) -> None:
    """Its description is the one that it was made of."""
    found = _rewriters(_run(work, X))
    assert found
    for description, rewriter in found:
        before = copy.deepcopy(description)
        rewriter.complete()
        assert rewriter.description() == before == description


@pytest.mark.parametrize("work", [_views_and_writes, _lists])
def test_a_graph_computes_what_was_recorded(work: Callable[..., Any]) -> None:
    """Operation by operation, bit for bit."""
    [one] = _run(work, X)
    [part] = one.parts()
    inputs = one.inputs_of(part)
    found = compute(change(one, part), one, [t.clone() for t in inputs])
    for got, expected in zip(found, one.outputs_of(part), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("fast_math", [False, True])
def test_random_programs(fast_math: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs say the same, and where passes change them they are well formed."""
    monkeypatch.setattr(marid.settings, "fast_math", fast_math)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    parts = 0
    for seed in range(40):
        found = bound(lambda seed=seed: marid.materialize(*Writer(seed, DEVICE).run(40)))
        for description, rewriter in _rewriters(found):
            assert rewriter.description() == description
            parts += 1
        for one in found:
            for part in one.parts():
                change(one, part)
    assert parts > 40


def test_who_shares_memory_and_when_it_is_written() -> None:
    """Views, results of writes, and pieces of a list."""

    def work(x: torch.Tensor) -> Any:
        y = x.exp()
        row, *_ = y.unbind()
        z = y.sin()
        row.add_(1)
        return z + y.cos()

    [(_, rewriter)] = _rewriters(_run(work, X))
    exponential, row, sine, add, cosine = (
        next(node for node in rewriter.graph.nodes if getattr(node.target, "__name__", "").startswith(name))
        for name in ("exp", "getitem", "sin", "add_", "cos")
    )
    storages = Storages(rewriter)
    assert storages.of(row) is storages.of(add) is storages.of(exponential) is exponential
    assert storages.of(sine) is sine
    assert storages.is_written(exponential)
    assert not storages.is_written(sine)
    assert storages.unwritten([exponential], exponential, sine)
    assert not storages.unwritten([exponential], sine, cosine)
