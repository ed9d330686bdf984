"""A layer norm that was written out, by ATen's kernel; only with ``marid.settings.fast_math``.

A root-mean-square norm stays as it is: ATen has no kernel for it on the CPU, only the same steps.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.rewriter import Rewriter, overloads, slot_of
from marid.optimize.passes.storages import Storages

__all__ = ["fuse"]

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
    storages = Storages(rewriter)
    fused = 0
    for node in rewriter.calls():
        found = _match(rewriter, node)
        if found is None:
            continue
        x, parts, eps = found
        last, weight, bias = _affine(node, parts)
        inner = [part for part in parts if part is not last]
        if not _only_inside(storages, inner, [*inner, last]):
            last, weight, bias, inner = node, None, None, [part for part in parts if part is not node]
            if not _only_inside(storages, inner, [*inner, node]):
                continue
        begin = min(part.meta["index"] for part in inner)
        given = [x, *[t for t in (weight, bias) if t is not None]]
        if any(storages.is_written(storages.of(t), begin, last.meta["index"]) for t in given):
            continue
        if any(list(rewriter.graph.nodes).index(t) > list(rewriter.graph.nodes).index(last) for t in given):
            continue
        _emit(rewriter, last, x, weight, bias, eps)
        for part in sorted(inner, key=lambda part: -part.meta["index"]):
            rewriter.graph.erase_node(part)
        fused += 1
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
    spec = x.meta.get("spec")
    if not isinstance(spec, Spec) or spec.dtype not in _FLOATS or node.meta["spec"].shape != spec.shape:
        return None
    if not isinstance(shifted, fx.Node) or shifted.target is not _ADD or shifted.kwargs or len(shifted.args) != 2:
        return None
    variance, eps = shifted.args
    if type(rewriter.peek(eps)) not in (int, float) or rewriter.number(eps) is None:
        return None
    parts = [node, root, shifted, centred, mean]
    inside = _variance(rewriter, variance, x, centred)
    if inside is None or not spec.is_contiguous or not spec.numel:
        return None
    return x, [*parts, *inside], float(rewriter.number(eps))


def _variance(rewriter: Rewriter, node: Any, x: fx.Node, centred: fx.Node) -> list[fx.Node] | None:
    if not isinstance(node, fx.Node):
        return None
    if node.target is _VAR:
        named = dict(node.kwargs)
        dims = rewriter.number(node.args[1]) if len(node.args) > 1 else None
        biased = rewriter.is_number(named.get("correction"), 0)
        last = dims in ((-1,), (len(x.meta["spec"].shape) - 1,))
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
    return rewriter.number(node.args[1]) in ((-1,), (len(of.meta["spec"].shape) - 1,))


def _affine(node: fx.Node, parts: list[fx.Node]) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """The last operation, the weight and the bias that follow ``node``, which are added to ``parts``."""
    found: list[fx.Node | None] = []
    last = node
    for target in (_MUL, _ADD):
        readers = list(last.users)
        if len(readers) != 1 or readers[0].target is not target or readers[0].kwargs or len(readers[0].args) != 2:
            break
        a, b = readers[0].args
        row = b if a is last else a
        spec, whole = (row.meta.get("spec") if isinstance(row, fx.Node) else None), last.meta["spec"]
        if not isinstance(spec, Spec) or spec.shape != whole.shape[-1:] or spec.dtype is not whole.dtype:
            break
        found.append(row if isinstance(row, fx.Node) else None)
        last = readers[0]
        parts.append(last)
    weight, bias = (*found, None, None)[:2]
    return last, weight, bias


def _only_inside(storages: Storages, inner: list[fx.Node], readers: list[fx.Node]) -> bool:
    for part in inner:
        if slot_of(part) in storages.outputs or storages.writes.get(storages.of(part)):
            return False
        if any(user not in readers for user in part.users):
            return False
    return True


def _emit(
    rewriter: Rewriter, last: fx.Node, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> None:
    spec = last.meta["spec"]
    args = (x, spec.shape[-1:], weight, bias, eps)
    call = rewriter.insert(last, aten.native_layer_norm.default, args, spec)
    slot = call.meta.pop("slot")
    del call.meta["spec"]
    # The operation that is replaced becomes the first result, in its own slot.
    with rewriter.graph.inserting_before(last):
        first = rewriter.graph.call_function(operator.getitem, (call, 0))
    first.meta.update(slot=slot_of(last), spec=spec, index=last.meta["index"])
    last.replace_all_uses_with(first)
    last.meta["slot"] = slot
    rewriter.graph.erase_node(last)
