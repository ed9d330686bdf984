"""A saved program as a ``torch.fx.GraphModule``, for PyTorch's tools."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._pytree import tree_map

from marid.graph.fx import to_fx
from marid.graph.node import Node, Value
from marid.graph.program_nodes import nodes_of_program
from marid.replay.places import is_draw
from marid.saved.reading import Plan, Result


def graph_of(plan: Plan) -> torch.fx.GraphModule:
    """The program as a graph module.

    Placeholders are its inputs: ``argument_0``, the names of the state with underscores, and ``number_0`` for a number
    that comes of a counter, by its place. Writes are in-place operators, random operators draw from the generator that
    they have by default. ``node.meta`` has ``val`` (a meta tensor) and ``stack_trace``.
    """
    program, stamps = plan.prepared.program, plan.prepared.nodes
    numbers, sources = list(plan.numbers), dict[Value, str]()
    for place, _ in plan.counting.computed:
        numbers[place] = number = Node(-1, None, None, None, None, None, None, None)
        sources[number] = f"number_{place}"
    sites, scopes = [stamp.site for stamp in stamps], [stamp.scope for stamp in stamps]
    nodes, values = nodes_of_program(program, plan.prepared.specs, numbers, sites, scopes)
    places: dict[tuple[str, Any], Value] = {}
    for slot, (kind, of) in zip(program.input_slots, plan.inputs, strict=True):
        places[kind, of] = values[slot]
        name = f"argument_{of}" if kind == "argument" else plan.state[of].name if kind == "state" else of
        sources[values[slot]] = _plain(name, {*sources.values()})
    operations = [
        (node, node.args or (), tuple([pair for pair in node.kwargs or () if not is_draw(pair[1])])) for node in nodes
    ]

    def result(leaf: Result) -> Any:
        if leaf.kind == "value":
            return leaf.of
        # None for what it returns and does not work on
        return values[leaf.of] if leaf.kind in ("output", "input") else places.get((leaf.kind, leaf.of))

    return to_fx(operations, sources, tree_map(result, plan.results), None, "SavedProgram")


def _plain(name: str, taken: set[str]) -> str:
    """An identifier of its own."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    plain = plain if plain[:1].isalpha() else f"_{plain}"
    while plain in taken:
        plain += "_"
    return plain
