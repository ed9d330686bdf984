"""What autograd knows of a tensor that a recorded function returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
    for name in _saved(type(function), ("_saved_", "saved_tensors")):
        try:
            getattr(function, name)
        except RuntimeError as error:
            if "a second time" in str(error):
                return True
    return False


def kept_by_autograd(tensors: Iterable[torch.Tensor], history: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that autograd keeps for ``tensors``: the bases of views, and what is saved for their backward.

    Functions of ``history`` were there before: what is behind them is left out.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = {None, *history}
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        kept = [] if tensor._base is None else [tensor._base]
        functions: list[Any] = [tensor.grad_fn]
        while functions:
            function = functions.pop()
            if function not in seen:
                seen.add(function)
                kept += _saved_by(function)
                functions += [following for following, _ in function.next_functions]
        pending += [one for one in kept if id(one) not in found]
        found.update({id(one): one for one in kept})
    return list(found.values())


_SavedTensor: Any = torch._C._autograd.SavedTensor
# What is packed by hooks is kept packed; older versions of PyTorch show it unpacked only.
_AS_KEPT = "_raw_saved" if hasattr(_SavedTensor, "data") else ("_saved_", "saved_tensors")


def _saved_by(function: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name in _saved(type(function), _AS_KEPT):
        with contextlib.suppress(RuntimeError):  # it was freed
            saved = tree_leaves(getattr(function, name))
            kept = tree_leaves([one.data if isinstance(one, _SavedTensor) else one for one in saved])
            found += [one for one in kept if isinstance(one, torch.Tensor)]
    return found


@functools.cache
def _saved(kind: type, prefix: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name for name in dir(kind) if name.startswith(prefix)])


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
