"""Operators that take functions (``torch.cond``, ``scan``, ...) with tensors of the device: they are plain Python.

For tensors of the CPU Dynamo traces the functions first: they return tuples of tensors then, and what they close over
is among their arguments. What uses tensors of the device it leaves to Python (``dynamo.py``), and the operators'
derivatives would know of no parameter that a function closes over. So their loops and branches run above autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from marid.frontend import handles

OPERATORS = (
    "cond.CondOp",
    "map.MapImpl",
    "scan.ScanOp",
    "associative_scan.AssociativeScanOp",
    "while_loop.WhileLoopOp",
)


def run_as_python(call: Callable[..., Any]) -> Callable[..., Any]:
    """``__call__`` of such an operator, which runs its own implementation in Python for tensors of the device. In
    ``vmap``, where rows may take different branches, its rule for that is called, if it has one."""

    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced = torch._C._len_torch_dispatch_stack() > 0
        if traced or not any(map(_is_on_device, tree_leaves((args, kwargs)))):
            return call(self, *args, **kwargs)
        innermost = peek_interpreter_stack()
        if innermost is None or innermost.key() != TransformType.Vmap or TransformType.Vmap not in self.functorch_table:
            return self.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if self.name() != "cond":
            return call(self, *args, **kwargs)
        return _of_tuples(functools.partial(call, self), *args, **kwargs)

    return wrapper


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == handles.DEVICE_TYPE


def _of_tuples(
    cond: Callable[..., Any], pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any
) -> Any:
    """``cond`` of functions that return tuples, which its rule for ``vmap`` wants; returns what they did."""
    returned: list[TreeSpec] = []

    def flat(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def returning_tuple(*operands: Any) -> tuple[Any, ...]:
            leaves, spec = tree_flatten(function(*operands))
            returned.append(spec)
            return tuple(leaves)

        return returning_tuple

    return tree_unflatten(cond(pred, flat(true_fn), flat(false_fn), operands), returned[0])
