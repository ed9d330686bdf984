"""Rewriting of products that rounds elsewhere: only with ``marid.settings.fast_math``.

A bias goes into the product, and products read a transposed matrix where it lies: the same formula in another order
of summation. Results agree within ``torch.testing.assert_close``'s tolerances, not in every bit. ``attention`` and
``norms`` have more of the kind.
"""

from __future__ import annotations

import torch
from torch import fx

from marid.execute.compiled.passes.rewriter import Rewriter, look, overloads, val_of
from marid.execute.compiled.passes.storages import Storages, is_view
from marid.ops.facts import facts_of

aten = torch.ops.aten

_ADD = overloads("add.Tensor")
_FLOATS = {torch.float32, torch.float64}
_CONTIGUOUS_COPY = overloads("clone")


def read_transposed(rewriter: Rewriter) -> int:
    """``x.t().contiguous() @ w``: the product reads ``x`` through the view, without the copy."""
    storages = Storages(rewriter)
    changed = 0
    for node in rewriter.calls():
        for position in facts_of(node.target).factors:
            copy = node.args[position]
            if not isinstance(copy, fx.Node) or copy.target not in _CONTIGUOUS_COPY:
                continue
            view = copy.args[0]
            mine, other = val_of(copy), val_of(view)
            if not isinstance(view, fx.Node) or mine is None or other is None:
                continue
            if mine.dtype is not other.dtype or not _is_transposed(other) or not storages.only_read_by([copy], node):
                continue
            if not storages.unwritten([view], copy, node):
                continue
            node.update_arg(position, view)
            rewriter.graph.erase_node(copy)
            changed += 1
    return changed


def _is_transposed(matrix: torch.Tensor) -> bool:
    if matrix.dim() < 2:
        return False
    rows, columns = matrix.stride()[-2:]
    return rows == 1 and columns >= max(1, matrix.shape[-2])


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
            view = product if is_view(product) else None
            matrix = view.args[0] if view is not None else product
            if not isinstance(matrix, fx.Node) or matrix.target is not aten.mm.default:
                continue
            made, row, shown = val_of(matrix), val_of(bias), val_of(product)
            if made is None or row is None or shown is None or made.dtype not in _FLOATS or row.dtype is not made.dtype:
                continue
            if row.shape != made.shape[-1:] or row.shape != shown.shape[-1:] or look(node) != look(product):
                continue
            parts = [matrix] if view is None else [matrix, view]
            if storages.place[bias] > storages.place[node] or not storages.only_read_by(parts, node):
                continue
            if not storages.unwritten(list(matrix.args), matrix, node):
                continue
            if view is None:
                rewriter.rewrite(node, aten.addmm.default, (bias, *matrix.args))
            else:
                added = rewriter.insert(node, aten.addmm.default, (bias, *matrix.args))
                rewriter.rewrite(node, view.target, (added, *view.args[1:]))
                rewriter.graph.erase_node(view)
            rewriter.graph.erase_node(matrix)
            changed += 1
            break
    return changed
