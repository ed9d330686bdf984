"""What there is to say of a pattern beside its name: of attention, heads, lengths and masks."""

from __future__ import annotations

from typing import Any

from torch import fx

from marid.graph.node import Node, Value
from marid.semantics.canonical import Canonical, base_name
from marid.semantics.patterns import Match

__all__ = ["describe"]

_MASK_DEPTH = 40
_SUMS = {"sum", "linalg_vector_norm", "norm"}
"""What makes of a root mean square the length of a vector."""


def describe(match: Match, canonical: Canonical) -> None:
    """Fill in the details of a match."""
    if match.name == "attention":
        _attention(match, canonical)
    if match.name == "norm" and match.variant == "rms" and any(base_name(node) in _SUMS for node in match.nodes):
        match.name, match.variant = "unit vectors", None


def _attention(match: Match, canonical: Canonical) -> None:
    result = match.results[0]
    recorded = canonical.recorded
    node: Node = result.meta["nodes"][0]
    if match.variant == "fused":
        query, key, value = recorded.inputs_of(node)[:3]
        masks = [arg for arg in recorded.inputs_of(node)[3:4]]
        causal = (
            any(arg is True for arg in recorded.arguments[node][0][3:])
            or ("is_causal", True) in recorded.arguments[node][1]
        )
    else:
        softmax = next(arg for arg in result.all_input_nodes if arg.target == "softmax")
        product = softmax.all_input_nodes[0]
        query, key = _operands(canonical, product)
        value = _operands(canonical, result)[1]
        masks = [other for one in softmax.meta.get("between", ()) for other in _beside(canonical, one)]
        causal = False
    assert query.spec is not None
    assert key.spec is not None
    shape, other = query.spec.shape, key.spec.shape
    length = shape[-2]
    keys = other[-2] if match.variant == "fused" else result.meta["nodes"][0] and _keys(canonical, result)
    compared = {name for mask in masks for name in _comparisons(recorded, mask)}
    details: dict[str, Any] = {"queries": length, "keys": keys}
    if len(shape) == 4:
        details["heads"] = shape[1]
    details["causal"] = causal or bool(compared & {"le", "ge", "tril", "triu", "lt", "gt"})
    details["sliding window"] = len(compared & {"le", "ge", "lt", "gt"}) > 1
    details["bias"] = bool(masks) and not compared
    match.details.update(details)


def _operands(canonical: Canonical, product: fx.Node) -> tuple[Value, Value]:
    values = canonical.recorded.inputs_of(product.meta["nodes"][0])
    return values[-2], values[-1]


def _keys(canonical: Canonical, result: fx.Node) -> int | None:
    first = _operands(canonical, result)[0]
    return first.spec.shape[-1] if first.spec is not None else None


def _beside(canonical: Canonical, one: fx.Node) -> list[Value]:
    """What is combined with scores."""
    return [value for node in one.meta["nodes"] for value in canonical.recorded.inputs_of(node)]


def _comparisons(recorded: Any, mask: Value) -> set[str]:
    """The comparisons that a mask was made of."""
    found: set[str] = set()
    seen: set[Node] = set()
    waiting = [mask.node]
    while waiting and len(seen) < _MASK_DEPTH:
        node = waiting.pop()
        if node in seen or node not in recorded.arguments:
            continue
        seen.add(node)
        name = base_name(node)
        if name in ("le", "ge", "lt", "gt", "tril", "triu"):
            found.add(name)
        if name in ("bmm", "mm", "linear", "addmm", "native_layer_norm", "convolution"):
            continue
        waiting += [value.node for value in recorded.inputs_of(node)]
    return found
