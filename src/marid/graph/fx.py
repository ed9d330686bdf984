"""Recorded operations as a ``torch.fx.GraphModule``, the common tongue of PyTorch's tools.

In-place writes stay in-place writes, in program order; ``node.meta`` has ``val`` (a meta tensor) and ``stack_trace``,
and where it is known ``nn_module_stack`` (with those of the forward for what a backward runs) and ``marid``: what
``semantics`` knows of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.node import map_aggregate

from marid.graph.arguments import placed
from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Draw, Node, Output, Spec, Value

Recorded = tuple[Node, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def to_fx(
    operations: list[Recorded],
    sources: Mapping[Value, str],
    returned: Any,
    metadata: Callable[[Node], Any] | None,
    title: str,
) -> torch.fx.GraphModule:
    """A graph module of ``(node, args, kwargs)`` in program order, that returns values in a structure.

    Placeholders are the values made outside, with their names. Random nodes draw the very numbers that were recorded.
    """
    fx = torch.fx.Graph()
    items: dict[Value, torch.fx.Node] = {}
    calls: dict[Node, torch.fx.Node] = {}
    for value, name in sources.items():
        items[value] = fx.placeholder(name)
        _annotate(items[value], value.node, value.spec, metadata)

    def item_of(value: Value) -> torch.fx.Node:
        if value not in items:
            assert isinstance(value, Output)
            item = calls[value.node]
            for step in value.path:
                item = fx.call_function(operator.getitem, (item, step))
            items[value] = item
            _annotate(item, value.node, value.spec, metadata)
        return items[value]

    for node, args, kwargs in operations:
        assert node.op is not None
        draw = next((value for _, value in kwargs if isinstance(value, Draw)), None)
        target = node.op.func if draw is None else _drawn(node.op.func, draw)
        named = {name: placed(arg, item_of) for name, arg in kwargs if not isinstance(arg, Draw)}
        calls[node] = fx.call_function(target, tuple(placed(arg, item_of) for arg in args), named)
        if node.outs is None:
            items[node] = calls[node]
        _annotate(calls[node], node, node.spec, metadata)
    fx.output(map_aggregate(returned, lambda leaf: item_of(leaf) if isinstance(leaf, (Node, Output)) else leaf))
    fx.lint()
    return torch.fx.GraphModule(torch.nn.Module(), fx, title)


def _drawn(func: Any, draw: Draw) -> Any:
    def random(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs, generator=MersenneTwisters().at(draw))

    random.__name__ = func._schema.name.split("::")[1]
    return random


def _annotate(item: torch.fx.Node, node: Node, spec: Spec | None, metadata: Callable[[Node], Any] | None) -> None:
    if spec is not None:
        item.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    if node.site is not None:
        item.meta["stack_trace"] = f'File "{node.site.file}", line {node.site.line}, in {node.site.function}'
    if metadata is not None:
        item.meta["marid"] = known = metadata(node)
        if known.modules:
            item.meta["nn_module_stack"] = {path: (path, kind) for path, kind in known.modules}
