"""A layer norm that was written out, by ATen's kernel; only with ``marid.settings.fast_math``.

A root-mean-square norm stays as it is: ATen has no kernel for it on the CPU, only the same steps.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from marid.execute.compiled.passes.rewriter import Rewriter, overloads, val_of
from marid.execute.compiled.passes.storages import Storages

aten = torch.ops.aten

_MEAN = overloads("mean.dim").pop()
_VAR = overloads("var.correction").pop()
_SUB = overloads("sub.Tensor").pop()
_ADD = overloads("add.Tensor").pop()
_MUL = overloads("mul.Tensor").pop()
_DIV = overloads("div.Tensor").pop()
_POW = overloads("pow.Tensor_Scalar").pop()
_FLOATS = {torch.float32, torch.float64}


def fuse(rewriter: Rewriter) -> int:
    """``(x - mean) / sqrt(var + eps)``, with the weight and the bias that follow, where nobody reads the parts."""
    fused = 0
    for node in rewriter.calls():
        found = _match(rewriter, node)
        if found is None:
            continue
        x, parts, eps = found
        storages = Storages(rewriter)
        for last, rows, more in (_affine(node), (node, [], [])):
            inner = sorted({*parts, *more} - {last}, key=storages.place.__getitem__)
            if _only_inside(storages, inner, last) and storages.unwritten([x, *rows], inner[0], last):
                _emit(rewriter, last, x, rows, eps)
                for part in reversed(inner):
                    rewriter.graph.erase_node(part)
                fused += 1
                break
    return fused


def _match(rewriter: Rewriter, node: fx.Node) -> tuple[fx.Node, list[fx.Node], float] | None:
    """The input, the parts up to ``node`` and epsilon of a norm without weight that ``node`` ends."""
    root = node.args[1] if node.target in (_DIV, _MUL) and len(node.args) == 2 and not node.kwargs else None
    wanted = aten.sqrt.default if node.target is _DIV else aten.rsqrt.default
    centred = node.args[0] if root is not None else None
    if isinstance(centred, fx.Node) and centred.target is wanted and node.target is _MUL:
        root, centred = centred, root
    if not isinstance(root, fx.Node) or root.target is not wanted or not isinstance(centred, fx.Node):
        return None
    shifted = root.args[0]
    if centred.target is not _SUB or centred.kwargs or len(centred.args) != 2:
        return None
    x, mean = centred.args[0], centred.args[1]
    if not isinstance(x, fx.Node) or not _is_mean(rewriter, mean, x):
        return None
    val, whole = val_of(x), val_of(node)
    if val is None or whole is None or val.dtype not in _FLOATS or whole.shape != val.shape:
        return None
    if not isinstance(shifted, fx.Node) or shifted.target is not _ADD or shifted.kwargs or len(shifted.args) != 2:
        return None
    variance, eps = shifted.args
    if type(rewriter.peek(eps)) not in (int, float) or rewriter.number(eps) is None:
        return None
    parts = [node, root, shifted, centred, mean]
    inside = _variance(rewriter, variance, x, centred)
    if inside is None or not val.is_contiguous() or not val.numel():
        return None
    return x, [*parts, *inside], float(rewriter.number(eps))


def _variance(rewriter: Rewriter, node: Any, x: fx.Node, centred: fx.Node) -> list[fx.Node] | None:
    if not isinstance(node, fx.Node):
        return None
    if node.target is _VAR:
        named = dict(node.kwargs)
        dims = rewriter.number(node.args[1]) if len(node.args) > 1 else None
        biased = rewriter.is_number(named.get("correction"), 0)
        last = dims in ((-1,), (x.meta["val"].dim() - 1,))
        return [node] if node.args and node.args[0] is x and last and biased and named.get("keepdim") is True else None
    square = node.args[0] if node.args else None
    if not isinstance(square, fx.Node) or not _is_mean(rewriter, node, square):
        return None
    if square.target is _POW and square.args[0] is centred and rewriter.is_number(square.args[1], 2):
        return [node, square]
    return [node, square] if square.target is _MUL and tuple(square.args) == (centred, centred) else None


def _is_mean(rewriter: Rewriter, node: Any, of: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.target is not _MEAN or node.args[0] is not of or node.kwargs:
        return False
    if len(node.args) != 3 or node.args[2] is not True:
        return False
    return rewriter.number(node.args[1]) in ((-1,), (of.meta["val"].dim() - 1,))


def _affine(node: fx.Node) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    """The last operation, the weight and the bias that follow ``node``, and the operations that take them."""
    rows: list[fx.Node] = []
    parts = [node]
    for target in (_MUL, _ADD):
        last = parts[-1]
        readers = list(last.users)
        if len(readers) != 1 or readers[0].target is not target or readers[0].kwargs or len(readers[0].args) != 2:
            break
        a, b = readers[0].args
        row = b if a is last else a
        val, whole = val_of(row), val_of(last)
        if val is None or whole is None or val.shape != whole.shape[-1:] or val.dtype is not whole.dtype:
            break
        assert isinstance(row, fx.Node)
        rows.append(row)
        parts.append(readers[0])
    return parts[-1], rows, parts


def _only_inside(storages: Storages, inner: list[fx.Node], last: fx.Node) -> bool:
    readers = {*inner, last}
    for part in inner:
        if part in storages.outputs or storages.is_written(part) or not readers.issuperset(part.users):
            return False
    return True


def _emit(rewriter: Rewriter, last: fx.Node, x: fx.Node, rows: list[fx.Node], eps: float) -> None:
    weight, bias = (*rows, None, None)[:2]
    args = (x, list(last.meta["val"].shape[-1:]), weight, bias, eps)
    call = rewriter.insert(last, aten.native_layer_norm.default, args)
    rewriter.replace(last, rewriter.insert(last, operator.getitem, (call, 0)))
