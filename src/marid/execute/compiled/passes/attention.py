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

from marid.execute.compiled.passes.rewriter import Rewriter, overloads, val_of
from marid.execute.compiled.passes.storages import Storages, is_view

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
    fused = 0
    for node in rewriter.calls():
        found = _match(rewriter, node) if _FLASH and node.target is aten.bmm.default else None
        if found is None:
            continue
        given = [*found.product.args, node.args[1]]
        tensors = [val for val in map(val_of, given) if val is not None]
        if len(tensors) != 3 or any(0 in val.shape for val in tensors) or tensors[2].shape[2] != tensors[0].shape[2]:
            continue
        parts = [found.product, *reversed(found.between)]
        storages = Storages(rewriter)
        if not storages.only_read_by(parts, node):
            continue
        if not storages.unwritten([*given, found.mask], found.product, node):
            continue
        _emit(rewriter, node, given, found)
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
        val = val_of(at)
        if val is None or val.dtype is not torch.float32 or not at.args:
            return None
        found.between.append(at)
        if is_view(at):
            base = val_of(at.args[0])
            if base is None or not (val.is_contiguous() and base.is_contiguous()):
                return None
        elif not softmax:
            if at.target is not aten._softmax.default or rewriter.number(at.args[1]) not in (-1, val.dim() - 1):
                return None
            softmax = at.args[2] is False
            found.shape = tuple(val.shape)
            if not softmax:
                return None
        elif at.kwargs or not _understand(rewriter, at, found):
            return None
        at = at.args[0]
    val = val_of(at)
    if not softmax or val is None or val.dtype is not torch.float32 or found.shape[-2:] != tuple(val.shape[-2:]):
        return None
    found.product = at
    return found


def _understand(rewriter: Rewriter, at: fx.Node, found: _Match) -> bool:
    """A scale, or a mask behind all scales."""
    val = val_of(at)
    if len(at.args) != 2 or val is None or tuple(val.shape) != found.shape:
        return False
    other = at.args[1]
    mask = val_of(other)
    if at.target in _ADD and isinstance(other, fx.Node) and mask is not None:
        if found.mask is not None or found.scale != 1.0 or mask.dtype is not torch.float32 or mask.dim() > val.dim():
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


def _emit(rewriter: Rewriter, node: fx.Node, given: list[Any], found: _Match) -> None:
    """The kernel takes four dimensions: batch, heads, rows, columns."""
    out, product = val_of(node), val_of(found.product)
    assert out is not None
    assert product is not None
    heads = found.shape[-3] if len(found.shape) == 4 else product.shape[0]
    groups = product.shape[0] // heads

    def four(x: fx.Node) -> fx.Node:
        _, rows, columns = x.meta["val"].shape
        if x.meta["val"].stride(2) != 1:  # the kernel reads neighbouring elements; Inductor makes no second copy
            x = rewriter.insert(node, aten.clone.default, (x,), memory_format=torch.contiguous_format)
        return rewriter.insert(node, aten.view.default, (x, [groups, heads, rows, columns]))

    query, keys, value = given
    keys = rewriter.insert(node, aten.transpose.int, (keys, 1, 2))
    mask: dict[str, Any] = {}
    if found.mask is not None:
        shown = [groups, heads, *found.shape[-2:]]
        mask["attn_mask"] = rewriter.insert(node, aten.expand.default, (found.mask, shown))
    call = rewriter.insert(
        node, _FLASH.copy().pop(), (four(query), four(keys), four(value), 0.0, False), **mask, scale=found.scale
    )
    result = rewriter.insert(node, operator.getitem, (call, 0))
    if not result.meta["val"].is_contiguous():  # the product that was written out is
        result = rewriter.insert(node, aten.clone.default, (result,), memory_format=torch.contiguous_format)
    rewriter.rewrite(node, aten.view.default, (result, list(out.shape)))
