"""Dimensions that a user declares to be of varying size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

_MARK = "_marid_dynamic_dims"


def mark_dynamic(tensor: torch.Tensor, dim: int | Iterable[int]) -> None:
    """Declare that the size of a dimension (or of several) varies from one such tensor to the next.

    Programs serve all sizes anyway. Under ``marid.compile``, sizes of marked dimensions are recorded one by one, but
    do not count as further kinds of arguments. Raises ``IndexError`` for a dimension that is not there.
    """
    rank = tensor.dim()
    marked = set(dynamic_dims_of(tensor))
    for one in (dim,) if isinstance(dim, int) else dim:
        if not -rank <= one < rank:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {one})"
            )
        marked.add(one % rank)
    setattr(tensor, _MARK, tuple(sorted(marked)))


def dynamic_dims_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor that are marked."""
    return tensor.__dict__.get(_MARK, ())


def mark_arguments(dims: Mapping[int | str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark the tensors of arguments, given by position or name."""
    for which, dim in dims.items():
        given = kwargs.get(which) if isinstance(which, str) else args[which] if which < len(args) else None
        for leaf in _pytree.tree_leaves(given):
            if isinstance(leaf, torch.Tensor):
                mark_dynamic(leaf, dim)
