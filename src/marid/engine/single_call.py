"""Running one operator at once, on the tensors that an engine holds, and describing what it did."""

from __future__ import annotations

from typing import Any

import torch

from marid.engine.plain import spec_of
from marid.engine.protocol import Called, Returned, other_layout
from marid.graph.arguments import map_leaves
from marid.graph.node import Operation


def perform(
    op: Operation, args: list[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor], state: torch.Tensor | None
) -> Called:
    """Call ``op``; ``tensors`` are those among its arguments, in order. To be called below all dispatch.

    ``state`` is where the CPU generator stands that it draws from, if it draws.
    """
    if state is None:
        return describe(op.call(*args, **kwargs), tensors, None)
    source = torch.Generator()
    source.set_state(state)
    if any(argument.name == "generator" for argument in op.func._schema.arguments):
        returned = op.call(*args, **kwargs, generator=source)
        return describe(returned, tensors, source.get_state())
    default = torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]
    users = default.get_state()
    try:
        default.set_state(state)
        returned = op.call(*args, **kwargs)
        return describe(returned, tensors, default.get_state())
    finally:
        default.set_state(users)


def describe(returned: Any, tensors: list[torch.Tensor], state: torch.Tensor | None) -> Called:
    """What a call did, for a recorder that does not look into tensors."""
    parts = _Parts(tensors)
    return Called(map_leaves(parts.describe, returned, list), [spec_of(tensor) for tensor in tensors], state)


class _Parts:
    """Finds the tensor arguments that returned tensors are, or lie in the memory of."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._identities = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._blocks: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            self._blocks.setdefault(tensor.untyped_storage().data_ptr(), index)

    def describe(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        layout = other_layout(item)
        if layout is not None:
            return Returned(None, None, layout)
        address = item.untyped_storage().data_ptr()
        base = self._blocks.get(address) if address else None
        return Returned(item, spec_of(item), None, self._identities.get(id(item)), base)
