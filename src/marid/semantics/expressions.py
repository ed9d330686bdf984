"""Names of operators, and expressions that patterns see as one: gates, and the scores of attention."""

from __future__ import annotations

from typing import Any

from torch import fx

from marid.graph.node import Node


def base_name(node: Node) -> str:
    """The operator's name without its namespace, and without the underscore of one that writes."""
    assert node.op is not None
    name = node.op.name.partition("::")[2]
    if node.op.mutates:
        name = name.removesuffix("_")
    if name.startswith("_foreach_"):
        return name[1:]
    return name


def rank(node: fx.Node) -> str:
    """What sums and products sort their arguments by: names, inputs first."""
    return "" if node.op == "placeholder" else str(node.target)


def gate_of(gate: fx.Node, x: fx.Node, depth: int = 5) -> list[fx.Node] | None:
    """The nodes of a gate that is made of ``x`` alone, as ``sigmoid(1.7 x)``, ``tanh(x + x ** 3)``."""
    path: list[fx.Node] = []
    at = gate
    while len(path) < depth:
        path.append(at)
        inner = at.all_input_nodes
        if x in inner:
            cubes = [arg for arg in inner if arg is not x]
            return (
                [*path, *cubes] if all(arg.target in ("pow", "square") and arg.args[0] is x for arg in cubes) else None
            )
        if len(inner) != 1:
            return None
        at = inner[0]
    return None


_BETWEEN = {"add", "sub", "where", "masked_fill", "tanh", "mul", "div", "grow", "cat", "max"}


def product_behind(x: Any, between: list[fx.Node], depth: int) -> fx.Node | None:
    """The product of two tensors that scores are made of, the first where there are several."""
    if not isinstance(x, fx.Node) or depth == 0:
        return None
    if x.target == "matmul":
        return x
    if x.target not in _BETWEEN:
        return None
    for arg in x.all_input_nodes:
        mark = len(between)
        between.append(x)
        found = product_behind(arg, between, depth - 1)
        if found is not None:
            return found
        del between[mark:]
    return None
