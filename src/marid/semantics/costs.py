"""What operations cost: floating-point operations, bytes, and the time that a machine of known speed takes for them.

Formulas are those of ``torch.utils.flop_counter`` where it has one. Anything else that computes takes one operation for
each element of its largest tensor; views, copies and factories take none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from marid.graph.computation import Recorded
from marid.graph.node import Node, Operation, Output, Spec, Value
from marid.graph.program import Instruction, Param, Slot, filled
from marid.semantics.roofline import Machine

_COPIES = {
    "aten::clone", "aten::_to_copy", "aten::copy_", "aten::contiguous", "aten::cat", "aten::stack", "aten::embedding",
    "aten::index", "aten::index_select", "aten::gather", "aten::fill_", "aten::zero_", "aten::constant_pad_nd",
    "aten::index_copy_", "aten::index_put_", "aten::repeat", "aten::roll", "aten::flip", "aten::lift_fresh",
}  # fmt: skip
_GATHERS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
_PARTIAL_WRITES = {"aten::index_copy_": 3, "aten::index_put_": 2, "aten::scatter_": 3, "aten::index_add_": 3}
"""In-place operators that write no more than their argument of that position has."""


@dataclass
class Cost:
    """What some nodes take: ``flops``, ``bytes`` read and written, the ``predicted`` seconds of one thread of this
    machine, and the ``measured`` ones where there are any. ``nodes`` counts operations that are no views."""

    nodes: int = 0
    flops: int = 0
    bytes: int = 0
    predicted: float = 0.0
    measured: float | None = None

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def add(self, flops: int, nbytes: int, predicted: float, measured: float | None) -> None:
        """Count one more node."""
        self.nodes += 1 if nbytes else 0
        self.flops += flops
        self.bytes += nbytes
        self.predicted += predicted
        if measured is not None:
            self.measured = (self.measured or 0.0) + measured


def outputs_of(node: Node) -> list[Spec]:
    """The geometries of a node's results that are still there."""
    if node.outs is None:
        return [node.spec] if node.spec is not None else []
    return [out.spec for ref in node.outs if (out := ref()) is not None]


def occupied(spec: Spec) -> int:
    """The bytes of memory that a tensor's elements lie in: expanded dimensions count once."""
    count = 1
    for size, stride in zip(spec.shape, spec.stride, strict=True):
        count *= size if stride or size == 0 else 1
    return count * spec.dtype.itemsize


def flops_of(recorded: Recorded, node: Node) -> int:
    """The floating-point operations of a node: a product and a sum are two. 0 for sources."""
    if node.op is None or node not in recorded.arguments:
        return 0
    args, kwargs = recorded.arguments[node]
    inputs = [spec for value in recorded.inputs_of(node) if (spec := value.spec) is not None]
    return _flops(node.op, map(_shapes, args), {k: _shapes(v) for k, v in kwargs}, outputs_of(node), inputs)


def flops_of_instruction(instruction: Instruction, specs: tuple[Spec | None, ...], params: list[Any]) -> int:
    """The same of an instruction of a program that runs with tensors of these specs and with these numbers."""

    def shape_of(slot: int) -> tuple[int, ...]:
        spec = specs[slot]
        return () if spec is None else spec.shape

    def number_of(param: Param) -> Any:
        return params[param.index]

    def known(slots: Iterable[int]) -> list[Spec]:
        return [spec for slot in slots if (spec := specs[slot]) is not None]

    inputs = known(arg.index for arg in instruction.operands() if isinstance(arg, Slot))
    outputs = known(result.slot for result in instruction.results)
    args = (filled(arg, shape_of, number_of) for arg in instruction.args)
    named = {name: filled(arg, shape_of, number_of) for name, arg in instruction.kwargs}
    return _flops(instruction.op, args, named, outputs, inputs)


def _flops(op: Operation, args: Iterable[Any], kwargs: dict[str, Any], outputs: list[Spec], inputs: list[Spec]) -> int:
    """Those of a call with these shapes in the place of tensors."""
    if op.view:
        return 0
    formula = _OWN.get(op.name) or flop_registry.get(op.func.overloadpacket)
    if formula is not None:
        out = tuple([spec.shape for spec in outputs])
        shape = out[0] if len(out) == 1 else out
        # The formula may be for other arguments than these.
        with suppress(AssertionError, TypeError, ValueError, IndexError):
            return int(formula(*args, **kwargs, out_val=shape))
    if op.factory or op.name in _COPIES or op.name.endswith("_like"):
        return 0
    specs = [*outputs, *inputs]
    if op.name.startswith("aten::_foreach"):
        return sum(spec.numel for spec in (outputs or specs))
    return max((spec.numel for spec in specs), default=0)


def _shapes(arg: Any) -> Any:
    if isinstance(arg, (Node, Output)):
        return arg.spec.shape if arg.spec is not None else ()
    return arg


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (3 * width + 2 * value[-1])


_OWN: dict[str, Callable[..., int]] = {
    "aten::linear": _linear,
    "marid::linear_activation": _linear,
    "marid::fast_linear": _linear,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_attention_math": _attention,
}


def bytes_of(recorded: Recorded, node: Node) -> int:
    """The bytes that a node reads and writes, each tensor once; 0 for views and sources."""
    if node.op is None or node not in recorded.arguments or node.op.view:
        return 0
    name = node.op.name
    written = sum(map(occupied, outputs_of(node))) if not node.op.mutates else 0
    if name in _GATHERS:
        return 2 * written + sum(_bytes(value) for value in recorded.inputs_of(node)[1:])
    read: Iterable[Value] = dict.fromkeys(recorded.inputs_of(node))
    moved = sum(map(_bytes, read))
    if not node.op.mutates:
        return moved + written
    args, _ = recorded.arguments[node]
    target = args[0] if args else None
    if name in _PARTIAL_WRITES:
        source = args[_PARTIAL_WRITES[name]] if len(args) > _PARTIAL_WRITES[name] else None
        return 2 * _bytes(source) if isinstance(source, (Node, Output)) else moved
    targets = target if isinstance(target, tuple) else (target,)
    again = sum(_bytes(value) for value in targets if isinstance(value, (Node, Output)))
    overwrites = name in ("aten::copy_", "aten::fill_", "aten::zero_", "aten::bernoulli_", "aten::uniform_")
    return moved if overwrites else moved + again


def _bytes(value: Value) -> int:
    return occupied(value.spec) if value.spec is not None else 0


def costs_by(
    nodes: Iterable[tuple[Iterable[str], Node, int, int]], machine: Machine, measured: Mapping[int, float]
) -> dict[str, Cost]:
    """Costs by name: of nodes that count for several names, with their FLOPs and bytes."""
    found: dict[str, Cost] = {}
    for names, node, flops, nbytes in nodes:
        seconds = machine.seconds(flops, nbytes, torch.float32 if node.spec is None else node.spec.dtype)
        for name in names:
            found.setdefault(name, Cost()).add(flops, nbytes, seconds, measured.get(node.seq))
    return found
