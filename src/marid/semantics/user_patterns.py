"""Patterns of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from marid.semantics.patterns import Pattern

_registered: dict[str, Pattern] = {}


def register_pattern(
    name: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor], *, variant: str | None = None
) -> None:
    """Have graphs say where the work of ``function`` is done in them: ``metadata.pattern`` and regions are then
    ``name``. ``inputs`` are example tensors for it, of any sizes and on any device; those that are ``nn.Parameter``
    stand for weights, all others for anything. How it is spelled does not matter much: see ``docs/semantics.md``.

    Raises ``ValueError`` when the name is taken, or when nothing is left of the function that could be looked for.
    """
    if name in _registered:
        raise ValueError(f"a pattern named {name!r} is registered already; unregister_pattern({name!r}) first")
    from marid.semantics.patterns import Pattern  # FX's matcher is not needed by who has no graph

    given = tuple(_example(tensor) for tensor in inputs)
    pattern = Pattern(name, function, given, variant)
    if not pattern.targets:
        raise ValueError(f"nothing is left of the pattern {name!r} but views, casts and copies")
    _registered[name] = pattern


def unregister_pattern(name: str) -> None:
    """Take a pattern of yours out again. Raises ``KeyError`` when there is none of that name."""
    del _registered[name]


def registered() -> list[Pattern]:
    """The users' patterns."""
    return list(_registered.values())


def _example(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made
