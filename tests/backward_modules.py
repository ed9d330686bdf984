"""The module whose forward made each operation's autograd node, as autograd itself says it: for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from marid.frontend import handles

__all__ = ["backward_of"]


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
