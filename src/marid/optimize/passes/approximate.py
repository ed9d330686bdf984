"""Rewriting that rounds elsewhere: only with ``marid.settings.fast_math``.

Attention that was written out goes to ATen's flash kernel, a root-mean-square or layer norm to ATen's, a bias into the
product, and products read a transposed matrix where it lies. Each is the same formula in another order of summation:
results agree within ``torch.testing.assert_close``'s tolerances, not in every bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.linear import only_read_by, op_of_view, unwritten
from marid.optimize.passes.rewriter import Rewriter, overloads
from marid.optimize.passes.storages import Storages

__all__ = ["add_bias_in_product", "fuse_attention", "fuse_norms", "read_transposed"]

aten = torch.ops.aten

_ADD = overloads("add.Tensor")
_SCALES = overloads("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
_FLOATS = {torch.float32, torch.float64}
_CONTIGUOUS_COPY = overloads("clone")
_PRODUCTS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (1, 2)}


def read_transposed(rewriter: Rewriter) -> int:
    """``x.t().contiguous() @ w``: the product reads ``x`` through the view, without the copy."""
    storages = Storages(rewriter)
    changed = 0
    for node in rewriter.calls():
        for position in _PRODUCTS.get(node.target, ()):
            copy = node.args[position]
            if not isinstance(copy, fx.Node) or copy.target not in _CONTIGUOUS_COPY:
                continue
            view = copy.args[0]
            if not isinstance(view, fx.Node) or not isinstance(view.meta.get("spec"), Spec):
                continue
            mine, other = copy.meta["spec"], view.meta["spec"]
            if mine.shape != other.shape or mine.dtype is not other.dtype or (other.conj, other.neg) != (False, False):
                continue
            if not _is_transposed(other) or not only_read_by(storages, [copy], node):
                continue
            if not unwritten(storages, [view], copy, node):
                continue
            node.update_arg(position, view)
            rewriter.graph.erase_node(copy)
            changed += 1
    return changed


def _is_transposed(spec: Spec) -> bool:
    if len(spec.shape) < 2:
        return False
    rows, columns = spec.stride[-2:]
    return rows == 1 and columns >= max(1, spec.shape[-2])


def add_bias_in_product(rewriter: Rewriter) -> int:
    """``a @ b + bias`` as ``addmm``, where the bias is a row."""
    storages = Storages(rewriter)
    changed = 0
    for node in rewriter.calls():
        if node.target not in _ADD or len(node.args) != 2 or node.kwargs:
            continue
        for product, bias in (node.args, node.args[::-1]):
            if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
                continue
            view = product if op_of_view(product) and product.op == "call_function" else None
            matrix = view.args[0] if view is not None else product
            if not isinstance(matrix, fx.Node) or matrix.target is not aten.mm.default:
                continue
            spec, row, whole = matrix.meta["spec"], bias.meta.get("spec"), node.meta["spec"]
            if not isinstance(row, Spec) or spec.dtype not in _FLOATS or row.dtype is not spec.dtype:
                continue
            if row.shape != spec.shape[-1:] or row.shape != product.meta["spec"].shape[-1:]:
                continue
            if whole is not product.meta["spec"]:
                continue
            parts = [matrix] if view is None else [matrix, view]
            if not only_read_by(storages, parts, node) or not unwritten(storages, list(matrix.args), matrix, node):
                continue
            if view is None:
                rewriter.rewrite(node, aten.addmm.default, (bias, *matrix.args))
            else:
                made = rewriter.insert(node, aten.addmm.default, (bias, *matrix.args), spec)
                rewriter.rewrite(node, view.target, (made, *view.args[1:]))
                rewriter.graph.erase_node(view)
            rewriter.graph.erase_node(matrix)
            changed += 1
            break
    return changed


# --- attention -----------------------------------------------------------------------------------------------------


def fuse_attention(rewriter: Rewriter) -> int:
    """``softmax(q @ k.mT * scale + mask) @ v`` by the flash kernel, where nobody reads what is in between."""
    storages = Storages(rewriter)
    fused = 0
    for node in rewriter.calls():
        if node.target is aten.bmm.default and _attention(rewriter, storages, node):
            fused += 1
    return fused


def _attention(rewriter: Rewriter, storages: Storages, node: fx.Node) -> bool:
    chain: list[Any] = []  # what lies between the two products, the last first
    at, value = node.args
    scale, mask, softmaxes = 1.0, None, 0
    shape = None  # of the scores, by which the mask is read
    while isinstance(at, fx.Node) and at.target is not aten.bmm.default:
        chain.append(at)
        if op_of_view(at) and at.op == "call_function":
            if (
                at.target is not aten.view.default
                and at.target is not aten._unsafe_view.default
                and not _expands_nothing(at)
            ):
                return False
        elif at.target is aten._softmax.default and not softmaxes:
            spec = at.meta["spec"]
            dim = rewriter.number(at.args[1])
            if dim not in (-1, len(spec.shape) - 1) or at.args[2] is not False:
                return False
            softmaxes = 1
        elif softmaxes and at.target in _ADD and mask is None and scale == 1.0 and len(at.args) == 2 and not at.kwargs:
            mask, shape = at.args[1], at.meta["spec"].shape
            if not isinstance(mask, fx.Node) or not isinstance(mask.meta.get("spec"), Spec):
                return False
        elif softmaxes and at.target in _SCALES and scale == 1.0 and not at.kwargs and len(at.args) == 2:
            number = rewriter.peek(at.args[1])
            if type(number) not in (int, float) or rewriter.number(at.args[1]) is None or not number:
                return False
            scale = float(number) if at.target in overloads("mul.Tensor", "mul.Scalar") else 1.0 / number
        else:
            return False
        at = at.args[0]
    if not isinstance(at, fx.Node) or not softmaxes:
        return False
    query, keys = at.args
    if not all(isinstance(x, fx.Node) and isinstance(x.meta.get("spec"), Spec) for x in (query, keys, value)):
        return False
    assert isinstance(query, fx.Node) and isinstance(keys, fx.Node) and isinstance(value, fx.Node)
    spec = query.meta["spec"]
    if spec.dtype is not torch.float32 or 0 in (*spec.shape, *keys.meta["spec"].shape):
        return False
    if value.meta["spec"].shape[2] != spec.shape[2]:
        return False
    parts = [at, *reversed(chain)]
    args = [query, keys, value, *([] if mask is None else [mask])]
    if not only_read_by(storages, parts, node) or not unwritten(storages, args, at, node):
        return False
    _emit_attention(rewriter, node, (query, keys, value), mask, shape, scale)
    for part in reversed(parts):
        rewriter.graph.erase_node(part)
    return True


def _expands_nothing(node: fx.Node) -> bool:
    base = node.args[0]
    return isinstance(base, fx.Node) and base.meta["spec"].shape == node.meta["spec"].shape


def _emit_attention(
    rewriter: Rewriter,
    node: fx.Node,
    tensors: tuple[fx.Node, fx.Node, fx.Node],
    mask: Any,
    shape: tuple[int, ...] | None,
    scale: float,
) -> None:
    query, keys, value = tensors
    batch = query.meta["spec"].shape[0]
    heads = shape[-3] if shape is not None and len(shape) == 4 else batch
    groups = batch // heads

    def four(x: fx.Node, flip: bool) -> fx.Node:
        spec = x.meta["spec"]
        sizes, strides = list(spec.shape), list(spec.stride)
        if flip:
            sizes[1:], strides[1:] = sizes[:0:-1], strides[:0:-1]
        sizes[:1], strides[:1] = [groups, heads], [heads * strides[0], strides[0]]
        shown = Spec(tuple(sizes), tuple(strides), spec.offset, spec.dtype, spec.device)
        return rewriter.insert(node, aten.as_strided.default, (x, shown.shape, shown.stride, spec.offset), shown)

    if mask is not None:
        spec = mask.meta["spec"]
        rows, columns = query.meta["spec"].shape[1], keys.meta["spec"].shape[2]
        wanted = (*((groups, heads) if shape is not None and len(shape) == 4 else (1, batch)), rows, columns)
        missing = 4 - len(spec.shape)
        sizes, strides = (1,) * missing + spec.shape, (0,) * missing + spec.stride
        strides = tuple(0 if a == 1 else b for a, b in zip(sizes, strides, strict=True))
        shown = Spec(wanted, strides, spec.offset, spec.dtype, spec.device)
        mask = rewriter.insert(node, aten.as_strided.default, (mask, wanted, strides, spec.offset), shown)
    out = node.meta["spec"]
    sizes = (groups, heads, *out.shape[1:])
    step = (out.shape[1] * heads * out.shape[2], out.shape[2], heads * out.shape[2], 1)
    made = rewriter.insert(
        node,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (four(query, False), four(keys, True), four(value, False), 0.0, False),
        Spec(sizes, step, 0, out.dtype, out.device),
        **({} if mask is None else {"attn_mask": mask}),
        scale=scale,
    )
    # the kernel returns a pair, and heads beside rows: a copy gives the product's own layout
    slot, spec = made.meta.pop("slot"), made.meta.pop("spec")
    with rewriter.graph.inserting_before(node):
        first = rewriter.graph.call_function(__import__("operator").getitem, (made, 0))
    first.meta.update(slot=slot, spec=spec, index=node.meta["index"])
    rewriter.rewrite(node, aten.reshape.default, (first, out.shape))


def fuse_norms(rewriter: Rewriter) -> int:
    """Placeholder until below."""
    return 0
