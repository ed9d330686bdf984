"""Rewriting that rounds elsewhere: only with ``marid.settings.fast_math``.

A bias goes into the product, and products read a transposed matrix where it lies: the same formula in another order
of summation. Results agree within ``torch.testing.assert_close``'s tolerances, not in every bit. ``attention`` and
``norms`` have more of the kind.
"""

from __future__ import annotations

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.linear import only_read_by, op_of_view, unwritten
from marid.optimize.passes.rewriter import Rewriter, overloads
from marid.optimize.passes.storages import Storages

__all__ = ["add_bias_in_product", "read_transposed"]

aten = torch.ops.aten

_ADD = overloads("add.Tensor")
_FLOATS = {torch.float32, torch.float64}
_CONTIGUOUS_COPY = overloads("clone")
_PRODUCTS: dict[object, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
}


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
