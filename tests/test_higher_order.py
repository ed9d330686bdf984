"""Operators that take functions: ``torch.cond`` and ``map``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves, tree_map

from tests.helpers import DEVICE, assert_same

_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one tensor": lambda x: torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)),
    "two tensors": lambda x: torch.cond(x.sum() > 0, lambda a: (a.sin(), a + 1), lambda a: (a.cos(), a - 1), (x,)),
    "a dictionary": lambda x: torch.cond(x.sum() > 0, lambda a: {"of": a.sin()}, lambda a: {"of": a.cos()}, (x,)),
    "closures": lambda x: torch.cond(x.sum() > 0, lambda: x.sin(), lambda: x.cos(), ()),
    "of each row": lambda x: torch.vmap(
        lambda row: torch.cond(row.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (row,))
    )(x),
    "scan of each row": lambda x: torch.vmap(lambda row: scan(lambda c, a: (c * a, c + a), row[0], row))(x),
    "scan": lambda x: scan(lambda carried, row: (carried * row, carried + row), x[0], x),
    "associative_scan": lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
    "while_loop": lambda x: while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2), (x.new_zeros(()), x)),
    "map": lambda x: map_rows(lambda row: row.sin() * 2, x),
    "map to a dictionary": lambda x: map_rows(lambda row: {"sine": row.sin(), "rest": (row.cos(),)}, x),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", _CALLS)
def test_what_functions_return_is_returned(name: str, trained: bool) -> None:
    given = torch.randn(3, 2)

    def run(device: str) -> Any:
        torch._dynamo.reset()
        x = given.to(device).detach().requires_grad_(trained)
        made = _CALLS[name](x)
        total = sum(leaf.sum() for leaf in tree_leaves(made))
        gradients = torch.autograd.grad(total, x) if trained else ()  # type: ignore[arg-type]
        return tree_map(lambda leaf: leaf.detach().cpu(), (made, gradients))

    assert_same(run(DEVICE), run("cpu"))


def _looped(start: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, step(a)), (start.new_zeros(()), start))[1]


@pytest.mark.parametrize("operator", ["cond", "map", "scan", "while_loop"])
def test_parameters_of_modules_that_functions_call_have_gradients(operator: str) -> None:
    """Compared with the loop or branch as plain Python: on the CPU ``while_loop`` gives another gradient here."""
    given, layer = torch.randn(3, 2), nn.Linear(2, 2)

    def made(x: torch.Tensor, step: nn.Module) -> torch.Tensor:
        match operator:
            case "cond":
                return torch.cond(x.sum() > -100, lambda a: step(a), lambda a: a.cos(), (x,))
            case "map":
                return map_rows(lambda row: step(row), x)
            case "scan":
                return scan(lambda carried, row: (step(carried) * row, carried + row), x[0], x)[0]
        return _looped(x, step)

    def expected(x: torch.Tensor, step: nn.Module) -> torch.Tensor:
        match operator:
            case "map":
                return torch.stack([step(row) for row in x])
            case "scan":
                carried = x[0]
                for row in x:
                    carried = step(carried) * row
                return carried
            case "while_loop":
                return step(step(step(x)))
        return step(x)

    on_device = copy.deepcopy(layer).to(DEVICE)
    made(given.to(DEVICE), on_device).square().sum().backward()
    expected(given, layer).square().sum().backward()
    for mine, parameter in zip(on_device.parameters(), layer.parameters(), strict=True):
        assert mine.grad is not None
        assert_same(mine.grad, parameter.grad)
