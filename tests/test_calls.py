"""Recording calls: C++ and Python read and record the same, and keys tell apart what must be told apart."""

from __future__ import annotations

import gc
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marid
from marid import native
from marid.frontend import calls, handles, record
from marid.graph.node import Node, Output
from tests.helpers import DEVICE, on_both

needs_module = pytest.mark.skipif(native.module is None, reason="needs the C++ half and Python's headers")

TENSORS = [torch.zeros(shape, device=DEVICE) for shape in ((), (2,), (3, 2))]

_numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.complex_numbers())
_others = st.sampled_from([None, "mean", torch.float16, torch.channels_last, torch.strided])
_strange = st.sampled_from([torch.device("cpu"), torch.zeros(()), 1 + 0j, object(), {1: 2}, b"bytes"])
_plain = st.one_of(st.sampled_from(TENSORS), _numbers, _others)
_arguments = st.one_of(_plain, _plain, _plain, st.lists(_plain, max_size=4), st.tuples(_plain, _plain), _strange)
_names = st.sampled_from(["dtype", "alpha", "out", "device", "generator", "layout", "pin_memory", "memory_format"])


@needs_module
@settings(max_examples=2_000, deadline=None, derandomize=True)
@given(st.lists(_arguments, max_size=5), st.dictionaries(_names, _arguments, max_size=3), st.booleans())
def test_both_readers_read_the_same(args: list[Any], kwargs: dict[str, Any], exact: bool) -> None:
    """Keys, arguments and tensors, or nothing, for any mixture of arguments."""
    mine = calls.take(marid.LazyTensor, tuple(args), kwargs, exact)
    other = native.module.take(tuple(args), kwargs or None, exact)
    assert (mine is None) == (other is None)
    if mine is not None:
        assert [_shown(part) for part in mine[:3]] == [_shown(part) for part in other[:3]]
        assert [id(tensor) for tensor in mine[3]] == [id(tensor) for tensor in other[3]]


def _shown(part: Any) -> Any:
    """A form in which NaN equals itself, and 1 is not 1.0 or True."""
    if isinstance(part, tuple):
        return [_shown(item) for item in part]
    return (type(part), repr(part)) if isinstance(part, (int, float, complex, str, type)) else (type(part), id(part))


@needs_module
def test_reading_leaks_nothing() -> None:
    """Also where a call is left to the caller halfway."""
    value = TENSORS[1]._value
    counted = [value, value.spec, "text", 1234567.5, TENSORS[1], torch.float16]
    before = [sys.getrefcount(thing) for thing in counted]
    for last in (counted[2], object()):
        for _ in range(100):
            native.module.take((TENSORS[1], [TENSORS[1], counted[2]], counted[3]), {"a": counted[5], "b": last}, True)
    assert [sys.getrefcount(thing) for thing in counted] == before


def test_numbers_that_are_equal_but_not_the_same_are_told_apart() -> None:
    """``1``, ``1.0`` and ``True`` give other dtypes; so do their places in lists other shapes."""

    def run(device: str) -> list[Any]:
        found = []
        for _ in range(3):
            for number in (1, 1.0, True, 0, 0.0, False, -0.0, 1j, math.inf, -math.inf, math.nan):
                x = torch.ones(2, dtype=torch.int32, device=device)
                found += [x + number, torch.full((2,), number, device=device), x.bool() * number]
            x = torch.ones(1, 1, device=device)
            found += [x.expand(1, 2), x.expand(2, 1), x.sum(0), x.sum(1), x.sum((0, 1)), x.sum(0, keepdim=True)]
        return found

    on_both(run)


def test_tensors_of_two_devices_are_refused_every_time() -> None:
    """However often the same call was made on one device."""
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=f"{DEVICE}:1")
    for _ in range(3):
        assert (x + x).device.index == 0
        assert (y + y).device.index == 1
        with pytest.raises(RuntimeError, match="same device"):
            x + y
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, y])


def test_where_arguments_share_memory_is_part_of_the_call() -> None:
    """The same specs, written to themselves, to a view of themselves and to another tensor."""

    def run(device: str) -> list[Any]:
        found = []
        for _ in range(3):
            x = torch.arange(6.0, device=device)
            a, b = x[:3], x[3:]
            a.add_(b)
            a.add_(a)
            torch.add(a, b, out=a)
            torch.add(b, b, out=a)
            found.append(x)
        return found

    on_both(run)


def _described(device_index: int) -> list[Any]:
    """Everything about the pending nodes, with their places in the tape for identities."""
    nodes = handles.tape(device_index).pending()
    place = {id(node): index for index, node in enumerate(nodes)}

    def shown(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [shown(item) for item in value]
        if isinstance(value, Output):
            return "output", place.get(id(value.node)), value.path
        return ("node", place.get(id(value))) if isinstance(value, Node) else value

    return [
        (
            node.op,
            shown(node.args),
            shown(node.kwargs),
            node.spec,
            shown(node.root),
            node.site,
            node.scope,
            shown(node.after),
            shown(node.overwrites),
            None
            if node.outs is None
            else [(out.path, out.spec, shown(out.root)) for out in (o() for o in node.outs) if out],
        )
        for node in nodes
    ]


@needs_module
def test_both_recorders_record_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with their order, lines, modules and phases: views, writes, several results, lists and keywords."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = torch.arange(8.0, device=DEVICE).view(2, 4)

    def run() -> list[Any]:
        x = start * 2
        first, second = x.split(1)
        first.add_(second, alpha=2)
        x.t()[0].mul_(3).clamp_(min=0.5)
        x.addcmul_(start, start)
        torch.add(first, 1, out=second)
        kept = [x.sum(0, keepdim=True, dtype=torch.float64), torch.cat([x, x[:, 1:]], 1), x.max(0), x.add_(x), x + 1e6]
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [*kept, loss]

    def recorded() -> tuple[list[Any], list[Any]]:
        torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
        results = run()
        return _described(0), results

    for _ in range(2):  # the first ones are inferred
        recorded()
    before, _results = recorded()
    monkeypatch.setattr(marid.LazyTensor, "__torch_dispatch__", classmethod(record.dispatch_in_python))
    after, _more = recorded()
    assert len(before) > 40
    assert before == after


@needs_module
def test_nodes_are_none_of_the_collectors_business() -> None:
    """A long tape is not walked by Python's collector, nor does it make the collector walk everything else."""
    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(2):
        results = [x + 1, x.view(3, 2), torch.cat([x, x]), x.sum(0, keepdim=True), x.add_(1)]
    nodes = [result._value for result in results[:-1]] + [results[-1]._storage.last_write]
    assert all(node.args is not None for node in nodes)
    held = [item for node in nodes for item in (node, node.args, node.kwargs, node.after, node.overwrites)]
    held += [item for node in nodes for item in (*node.args, *(node.kwargs or ())) if type(item) is tuple]
    assert [item for item in held if gc.is_tracked(item)] == []
