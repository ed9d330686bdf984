"""Recorded operations as a ``torch.fx.GraphModule``, the common tongue of PyTorch's tools.

In-place writes stay in-place writes, in program order; ``node.meta`` has ``val`` (a meta tensor), ``stack_trace``,
``nn_module_stack`` (with those of the forward for what a backward runs) and ``marid``: what ``semantics`` knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Draw, Node, Output, Spec, Value, values_in

Read = Callable[[Value], torch.Tensor]
"""Brings the value of what has run."""
Recorded = tuple[Node, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def to_fx(
    operations: list[Recorded], asked: list[Value], bring: Read, metadata: Callable[[Node], Any]
) -> torch.fx.GraphModule:
    """A graph module of ``(node, args, kwargs)`` in program order, returning ``asked`` or else all unread values.

    Placeholders are the values made outside, in order of first use; ``inputs()`` on the module reads them.
    Random nodes draw the very numbers that were recorded.
    """
    fx = torch.fx.Graph()
    inside = {node for node, _, _ in operations}
    sources: dict[Value, None] = {}
    for _, args, kwargs in operations:
        for value in values_in((*args, *(arg for _, arg in kwargs))):
            if value.node not in inside:
                sources[value] = None
    items: dict[Value, torch.fx.Node] = {}
    calls: dict[Node, torch.fx.Node] = {}
    read: set[Value] = set()
    for index, value in enumerate(sources):
        items[value] = fx.placeholder(f"source_{index}")
        _annotate(items[value], value.node, value.spec, metadata)

    def item_of(value: Value) -> torch.fx.Node:
        if value not in items:
            assert isinstance(value, Output)
            item = calls[value.node]
            for step in value.path:
                item = fx.call_function(_getitem, (item, step))
            items[value] = item
            _annotate(item, value.node, value.spec, metadata)
        return items[value]

    def convert(arg: Any) -> Any:
        if isinstance(arg, (Node, Output)):
            read.add(arg)
            return item_of(arg)
        return [convert(item) for item in arg] if isinstance(arg, tuple) else arg

    for node, args, kwargs in operations:
        assert node.op is not None
        draw = next((value for _, value in kwargs if isinstance(value, Draw)), None)
        target = node.op.func if draw is None else _drawn(node.op.func, draw)
        named = {name: convert(arg) for name, arg in kwargs if not isinstance(arg, Draw)}
        calls[node] = fx.call_function(target, tuple(convert(arg) for arg in args), named)
        if node.outs is None:
            items[node] = calls[node]
        _annotate(calls[node], node, node.spec, metadata)
    results = [item_of(value) for value in asked]
    if not results:
        results = [item for value, item in items.items() if value not in read and value.node in inside]
    fx.output(results[0] if len(results) == 1 else tuple(results))
    fx.lint()
    module = torch.fx.GraphModule(torch.nn.Module(), fx, "MaridGraph")
    module.inputs = lambda: [bring(value) for value in sources]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return module


def _getitem(values: Any, index: int) -> Any:
    return values[index]


def _drawn(func: Any, draw: Draw) -> Any:
    def random(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs, generator=MersenneTwisters().at(draw))

    random.__name__ = func._schema.name.split("::")[1]
    return random


def _annotate(item: torch.fx.Node, node: Node, spec: Spec | None, metadata: Callable[[Node], Any]) -> None:
    if spec is not None:
        item.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    if node.site is not None:
        item.meta["stack_trace"] = f'File "{node.site.file}", line {node.site.line}, in {node.site.function}'
    item.meta["marid"] = known = metadata(node)
    if known.modules:
        item.meta["nn_module_stack"] = {path: (path, kind) for path, kind in known.modules}
