"""``LazyTuple``: what methods of lazy tensors with several results return, a real tuple that can be materialised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.utils import _pytree

from marid.frontend.materialize import materialize
from marid.frontend.tensor import LazyTensor
from marid.native import module
from marid.semantics.tracebacks import folded


class LazyTuple(tuple):
    """A tuple of lazy tensors. Reading one element runs the operation that makes them, which is one for all, and what
    was done to that element since; it moves that element only.

    Results that PyTorch returns under names (``values``, ``indices``) have them here too: ``kind`` is the class in
    ``torch.return_types`` that PyTorch returns.
    """

    _kind: Any

    def __new__(cls, items: Iterable[Any], kind: Any = None) -> Self:
        self = super().__new__(cls, items)
        self._kind = kind
        return self

    def __repr__(self) -> str:
        return super().__repr__() if self._kind is None else repr(self._kind(tuple(self)))

    def __reduce__(self) -> Any:
        return LazyTuple, (tuple(self), self._kind)

    @folded
    def materialize(self) -> tuple[torch.Tensor, ...]:
        """Run everything in one program; CPU copies of the elements."""
        materialize([item for item in self if isinstance(item, LazyTensor)], "materialize()", "value")
        return tuple(item.materialize() if isinstance(item, LazyTensor) else item for item in self)


def _named(name: str) -> property:
    def element(self: LazyTuple) -> Any:
        names = () if self._kind is None else self._kind.__match_args__
        if name not in names:
            raise AttributeError(f"'LazyTuple' object has no attribute {name!r}")
        return self[names.index(name)]

    return property(element)


_METHODS = (
    "split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind topk sort msort kthvalue mode median "
    "nanmedian max min aminmax cummax cummin frexp unsafe_split unsafe_chunk"
).split()


for _name in _METHODS:
    if hasattr(torch.Tensor, _name):
        # torch.split and torch.unravel_index call methods, and return what they return.
        _method = module.returning_tuples(getattr(torch.Tensor, _name), LazyTuple, torch.functional.__dict__)
        setattr(LazyTensor, _name, _method)


for _name in ("values", "indices", "min", "max", "mantissa", "exponent"):  # of the classes that these methods return
    setattr(LazyTuple, _name, _named(_name))


def register() -> Callable[[], None]:
    """Let PyTorch's pytrees look into a ``LazyTuple``. Returns what undoes it."""
    _pytree.register_pytree_node(
        LazyTuple,
        lambda t: (list(t), t._kind),
        LazyTuple,
        serialized_type_name="marid.LazyTuple",
    )
    return lambda: _pytree._deregister_pytree_node(LazyTuple)
