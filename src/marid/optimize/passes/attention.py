"""Attention that was written out, ``softmax(q @ k.mT * scale + mask) @ v``, by ATen's flash kernel.

Only with ``marid.settings.fast_math``: the kernel sums block by block. Where something in between has another reader,
as the weights have in training, nothing is fused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.linear import only_read_by, op_of_view, unwritten
from marid.optimize.passes.rewriter import Rewriter, overloads
from marid.optimize.passes.storages import Storages

__all__ = ["fuse"]

aten = torch.ops.aten

_TIMES = overloads("mul.Tensor", "mul.Scalar")
_DIVIDED = overloads("div.Tensor", "div.Scalar")
_ADD = overloads("add.Tensor")
_FLASH = overloads("_scaled_dot_product_flash_attention_for_cpu")


@dataclass
class _Match:
    """What is between the two products, the last first; the scores' shape where the mask is added."""

    product: fx.Node
    between: list[fx.Node] = field(default_factory=list)
    scale: float = 1.0
    mask: fx.Node | None = None
    shape: tuple[int, ...] = ()


def fuse(rewriter: Rewriter) -> int:
    """Fuse every attention whose parts nobody else reads."""
    storages = Storages(rewriter)
    fused = 0
    for node in rewriter.calls():
        found = _match(rewriter, node) if _FLASH and node.target is aten.bmm.default else None
        if found is None:
            continue
        query, keys = found.product.args
        value = node.args[1]
        if not (isinstance(query, fx.Node) and isinstance(keys, fx.Node) and isinstance(value, fx.Node)):
            continue
        parts = [found.product, *reversed(found.between)]
        given = [query, keys, value, *([] if found.mask is None else [found.mask])]
        sizes = query.meta["spec"].shape, keys.meta["spec"].shape, value.meta["spec"].shape
        if any(0 in size for size in sizes) or sizes[2][2] != sizes[0][2] or any(g.meta["spec"].conj for g in given):
            continue
        rows = query.meta["spec"].stride[2], keys.meta["spec"].stride[1], value.meta["spec"].stride[2]
        if rows != (1, 1, 1):  # the kernel reads rows of neighbouring elements, whatever the strides
            continue
        if not only_read_by(storages, parts, node) or not unwritten(storages, [*given], found.product, node):
            continue
        _emit(rewriter, node, (query, keys, value), found)
        for part in reversed(parts):
            rewriter.graph.erase_node(part)
        fused += 1
    return fused


def _match(rewriter: Rewriter, node: fx.Node) -> _Match | None:
    """The parts of an attention that ends in the product ``node``."""
    found = _Match(node)
    at: Any = node.args[0]
    softmax = False
    while isinstance(at, fx.Node) and at.target is not aten.bmm.default:
        spec = at.meta.get("spec")
        if not isinstance(spec, Spec) or spec.dtype is not torch.float32 or not at.args:
            return None
        found.between.append(at)
        if op_of_view(at):
            base = at.args[0]
            if not (isinstance(base, fx.Node) and spec.is_contiguous and base.meta["spec"].is_contiguous):
                return None
        elif not softmax:
            if at.target is not aten._softmax.default or rewriter.number(at.args[1]) not in (-1, len(spec.shape) - 1):
                return None
            softmax = at.args[2] is False
            found.shape = spec.shape
            if not softmax:
                return None
        elif at.kwargs or not _understand(rewriter, at, found):
            return None
        at = at.args[0]
    if not softmax or not isinstance(at, fx.Node) or at.meta["spec"].dtype is not torch.float32:
        return None
    if found.shape[-2:] != at.meta["spec"].shape[-2:]:
        return None
    found.product = at
    return found


def _understand(rewriter: Rewriter, at: fx.Node, found: _Match) -> bool:
    """A scale, or a mask behind all scales."""
    if len(at.args) != 2 or at.meta["spec"].shape != found.shape:
        return False
    other = at.args[1]
    if at.target in _ADD and isinstance(other, fx.Node) and found.mask is None and found.scale == 1.0:
        spec = other.meta.get("spec")
        if not isinstance(spec, Spec) or spec.dtype is not torch.float32 or len(spec.shape) > len(found.shape):
            return False
        found.mask = other
        return True
    if at.target not in _TIMES and at.target not in _DIVIDED:
        return False
    number = rewriter.peek(other)
    if type(number) not in (int, float) or not number or rewriter.number(other) is None:
        return False
    found.scale *= number if at.target in _TIMES else 1.0 / number
    return True


def _emit(rewriter: Rewriter, node: fx.Node, tensors: tuple[fx.Node, fx.Node, fx.Node], found: _Match) -> None:
    """The kernel takes four dimensions: batch, heads, rows, columns."""
    query, keys, value = tensors
    batch = query.meta["spec"].shape[0]
    heads = found.shape[-3] if len(found.shape) == 4 else batch
    groups = batch // heads

    def four(x: fx.Node, flip: bool) -> fx.Node:
        spec = x.meta["spec"]
        (_, a, b), (step, c, d) = spec.shape, spec.stride
        sizes, strides = ((b, a), (d, c)) if flip else ((a, b), (c, d))
        return _shown(rewriter, node, x, (groups, heads, *sizes), (heads * step, step, *strides))

    q, k, v = four(query, False), four(keys, True), four(value, False)
    mask: dict[str, Any] = {}
    if found.mask is not None:
        spec = found.mask.meta["spec"]
        wanted = (groups, heads, *found.shape[-2:])
        missing = 4 - len(spec.shape)
        sizes, strides = (1,) * missing + spec.shape, (0,) * missing + spec.stride
        strides = tuple([0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)])
        mask["attn_mask"] = _shown(rewriter, node, found.mask, wanted, strides)
    out = node.meta["spec"]
    _, rows, columns = out.shape
    made = _like(q.meta["spec"])
    call = rewriter.insert(node, _FLASH.copy().pop(), (q, k, v, 0.0, False), made, **mask, scale=found.scale)
    slot = call.meta.pop("slot")
    del call.meta["spec"]
    with rewriter.graph.inserting_before(node):
        product = rewriter.graph.call_function(operator.getitem, (call, 0))
    product.meta.update(slot=slot, spec=made, index=node.meta["index"])
    if not made.is_contiguous:  # the product that was written out is
        sizes, step = made.shape, rows * columns
        dense = Spec(sizes, (heads * step, step, columns, 1), 0, out.dtype, out.device)
        product = rewriter.insert(node, aten.clone.default, (product,), dense, memory_format=torch.contiguous_format)
    rewriter.rewrite(node, aten.view.default, (product, out.shape))


def _like(query: Spec) -> Spec:
    """What the kernel returns: laid out as ``empty_like`` of the query."""
    asked = torch.empty_strided(query.shape, query.stride, dtype=query.dtype, device="meta")
    return Spec(query.shape, torch.empty_like(asked).stride(), 0, query.dtype, query.device)


def _shown(rewriter: Rewriter, node: fx.Node, x: fx.Node, sizes: tuple[int, ...], strides: tuple[int, ...]) -> fx.Node:
    spec = x.meta["spec"]
    shown = Spec(sizes, strides, spec.offset, spec.dtype, spec.device)
    return rewriter.insert(node, aten.as_strided.default, (x, sizes, strides, spec.offset), shown)
