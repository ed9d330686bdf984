"""The FX graph of a part, from its description: for passes as it was recorded, for Inductor as ``lower.py`` has it.

It needs PyTorch only: the process that compiles has no C++ half.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from marid.execute.compiled.arguments import argument_of


class Refused(Exception):
    """The part must run flat; the text says why."""


class PartGraph:
    """A graph in the making, with its nodes by slot (``items``) and those of the ``numbers`` that it is given."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.graph = torch.fx.Graph()
        self.items: dict[int, Any] = {}
        self.numbers: list[torch.fx.Node] = []

    def add_inputs(self, slots: Iterable[int]) -> None:
        """Placeholders for these inputs, and for all numbers."""
        self.items = {slot: self.graph.placeholder(f"input{slot}") for slot in slots}
        self.numbers = [self.graph.placeholder(f"number{index}") for index in range(len(self.description["numbers"]))]

    def add_calls(self) -> None:
        """What the part does, and what it returns."""
        for instruction in self.description["instructions"]:
            arguments = {name: self.value(value) for name, value in instruction["args"].items()}
            returned = self.call_of(instruction, arguments)
            for result in instruction["results"]:
                item: Any = returned
                for step in result["path"]:
                    several = isinstance(item, list)
                    item = item[step] if several else self.graph.call_function(operator.getitem, (item, step))
                self.items[result["slot"]] = item
        self.graph.output(tuple(self.items[slot] for slot in self.description["outputs"]))

    def call_of(self, instruction: dict[str, Any], arguments: dict[str, Any]) -> Any:
        """The call of an instruction; a list in place of one that returns a list."""
        return self.call_named(instruction["op"], instruction["overload"], arguments)

    def call_named(self, name: str, overload: str, arguments: dict[str, Any]) -> torch.fx.Node:
        """A call of an operator of ATen."""
        function = overload_named(name, overload)
        given, args = dict(arguments), []
        for argument in function._schema.arguments:
            if argument.kwarg_only or argument.name not in given:
                break
            args.append(given.pop(argument.name))
        return self.graph.call_function(function, tuple(args), given)

    def value(self, value: dict[str, Any]) -> Any:
        """An argument."""
        return argument_of(value, self.items.__getitem__, self.numbers.__getitem__, self.whole)

    def whole(self, value: Any) -> Any:
        """A whole number that is part of the code."""
        return value


def overload_named(name: str, overload: str) -> torch._ops.OpOverload:
    """An operator of ATen. Raises ``Refused``."""
    packet = getattr(torch.ops.aten, name, None)
    found = None if packet is None else getattr(packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise Refused(f"no operator {name}.{overload}")
    return found
