"""What passes ask for and promise: each condition is a function that says what is wrong, or None."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from marid.optimize.passes.rewriter import Rewriter, op_of, pure, slot_of
from marid.optimize.passes.storages import Storages

__all__ = ["ALWAYS", "Condition", "no_dead_code", "no_repeated_views", "violation"]

Condition = Callable[[Rewriter], str | None]


def well_formed(rewriter: Rewriter) -> str | None:
    """FX's own rules: every argument is made before it is used, and belongs to this graph."""
    try:
        rewriter.graph.lint()
    except RuntimeError as error:
        return str(error)
    return None


def in_program_order(rewriter: Rewriter) -> str | None:
    """Places do not fall from operation to operation, and nothing that writes was added, removed or moved."""
    place = -1
    writes = []
    for node in rewriter.calls():
        index = node.meta.get("index", place)
        if index < place:
            return f"{node} has place {index}, after {place}"
        place = index
        if op_of(node).mutates:
            writes.append((index, node.target))
    recorded = [(i, ins.op.func) for i, ins in enumerate(rewriter.program.instructions) if ins.op.mutates]
    return None if writes == recorded else "an operation that writes was added, removed or moved"


def outputs_apart(rewriter: Rewriter) -> str | None:
    """The outputs are as many tensors as were recorded, and none is an input or a constant."""
    outputs = rewriter.outputs()
    if len(outputs) != len(rewriter.program.output_slots) or len(set(outputs)) != len(outputs):
        return "the outputs are not one tensor each"
    given = [node for node in outputs if node.op == "placeholder"]
    return f"the output {given[0]} is not computed" if given else None


def constants_unwritten(rewriter: Rewriter) -> str | None:
    """What is held with the program is neither written nor given out."""
    storages = Storages(rewriter)
    for node in rewriter.graph.nodes:
        if "constant" in node.meta:
            storage = storages.of(node)
            if storages.writes.get(storage) or storage in storages.escaping:
                return f"the constant {node} is written or escapes"
    return None


def no_dead_code(rewriter: Rewriter) -> str | None:
    """Nothing is computed that nobody reads."""
    for node in rewriter.calls():
        if pure(node) and not node.users:
            return f"nobody reads {node}"
    return None


def no_repeated_views(rewriter: Rewriter) -> str | None:
    """No two views in the graph that are not outputs show the same part of the same tensor."""
    storages = Storages(rewriter)
    seen: dict[tuple[int, int], fx.Node] = {}
    for node in rewriter.calls():
        base = node.args[0] if node.args else None
        if not op_of(node).view or "slot" not in node.meta or not isinstance(base, fx.Node) or base.op == "output":
            continue
        if base.target is operator.getitem or slot_of(node) in storages.outputs:
            continue
        other = seen.setdefault((slot_of(base), id(node.meta["spec"])), node)
        if other is not node:
            return f"{node} is the same view as {other}"
    return None


ALWAYS: tuple[Condition, ...] = (well_formed, in_program_order, outputs_apart, constants_unwritten)


def violation(rewriter: Rewriter, conditions: tuple[Condition, ...]) -> str | None:
    """What is wrong with a graph, or None."""
    for condition in conditions:
        wrong = condition(rewriter)
        if wrong is not None:
            return f"{condition.__name__}: {wrong}"
    return None
