"""A program as recorded nodes again, to be looked at or to be made into a graph: the engine cannot run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marid.graph.arguments import values_in
from marid.graph.node import Node, Output, Spec, Value, root_of
from marid.graph.program import Param, Program, filled


def nodes_of_program(
    program: Program, specs: Sequence[Spec | None], params: Sequence[Any], sites: Sequence[Any], scopes: Sequence[Any]
) -> tuple[list[Node], dict[int, Value]]:
    """Nodes that stand for a program's instructions, with ``specs`` by slot, the numbers of one run (none where they
    are not known), and the line and scope of each instruction; and the values by slot. Its inputs are nodes without an
    operator."""
    values: dict[int, Value] = {
        slot: Node(index - len(program.input_slots), None, None, None, specs[slot], None, None, None)
        for index, slot in enumerate(program.input_slots)
    }

    def number_of(param: Param) -> Any:
        return params[param.index] if param.index < len(params) else None

    nodes = []
    for index, (instruction, site, scope) in enumerate(zip(program.instructions, sites, scopes, strict=True)):
        args = tuple([filled(arg, values.__getitem__, number_of) for arg in instruction.args])
        kwargs = tuple([(name, filled(arg, values.__getitem__, number_of)) for name, arg in instruction.kwargs])
        first = next(values_in(args), None)
        root = root_of(first) if instruction.op.view and first is not None else None
        node = Node(index, instruction.op, args, kwargs, None, root, site, scope)
        outs = []
        for result in instruction.results:
            spec = specs[result.slot]
            if result.path or spec is None:
                values[result.slot] = out = Output(node, result.path, spec, root)  # pyright: ignore[reportArgumentType]
                outs.append(Held(out))
            else:
                node.spec = spec
                values[result.slot] = node
        if node.spec is None:
            node.outs = outs  # pyright: ignore[reportAttributeAccessIssue]
        nodes.append(node)
    return nodes, values


class Held:
    """Stands for a weak reference to a value."""

    __slots__ = ("_value",)

    def __init__(self, value: Output) -> None:
        self._value = value

    def __call__(self) -> Output:
        return self._value
