"""Writing a random network block by block, with a running copy of it on the CPU at hand, so that blocks fit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "Kind", "Unfit", "Writer"]

LARGEST = 1 << 16  # elements of one sample: enough for calls of every size class, and quick
HEAVIEST = 1 << 21  # elements of what one block adds to the network: a step of training stays quick
FARTHEST = 1e3  # larger values overflow soon, and one infinity is like another


class Unfit(Exception):
    """The activation has no shape that the block could take."""


@dataclass(frozen=True)
class Block:
    """A piece of a network: statements of its ``__init__`` and of its ``forward``, which reads and assigns ``x``.

    ``before`` and ``after`` are the shapes of ``x`` without the batch.
    """

    init: tuple[str, ...]
    forward: tuple[str, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


class Writer:
    """Chooses blocks by a seed. ``x`` is the activation so far, for a batch of two."""

    def __init__(self, choices: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.random = choices
        self.dtype = dtype
        self.module = nn.Module()
        self.names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "self": self.module}
        self.names["x"] = torch.randn(2, *shape).to(dtype)
        self.blocks: list[Block] = []
        self.saved: dict[str, tuple[int, ...]] = {}
        self.count = 0

    # --- choosing ---

    def one(self, *options: Any) -> Any:
        return self.random.choice(options)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, max(low, high))

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def options(self, percent: int = 25, **choices: tuple[Any, ...]) -> str:
        """Text of keyword arguments, each left out or one of the given."""
        given = [f", {name}={self.one(*values)!r}" for name, values in choices.items() if self.chance(percent)]
        return "".join(given)

    def divisor(self, number: int) -> int:
        return self.one(*[n for n in range(1, number + 1) if number % n == 0])

    # --- looking ---

    @property
    def x(self) -> torch.Tensor:
        return self.names["x"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the activation without the batch."""
        return tuple(self.x.shape[1:])

    def spatial(self, *counts: int) -> int:
        """How many spatial dimensions ``x`` has, as (N, C, ...); raises ``Unfit`` if not one of ``counts``."""
        found = self.x.dim() - 2
        if found not in (counts or (1, 2, 3)):
            raise Unfit
        return found

    def new(self, kind: str) -> str:
        """A name for a part of the network that is not yet taken."""
        self.count += 1
        return f"{kind}{self.count}"

    # --- writing ---

    def write(self, kind: Kind) -> bool:
        """Write a block of a kind; False, with nothing written, if it does not fit or what it gives is of no use."""
        saved = dict(self.saved)
        try:
            init, forward = kind(self)
        except Unfit:
            return False
        before, old = self.shape, dict(self.names)
        try:
            self._try(init, forward)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            # The kinds choose sizes that mostly fit. That errors are equal on both devices is tested elsewhere.
            fits = False
        else:
            fits = self._is_useful()
        if not fits:
            self.names, self.saved = old, saved
            return False
        self.blocks.append(Block(init, forward, before, self.shape))
        return True

    def _try(self, init: tuple[str, ...], forward: tuple[str, ...]) -> None:
        with torch.no_grad():
            if _elements(init) > HEAVIEST:
                raise ValueError("the block is too heavy")
            for statement in init:
                exec(statement, self.names)
            self.module.to(self.dtype)
            for statement in forward:
                exec(statement, self.names)

    def _is_useful(self) -> bool:
        x = self.x
        if x.dim() < 2 or x.dim() > 5 or x.shape[0] != 2 or not 0 < x[0].numel() <= LARGEST:
            return False
        return x.dtype == self.dtype and bool((x.abs() < FARTHEST).all())


def _elements(init: tuple[str, ...]) -> int:
    """How many elements the parameters and buffers of a block have, without making them."""
    module = nn.Module()
    with torch.device("meta"):
        for statement in init:
            exec(statement, {"torch": torch, "nn": nn, "F": F, "math": math, "self": module})
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


Kind = Callable[[Writer], tuple[tuple[str, ...], tuple[str, ...]]]
