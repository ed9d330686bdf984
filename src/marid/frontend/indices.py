"""Indices: of tensors, by numbers and by masks, which choose as many elements as their values say; and in lists."""

from __future__ import annotations

from typing import Any

import torch


def indexes_by_number(indices: Any) -> bool:
    """Whether there is no mask among the indices of a tensor, by whose values the shape of a result is decided."""
    return not any(index is not None and _is_mask(index) for index in indices)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype is torch.bool or index.dtype is torch.uint8


def fits_any_count(target: torch.Tensor, indices: Any, values: torch.Tensor) -> bool:
    """Whether values can be written however many elements a mask among the indices chooses."""
    if indexes_by_number(indices):
        return True
    (position, mask), *others = [(i, index) for i, index in enumerate(indices) if index is not None]
    if any(index.numel() != 1 for _, index in others):
        return False  # they go with as many
    if values.numel() == 1:
        return True
    behind = target.dim() - position - mask.dim()  # dimensions of the result to the right of the chosen elements
    return not others and (values.dim() <= behind or values.shape[-1 - behind] == 1)


def first_occurrences(ids: list[int]) -> tuple[int, ...]:
    """For each of some numbers, where it is first among them."""
    return tuple([ids.index(one) for one in ids])
