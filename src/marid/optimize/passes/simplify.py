"""Algebra that gives the very same bits: ``x * 1``, ``-(-x)``, a copy of what nobody else sees.

``x + 0`` is not among it for floating-point numbers (it makes 0 of -0), nor is ``x * 0`` (NaN), nor anything that
rounds elsewhere. Integers have more identities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.rewriter import Rewriter, overloads
from marid.optimize.passes.storages import Storages

__all__ = ["simplify"]

_TIMES = overloads("mul.Tensor", "mul.Scalar")
_DIVIDED = overloads("div.Tensor", "div.Scalar")
_POWER = overloads("pow.Tensor_Scalar")
_MINUS = overloads("sub.Tensor", "sub.Scalar")
_PLUS = overloads("add.Tensor", "add.Scalar")
_COPIES = overloads("clone", "_to_copy")
# f(f(x)) is x
_INVOLUTIONS = overloads("neg", "bitwise_not", "logical_not")
# f(f(x)) is f(x)
_IDEMPOTENT = overloads("relu", "abs", "floor", "ceil", "trunc", "round", "sign")
_INTEGER_NOTHING = {
    **dict.fromkeys(overloads("floor_divide", "floor_divide.Scalar"), 1),
    **dict.fromkeys(overloads("bitwise_or.Tensor", "bitwise_or.Scalar"), 0),
    **dict.fromkeys(overloads("bitwise_xor.Tensor", "bitwise_xor.Scalar"), 0),
    **dict.fromkeys(overloads("bitwise_and.Tensor", "bitwise_and.Scalar"), -1),
}


def simplify(rewriter: Rewriter) -> int:
    """Let readers of what equals an earlier tensor read that."""
    storages = rewriter.storages
    simplified = 0
    for node in rewriter.calls():
        if not isinstance(node.meta.get("spec"), Spec) or node.target not in _ALL:
            continue
        by = _equal(rewriter, storages, node)
        if by is not None and "slot" in by.meta and storages.may_stand_in(by, node) and _confirmed(rewriter, node):
            storages.join(node, by)
            rewriter.replace(node, by)
            simplified += 1
    return simplified


def _equal(rewriter: Rewriter, storages: Storages, node: fx.Node) -> fx.Node | None:
    """The argument, or the argument's argument, that ``node`` is equal to."""
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node):
        return None
    if node.target in _INVOLUTIONS and x.target is node.target:
        before = x.args[0]
        # what was negated must be the same still: ``x`` may show an older value of it
        unchanged = isinstance(before, fx.Node) and not _written_between(storages, before, x, node)
        return before if unchanged and isinstance(before, fx.Node) else None
    if node.target in _IDEMPOTENT and x.target is node.target and not node.kwargs:
        return x
    if node.target in _COPIES:
        return x
    return x if _is_nothing(rewriter, node) else None


def _is_nothing(rewriter: Rewriter, node: fx.Node) -> bool:
    """Whether the second argument makes no difference. Asks nothing that would become a guard."""
    if len(node.args) < 2 or node.kwargs:
        return False
    other = rewriter.peek(node.args[1])
    if type(other) not in (int, float):
        return False
    dtype = node.meta["spec"].dtype
    if node.target in _POWER:
        return other == 1
    if node.target in _TIMES or node.target in _DIVIDED:
        if other != 1 or dtype is torch.bool or dtype.is_complex:  # inf * (1 + 0i) has a NaN
            return False
        return not _flushes_denormal() if dtype.is_floating_point else node.target in _TIMES
    if node.target in _MINUS:
        return other == 0 and str(other) != "-0.0" and len(node.args) == 2 and not dtype.is_complex
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    if node.target in _PLUS:
        return type(other) is int and other == 0 and len(node.args) == 2
    return type(other) is int and _INTEGER_NOTHING.get(node.target, other + 1) == other


def _flushes_denormal() -> bool:
    # ``torch.set_flush_denormal``: then a product with 1 is not what it was
    return (torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1).item() == 0


def _confirmed(rewriter: Rewriter, node: fx.Node) -> bool:
    """The number that made no difference, where there is one, becomes a guard."""
    if len(node.args) < 2 or node.target in _COPIES:
        return True
    second: Any = node.args[1]
    return not isinstance(second, fx.Node) or rewriter.number(second) is not None


def _written_between(storages: Storages, before: fx.Node, x: fx.Node, node: fx.Node) -> bool:
    if storages.writes.get(storages.of(x)):
        return True
    return storages.is_written(storages.of(before), x.meta["index"], node.meta["index"])


_ALL = {
    *_TIMES,
    *_DIVIDED,
    *_POWER,
    *_MINUS,
    *_PLUS,
    *_COPIES,
    *_INVOLUTIONS,
    *_IDEMPOTENT,
    *_INTEGER_NOTHING,
}
