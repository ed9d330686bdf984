"""The module whose forward made each operation's autograd node, as autograd itself says it: for tests."""

from __future__ import annotations

import bisect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import marid
from marid.frontend import handles
from tests.helpers import DEVICE

if TYPE_CHECKING:
    from tests.models import Case

__all__ = ["backward_of", "compared", "compared_with_autograd"]


def backward_of(model: nn.Module, run: Any) -> dict[tuple[int, int], str]:
    """Runs ``run()`` for a loss and its backward. By ranges of the numbers of recorded operations (from, before): the
    path of the innermost module that made the autograd node which recorded them."""
    spans: list[tuple[int, int, str]] = []
    begun: list[int] = []
    hooks: list[Any] = []
    number = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_: begun.append(number())))
        hooks.append(module.register_forward_hook(lambda *_, p=path: spans.append((begun.pop(), number(), p))))
    loss = run()
    for hook in hooks:
        hook.remove()
    found: dict[tuple[int, int], str] = {}
    tape = handles.tape(0)
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    kept = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept.append(node)
        waiting += [other for other, _ in node.next_functions]
        sequence = node._sequence_nr()
        inside = [(end - start, path) for start, end, path in spans if start <= sequence < end]
        if not inside or type(node).__name__ == "AccumulateGrad":
            continue
        path = min(inside)[1]
        start: list[int] = []
        node.register_prehook(lambda _, s=start: s.append(next(tape.sequence)))
        node.register_hook(lambda *_, s=start, p=path: found.update({(s[-1], next(tape.sequence)): p}))
    loss.backward()
    return found


def compared(graph: marid.ComputationGraph, truth: dict[tuple[int, int], str]) -> tuple[int, list[Any]]:
    """How many operations of backwards have the module that autograd says, and those that have not: with both."""
    spans, right, wrong = sorted(truth), 0, []
    for node in graph.nodes:
        place = bisect.bisect_right(spans, (node.id, 1 << 60)) - 1
        if node.scope is None or node.scope.phase != "backward" or node.scope.module_path is not None:
            continue
        if place < 0 or not spans[place][0] < node.id < spans[place][1]:
            continue
        path = node.metadata.module_path
        path = re.sub(r"\.?<\w+>$", "", path) if path else path  # a module that its parent has no name for
        if path == truth[spans[place]]:
            right += 1
        else:
            wrong.append((node, truth[spans[place]], path))
    return right, wrong


def compared_with_autograd(case: Case) -> tuple[int, int]:
    """Right and wrong ones in the backward of a model."""
    torch.manual_seed(1)
    model = case.build(0.1).to(DEVICE)
    inputs = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in case.inputs(True).items()}
    marid.materialize(*model.parameters(), *model.buffers(), *[v for v in inputs.values() if torch.is_tensor(v)])
    truth = backward_of(model, lambda: case.loss(model, inputs))
    right, wrong = compared(marid.graph(*[p.grad for p in model.parameters() if p.grad is not None]), truth)
    return right, len(wrong)
