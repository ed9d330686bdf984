"""The bytes that tensors take on a worker, and those that an operator will."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from marid.graph.arguments import map_leaves
from marid.graph.node import Operation
from marid.report.units import bytes_text


@dataclass
class TooLarge(Exception):
    """A run would make the worker hold more than its limit; ``held`` are slots and their bytes, the largest first."""

    nbytes: int
    available: int
    held: list[tuple[int, int]]

    def __str__(self) -> str:
        return f"it would take {bytes_text(self.nbytes)} at once, and the worker has {bytes_text(self.available)} left"


def returned_bytes(op: Operation, args: list[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> int:
    """What the results of one operator will take, seen on tensors without memory; where that depends on data, at most
    a number for each dimension of each element."""
    if op.view:
        return 0

    def bare(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")

    where = {"device": "meta"} if op.factory and any(a.name == "device" for a in op.func._schema.arguments) else {}
    named = {name: map_leaves(bare, arg) for name, arg in kwargs.items()}
    try:
        returned = op.func(*map_leaves(bare, args), **named, **where)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it says so itself, or its result depends on data
        return sum(tensor.numel() * 8 * max(tensor.dim(), 1) for tensor in tensors)
    results = [returned] if isinstance(returned, torch.Tensor) else returned
    if not isinstance(results, (list, tuple)):
        return 0
    return sum(one.numel() * one.itemsize for one in results if isinstance(one, torch.Tensor))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each block once."""
    blocks: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        blocks[storage.data_ptr()] = storage.nbytes()
    return sum(blocks.values())
