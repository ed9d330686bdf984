"""What autograd knows of a tensor that a recorded function returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LEAF", "LIVE", "SPENT", "graph_of", "with_spent_graph"]

# A tensor that requires gradients of itself; one that gradients can be taken of; one whose graph was freed by that.
LEAF, LIVE, SPENT = "leaf", "live", "spent"

_SPENT_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


def graph_of(tensor: torch.Tensor) -> str | None:
    """``LEAF``, ``LIVE``, ``SPENT``, or None for a tensor without gradient."""
    if tensor.grad_fn is None:
        return LEAF if tensor.requires_grad else None
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        if _is_freed(function):
            return SPENT
        pending += [following for following, _ in function.next_functions if following is not None]
    return LIVE


def _is_freed(function: Any) -> bool:
    for name in _saved(type(function)):
        try:
            getattr(function, name)
        except RuntimeError as error:
            if "a second time" in str(error):
                return True
    return False


@functools.cache
def _saved(kind: type) -> tuple[str, ...]:
    return tuple([name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"])


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        return make()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(_SPENT_MESSAGE)


_anchor = torch.zeros((), requires_grad=True, device="cpu")


def with_spent_graph(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor that ``make`` makes, with a history whose buffers are gone: what ``loss`` is after ``backward()``."""
    with torch.enable_grad():
        return _Spent.apply(_anchor, make)  # pyright: ignore[reportReturnType]
