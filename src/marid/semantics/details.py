"""What there is to say of a pattern beside its name: of attention, heads, lengths and masks."""

from __future__ import annotations

from typing import Any

from torch import fx

from marid.graph.computation import Recorded
from marid.graph.node import Node, Value
from marid.semantics.canonical import Canonical
from marid.semantics.expressions import base_name
from marid.semantics.patterns import Match

_MASK_DEPTH = 40
_SUMS = {"sum", "linalg_vector_norm", "norm"}
"""What makes of a root mean square the length of a vector."""


def describe(match: Match, canonical: Canonical) -> bool:
    """Fill in the details of a match, and say whether it counts after all."""
    if match.name == "attention":
        _attention(match, canonical)
    if match.name == "norm" and match.variant == "rms" and any(base_name(node) in _SUMS for node in match.nodes):
        match.name, match.variant = "unit vectors", None
    if match.name == "mamba":  # what a state decays by is an exponential
        return any(_is_exponential(one) for one in match.inputs)
    return True


def _is_exponential(node: fx.Node) -> bool:
    while node.target == "part":
        (node,) = node.all_input_nodes
    return node.target == "exp"


def _attention(match: Match, canonical: Canonical) -> None:
    result = match.results[0]
    recorded = canonical.recorded
    node: Node = result.meta["nodes"][0]
    if match.variant == "fused":
        query, key = recorded.inputs_of(node)[:2]
        masks = recorded.inputs_of(node)[3:4]
        args, kwargs = recorded.arguments[node]
        causal = any(arg is True for arg in args[3:]) or dict(kwargs).get("is_causal") is True
        keys = key.spec.shape[-2] if key.spec is not None else None
    else:
        softmax = next(arg for arg in result.all_input_nodes if arg.target == "softmax")
        query, key = _operands(canonical, softmax.all_input_nodes[0])
        between = [part for one in softmax.meta.get("between", ()) for part in one.meta["nodes"]]
        masks = [value for part in between for value in recorded.inputs_of(part)]
        causal = False
        weights = _operands(canonical, result)[0]
        keys = weights.spec.shape[-1] if weights.spec is not None else None
    compared = {name for mask in masks for name in _comparisons(recorded, mask)}
    details: dict[str, Any] = {"keys": keys}
    if query.spec is not None and len(query.spec.shape) > 1:
        details["queries"] = query.spec.shape[-2]
    heads = _heads(recorded, query), _heads(recorded, key)
    if heads[0] is not None:
        details["heads"] = heads[0]
        if heads[1] is not None and heads[1] < heads[0]:
            details["key heads"] = heads[1]
    details["causal"] = causal or bool(compared)
    details["sliding window"] = len(compared & {"le", "ge", "lt", "gt"}) > 1
    details["bias"] = bool(masks) and not compared
    match.details.update(details)


_RESHAPES = {"clone", "_unsafe_view", "view", "expand", "unsqueeze", "transpose", "mul", "_to_copy", "permute"}


def _heads(recorded: Recorded, value: Value) -> int | None:
    """How many heads a tensor has, before they are repeated and flattened for a product: the second of four sizes."""
    found: int | None = None
    while value.spec is not None:
        shape = value.spec.shape
        if len(shape) == 4 and shape[1] != 1:
            found = shape[1] if found is None else min(found, shape[1])
        node = value.node
        if node not in recorded.arguments or base_name(node) not in _RESHAPES:
            break
        if base_name(node) == "transpose" and found is not None:
            break
        value = recorded.inputs_of(node)[0]
    return found


def _operands(canonical: Canonical, product: fx.Node) -> tuple[Value, Value]:
    values = canonical.recorded.inputs_of(product.meta["nodes"][0])
    return values[-2], values[-1]


def _comparisons(recorded: Recorded, mask: Value) -> set[str]:
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
