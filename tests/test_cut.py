"""Cutting and binding: C++ and Python choose the same nodes, and make the same task of them."""

from __future__ import annotations

import gc
import random
import sys
import types
from typing import Any

import pytest
import torch

import marid
from marid import native
from marid.frontend import handles
from marid.frontend.materialize import pending_nodes
from marid.graph.node import Node
from marid.graph.program import Task
from tests import oracle
from tests.helpers import DEVICE


def _random_work(seed: int) -> list[torch.Tensor]:
    """Tensors with views, writes, several results, lists, numbers, constants and random draws; some are dropped."""
    choose = random.Random(seed)
    tensors = [torch.ones(4, 4, device=DEVICE), torch.rand(4, 4, device=DEVICE)]
    if choose.random() < 0.5:
        marid.materialize(tensors[0])
    made: list[Any] = [
        lambda a, b: a + b,
        lambda a, b: a * 2.5,
        lambda a, b: a.t(),
        lambda a, b: a[:, 1:].t()[:1].expand(4, 4),
        lambda a, b: torch.cat([a, b])[:4],
        lambda a, b: a.sum(0, keepdim=True).expand(4, 4),
        lambda a, b: a.max(0)[0].expand(4, 4),
        lambda a, b: a.split(2)[1].repeat(2, 1),
        lambda a, b: torch.bernoulli(b.abs().clamp(0, 1)),
        lambda a, b: a.clone().add_(b, alpha=2),
        lambda a, b: torch.where(a > b, a, b),
        lambda a, b: torch.var_mean(a, 1)[1].expand(4, 4),
        lambda a, b: a.to(torch.float64).to(torch.float32),
        lambda a, b: a.clamp(min=0.5),
    ]
    writes: list[Any] = [
        lambda a, b: a.clone()[0].mul_(2),
        lambda a, b: torch._foreach_add_([a.clone(), b.clone()], 1.0),
        lambda a, b: b[1:3].fill_(3) if b._is_view() is False and b.stride() == (4, 1) else None,
        lambda a, b: a.add_(b.sum()) if a.stride() == (4, 1) else None,
    ]
    for _ in range(choose.randrange(3, 40)):
        a, b = choose.choice(tensors), choose.choice(tensors)
        if choose.random() < 0.25:
            choose.choice(writes)(a, b)
        else:
            tensors.append(choose.choice(made)(a, b))
        if len(tensors) > 3 and choose.random() < 0.3:
            del tensors[choose.randrange(2, len(tensors))]
    return tensors


def _summary(task: Task) -> list[Any]:
    return [
        task.key,
        [id(buffer) for buffer in task.inputs],
        task.input_slots,
        [repr(param) for param in task.params],
        [(id(value), slot) for value, slot in task.slots.items()],
        [None if outs is None else [id(out) for out in outs] for outs in task.results],
        [id(value) for value in task.outputs],
        sorted(task.escaping),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_both_cut_and_bind_the_same(seed: int) -> None:
    """Random programs, of which one or two tensors are asked for."""
    tensors = _random_work(seed)
    choose = random.Random(seed)
    asked = choose.sample(tensors, choose.choice([1, 1, 2]))
    tape = handles.tape(0)

    def cut(method: Any) -> list[Node]:
        return method([node for tensor in asked for node in pending_nodes(tensor)])

    ours = cut(tape.cut)
    theirs = cut(lambda asked: oracle.cut(tape, asked))
    assert [id(node) for node in ours] == [id(node) for node in theirs]
    del theirs
    assert [id(node) for node in tape.pending()] == [id(node) for node in oracle.pending(tape)]
    summaries = []
    for bind in (native.module.bind, lambda task, _: oracle.bind(task)):
        task = Task(ours)
        bind(task, ours)
        summaries.append(_summary(task))
        del task
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize("more", [-2, -1, 0])
def test_references_are_told_apart_on_any_interpreter(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From CPython 3.14 on ``sys.getrefcount(x)`` is one less, since variables lend their reference; the function that
    counts here adds one of its own."""

    def counted(thing: object) -> int:
        return sys.getrefcount(thing) + more

    for seed in range(10):
        tensors = _random_work(seed)
        nodes = handles.tape(0).cut(pending_nodes(tensors[-1]))
        expected, task = Task(nodes), Task(nodes)
        native.module.bind(expected, nodes)
        summary = _summary(expected)
        del expected
        with monkeypatch.context() as patched:
            patched.setattr(oracle, "sys", types.SimpleNamespace(getrefcount=counted))
            oracle.bind(task)
        assert _summary(task) == summary


def test_an_error_of_a_needed_node_is_raised() -> None:
    """By both, with its own type; what does not need it is cut all the same."""
    x, bad = torch.arange(3.0, device=DEVICE), torch.tensor([7]).to(DEVICE)
    lost = x.index_select(0, bad)
    with pytest.raises(marid.errors.MaterializationError):
        lost.tolist()
    later, other = x * 3, x * 2
    tape = handles.tape(0)
    for method in (tape.cut, lambda asked: oracle.cut(tape, asked)):
        with pytest.raises(IndexError):
            method([lost._value])
        assert len(method([other._value])) == 1
    assert later.tolist() == [0, 3, 6]


def test_nothing_leaks() -> None:
    """Neither nodes nor keys stay behind."""
    x = torch.ones(3, device=DEVICE)
    op = torch.ops.aten.add.Tensor

    def counts() -> list[int]:
        for _ in range(50):
            (x + 1).tolist()
        torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
        gc.collect()
        return [sys.getrefcount(op), sys.getrefcount(x._value), sys.getrefcount(x._value.concrete)]

    first, *later = [counts() for _ in range(4)]
    # Other tests' garbage may go meanwhile, but nothing grows by a reference a run.
    assert all(now - then < 25 for count in later for now, then in zip(count, first, strict=True))


def test_a_long_chain_is_cut_without_recursion() -> None:
    """A hundred thousand operations that nobody read."""
    before = marid.settings.max_pending_nodes
    marid.settings.max_pending_nodes = 1_000_000
    try:
        y = x = torch.zeros((), device=DEVICE)
        for _ in range(100_000):
            y = y + 1
        assert len(handles.tape(0).cut(pending_nodes(y))) >= 100_000
        assert y.item() == 100_000
    finally:
        marid.settings.max_pending_nodes = before
    assert x.item() == 0
