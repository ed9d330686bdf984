"""A call with small sizes in place of large ones, to find out cheaply what kernels make of it.

Equal sizes stay equal and different ones different, 0 and 1 stay what they are, and so does the order of dimensions in
memory, and where there are gaps between them: a slice of a tensor stays one.
"""

from __future__ import annotations

from typing import Any

from marid.frontend import handles
from marid.graph.arguments import map_leaves
from marid.graph.node import Node, Output, Spec, Value, root_of

_SMALL = 5


class Smaller:
    """The same call with small sizes. ``sizes`` are the arguments that are sizes: see ``sizes_of``."""

    def __init__(self, sizes: set[Any]) -> None:
        self._sizes = sizes
        self._smaller: dict[int, int] = {}
        self._values: dict[Value, Value] = {}
        self._roots: dict[Value, Node] = {}

    def call(
        self, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]
    ) -> tuple[tuple[Any, ...], Any, tuple[Value, ...]]:
        """Arguments as they are recorded, and the values among them."""
        for value in values:
            if value not in self._values:
                self._values[value] = self._shrunk(value)
        placed = tuple([self._place(arg, index in self._sizes) for index, arg in enumerate(args)])
        named = kwargs and tuple([(name, self._place(arg, name in self._sizes)) for name, arg in kwargs])
        return placed, named, tuple([self._values[value] for value in values])

    def _shrunk(self, value: Value) -> Value:
        of = value.spec
        assert of is not None
        for size in of.shape:
            if size > _SMALL:
                self._smaller.setdefault(size, _SMALL + 1 + len(self._smaller))
        shape = tuple([self._smaller.get(size, size) for size in of.shape])
        spec = handles.spec(shape, _laid_like(shape, of), 0, of.dtype, of.device, of.conj, of.neg)
        root = self._roots.get(root_of(value))
        node = Node(0, None, None, None, spec, root, None, None)
        self._roots.setdefault(root_of(value), node)
        return node

    def _place(self, arg: Any, is_size: bool) -> Any:
        def place(leaf: Any) -> Any:
            if isinstance(leaf, (Node, Output)):
                return self._values[leaf]
            return self._smaller.get(leaf, leaf) if is_size and type(leaf) is int else leaf

        return map_leaves(place, arg)


def sizes_of(func: Any) -> set[Any]:
    """The positions and names of those arguments of an operator that are sizes, places, or lists of these: what may be
    symbolic elsewhere."""
    formals = [(index, formal) for index, formal in enumerate(func._schema.arguments) if _is_size(formal)]
    return {index for index, _ in formals} | {formal.name for _, formal in formals}


def _is_size(argument: Any) -> bool:
    type_ = argument.real_type
    while hasattr(type_, "getElementType"):
        type_ = type_.getElementType()
    return type_.kind() == "SymIntType"


def _laid_like(shape: tuple[int, ...], of: Spec) -> tuple[int, ...]:
    """Strides for other sizes, in the memory order of ``of``; dimensions of stride 0 stay expanded. One of size 1 that
    has the stride of another one still has it: some kernels go by that. A stride that leaves a gap leaves one still."""
    result, step, dense, inner = [0] * len(shape), 1, 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (of.stride[d], shape[d] != 1, -d)):
        if of.stride[dim] == 0:
            continue
        result[dim] = step + (inner if of.stride[dim] > dense else 0)
        inner = result[dim]
        step, dense = inner * max(shape[dim], 1), of.stride[dim] * max(of.shape[dim], 1)
    return tuple(result)
