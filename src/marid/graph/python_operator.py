"""Operators whose kernels are written in Python, as those that users define with ``torch.library``.

Such a kernel may call anything: operators of the device, transforms of functions, settings. So it is called as on the
CPU, and not from the middle of a program (``engine/inprocess.py``): what came before it has run by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from marid.graph.arguments import leaves, map_leaves
from marid.graph.dispatch_state import as_called_by_users
from marid.graph.node import Node, Operation


class PythonOperator(Operation):
    """An operator whose kernel is written in Python. It can be called like the operator itself."""

    __slots__ = ()

    def __init__(
        self, func: torch._ops.OpOverload, mutates: bool, view: bool, target: torch._ops.OpOverload | None = None
    ) -> None:
        super().__init__(func, mutates, view, target)
        self.call = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [item for item in leaves((list(args), list(kwargs.values()))) if isinstance(item, torch.Tensor)]
        device = given[0].device if given else torch.device("cpu")

        def concrete(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            item = item.detach() if item.requires_grad else item
            return item if item.device == device else item.to(device)

        autocast = nullcontext() if _calls.autocast is None else torch.autocast("cpu", _calls.autocast)
        with as_called_by_users(any(tensor.is_inference() for tensor in given)), autocast:
            return map_leaves(concrete, self.target._op(*args, **kwargs))


class _Calls(threading.local):
    """Of a thread: the nodes whose kernels in Python it is in, and what these find autocast to be."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.autocast: torch.dtype | None = None


_calls = _Calls()


@contextmanager
def calling(node: Node) -> Iterator[None]:
    """While the kernel of ``node`` is called."""
    _calls.nodes.append(node)
    try:
        with autocasting(None):
            yield
    finally:
        _calls.nodes.pop()


@contextmanager
def autocasting(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, kernels in Python find autocast on, to ``dtype``, or off."""
    before, _calls.autocast = _calls.autocast, dtype
    try:
        yield
    finally:
        _calls.autocast = before


def refuse_own(nodes: Sequence[Node]) -> None:
    """Raise ``RuntimeError`` if one of ``nodes``, which are to run, is that whose kernel this thread is in."""
    own = next((node for node in _calls.nodes if node in nodes), None)
    if own is not None:
        assert own.op is not None
        raise RuntimeError(f"the kernel of {own.op.name} reads a tensor that {own.op.name} has yet to make or to write")


def positions_in(operations: Iterable[Operation | None]) -> list[int]:
    """Where operators with kernels in Python are among ``operations``."""
    return [position for position, op in enumerate(operations) if isinstance(op, PythonOperator)]


def by_themselves(nodes: list[Node], positions: Sequence[int]) -> list[list[Node]]:
    """``nodes`` in stretches that run one after the other: those at ``positions`` by themselves."""
    bounds = sorted({0, len(nodes), *positions, *[position + 1 for position in positions]})
    return [nodes[start:end] for start, end in pairwise(bounds)]
