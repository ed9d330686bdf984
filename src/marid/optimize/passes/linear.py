"""A product with its bias and the activation that follows, as one call: the same bits, since it is the same kernels."""

from __future__ import annotations

import torch
from torch import fx

from marid.graph.node import Spec
from marid.optimize.passes.rewriter import Rewriter, op_of, overloads, slot_of
from marid.optimize.passes.storages import Storages

__all__ = ["fuse_activation", "only_read_by", "unwritten"]

_ADDMM = overloads("addmm").pop()
_LINEAR = overloads("linear").pop()
_T = overloads("t").pop()
_FUSED = overloads("_addmm_activation").pop()
_RELU = overloads("relu")
_GELU = overloads("gelu")
_DTYPES = {torch.float32, torch.float64}


def fuse_activation(rewriter: Rewriter) -> int:
    """``relu`` or exact ``gelu`` of an ``addmm``, or a ``linear`` with a bias, that nobody else reads, also through a
    view."""
    storages: Storages | None = None
    fused = 0
    for node in rewriter.calls():
        if node.target in _RELU:
            gelu = False
        elif node.target in _GELU and rewriter.peek(node.kwargs.get("approximate", "none")) == "none":
            gelu = True
        else:
            continue
        product = node.args[0]
        assert isinstance(product, fx.Node)
        view = product if product.op == "call_function" and op_of_view(product) else None
        if view is not None:
            product = view.args[0]
        if not isinstance(product, fx.Node) or not _adds_bias(product):
            continue
        if len(product.users) > 1 or (view is not None and len(view.users) > 1):
            continue
        storages = Storages(rewriter) if storages is None else storages
        spec = product.meta["spec"]
        parts = [product] if view is None else [product, view]
        if spec is None or spec.dtype not in _DTYPES or not only_read_by(storages, parts, node):
            continue
        if not unwritten(storages, list(product.args), product, node):
            continue
        if view is None:
            if node.meta["spec"] is not spec:
                continue
            rewriter.rewrite(node, _FUSED, _of_addmm(rewriter, product), use_gelu=gelu)
        else:
            if not isinstance(node.meta["spec"], Spec) or node.meta["spec"] is not view.meta["spec"]:
                continue
            made = rewriter.insert(node, _FUSED, _of_addmm(rewriter, product), spec, use_gelu=gelu)
            rewriter.rewrite(node, view.target, (made, *view.args[1:]))
            rewriter.graph.erase_node(view)
        rewriter.graph.erase_node(product)
        fused += 1
    return fused


def _adds_bias(product: fx.Node) -> bool:
    """Whether a node is ``addmm``, or is ``linear`` as the CPU makes it of ``addmm`` without further views."""
    if product.kwargs:
        return False
    if product.target is _ADDMM:
        return True
    if product.target is not _LINEAR or len(product.args) != 3:
        return False
    specs = [arg.meta["spec"] if isinstance(arg, fx.Node) else None for arg in product.args]
    return all(isinstance(spec, Spec) and len(spec.shape) == n for spec, n in zip(specs, (2, 2, 1), strict=True))


def _of_addmm(rewriter: Rewriter, product: fx.Node) -> tuple[object, ...]:
    """What ``product`` gives to ``addmm``: bias, rows, matrix."""
    if product.target is _ADDMM:
        return tuple(product.args)
    rows, weight, bias = product.args
    assert isinstance(weight, fx.Node)
    of: Spec = weight.meta["spec"]
    turned = Spec(of.shape[::-1], of.stride[::-1], of.offset, of.dtype, of.device, of.conj, of.neg)
    return bias, rows, rewriter.insert(product, _T, (weight,), turned)


def op_of_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument alone."""
    return "slot" in node.meta and hasattr(node.target, "_schema") and op_of(node).view


def only_read_by(storages: Storages, parts: list[fx.Node], reader: fx.Node) -> bool:
    """Whether each of ``parts`` has one reader, the next or ``reader``, and is neither an output nor written."""
    for part, following in zip(parts, [*parts[1:], reader], strict=True):
        if list(part.users) != [following] or slot_of(part) in storages.outputs:
            return False
        if storages.writes.get(storages.of(part)):
            return False
    return True


def unwritten(storages: Storages, args: list[object], since: fx.Node, until: fx.Node) -> bool:
    """Whether what ``since`` reads is still the same where ``until`` runs."""
    for arg in args:
        if not isinstance(arg, fx.Node) or "slot" not in arg.meta:
            continue
        if storages.is_written(storages.of(arg), since.meta["index"], until.meta["index"]):
            return False
    return True
