"""Constant folding: tiny results that depend on no input are computed once and held."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from marid.optimize.passes.rewriter import Rewriter, op_of, pure

__all__ = ["fold"]

_LARGEST = 1024  # bytes
_UNSET = object()


def fold(rewriter: Rewriter) -> int:
    """Hold what ``zeros``, ``full``, ``arange`` and arithmetic on them give. Random and unset memory is left alone."""
    storages = rewriter.storages
    folded = 0
    held: dict[Any, fx.Node] = {}
    for node in rewriter.calls():
        spec = node.meta.get("spec")
        if spec is None or spec.nbytes > _LARGEST or not pure(node) or op_of(node).view or _is_unset(node):
            continue
        storage = storages.of(node)
        if storages.writes.get(storage) or storage in storages.escaping:
            continue
        if not all(_is_known(arg) for arg in (*node.args, *node.kwargs.values())):
            continue
        sizes = spec.shape if op_of(node).factory else None
        args = [_value(rewriter, arg, sizes) for arg in node.args]
        kwargs = {name: _value(rewriter, arg, sizes) for name, arg in node.kwargs.items()}
        if any(value is _UNSET for value in (*args, *kwargs.values())):
            continue
        # Never the text of a tensor, which leaves digits out.
        plain = not any(map(_has_tensor, (*args, *kwargs.values())))
        key = (node.target, repr(args), repr(kwargs), id(spec)) if plain else None
        if key is not None and key in held:
            storages.join(node, held[key])
            rewriter.replace(node, held[key])
            folded += 1
            continue
        try:
            made = op_of(node).call(*args, **kwargs)
        except Exception:  # the run raises it, at its place
            continue
        if not isinstance(made, torch.Tensor) or (made.shape, made.stride(), made.dtype) != (
            spec.shape,
            spec.stride,
            spec.dtype,
        ):
            continue
        constant = rewriter.constant(made, spec)
        if key is not None:
            held[key] = constant
        storages.root[constant.meta["slot"]] = constant.meta["slot"]
        storages.join(node, constant)
        rewriter.replace(node, constant)
        folded += 1
    return folded


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _is_unset(node: fx.Node) -> bool:
    name = op_of(node).name.partition("::")[2]
    return "empty" in name or name in ("resize", "new_empty")


def _is_known(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return all(_is_known(item) for item in arg)
    if not isinstance(arg, fx.Node):
        return True
    return "constant" in arg.meta or ("param" in arg.meta and not arg.meta["draw"])


def _value(rewriter: Rewriter, arg: Any, sizes: tuple[int, ...] | None) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_value(rewriter, item, sizes) for item in arg]
    if not isinstance(arg, fx.Node):
        return arg
    if "constant" in arg.meta:
        return arg.meta["constant"]
    value = rewriter.peek(arg)
    if value == sizes and type(value) is tuple:
        return list(value)  # as the spec says, which is a fact
    value = rewriter.number(arg)
    if value is None:
        return _UNSET
    return list(value) if isinstance(value, tuple) else value
