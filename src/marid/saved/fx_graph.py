"""A saved program as a ``torch.fx.GraphModule``, for PyTorch's tools."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

from marid.graph.node import Spec
from marid.graph.program import Constant, ListOf, Param, Slot
from marid.saved.reading import Plan, Result
from marid.saved.structure import mapped


def graph_of(plan: Plan) -> torch.fx.GraphModule:
    """The program as a graph module.

    Placeholders are its inputs: ``argument_0``, the names of the state with underscores, and ``number_0`` for a number
    that comes of a counter, by its place. Writes are in-place operators, random operators draw from the generator that
    they have by default. ``node.meta`` has ``val`` (a meta tensor) and ``stack_trace``.
    """
    graph = torch.fx.Graph()
    program, specs = plan.prepared.program, plan.prepared.specs
    computed = {place: _named(graph, f"number_{place}") for place, _ in plan.counting.computed}
    items: dict[int, torch.fx.Node] = {}
    for slot, (kind, of) in zip(program.input_slots, plan.inputs, strict=True):
        name = f"argument_{of}" if kind == "argument" else plan.state[of].name if kind == "state" else of
        items[slot] = _with(_named(graph, name), specs[slot])

    def convert(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return items[arg.index]
        if isinstance(arg, ListOf):
            return [convert(item) for item in arg.items]
        if isinstance(arg, Constant):
            return arg.value
        return computed.get(arg.index, plan.numbers[arg.index])

    for instruction, stamp in zip(program.instructions, plan.prepared.nodes, strict=True):
        named = {key: convert(arg) for key, arg in instruction.kwargs if not (isinstance(arg, Param) and arg.draw)}
        call = graph.call_function(instruction.op.func, tuple(map(convert, instruction.args)), named)
        if stamp.site is not None:
            call.meta["stack_trace"] = f'File "{stamp.site.file}", line {stamp.site.line}, in {stamp.site.function}'
        for one in instruction.results:
            item = call
            for step in one.path:
                item = graph.call_function(operator.getitem, (item, step))
            items[one.slot] = _with(item, specs[one.slot])
    places = {("argument", of): slot for slot, (kind, of) in _sources(plan) if kind == "argument"}
    places |= {("state", of): slot for slot, (kind, of) in _sources(plan) if kind == "state"}

    def result(leaf: Result) -> Any:
        if leaf.kind == "value":
            return leaf.of
        slot = leaf.of if leaf.kind in ("output", "input") else places.get((leaf.kind, leaf.of))
        return None if slot is None else items[slot]  # None for what it returns and does not work on

    graph.output(mapped(plan.results, result))
    graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), graph, "SavedProgram")


def _sources(plan: Plan) -> Any:
    return zip(plan.prepared.program.input_slots, plan.inputs, strict=True)


def _named(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    """A placeholder; its name is an identifier of its own."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    taken = {node.target for node in graph.nodes}
    plain = plain if plain[:1].isalpha() else f"_{plain}"
    while plain in taken:
        plain += "_"
    return graph.placeholder(plain)


def _with(item: torch.fx.Node, spec: Spec | None) -> torch.fx.Node:
    if spec is not None:
        item.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return item
