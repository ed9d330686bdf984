"""Whether both devices returned the same, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.suite.workloads import Tolerance

__all__ = ["Comparison", "Wrong", "on_host"]


_TELLING = 500
"""For how many turns of training the outputs say something after a weight was rounded otherwise once. Eager PyTorch's
``gnn`` with one weight other by 2e-7 was off by 3 % after 500 turns, by 13 % after 1,000."""


class Wrong(Exception):
    """An output is not eager PyTorch's; the message says where and by how much."""


def on_host(outputs: Sequence[Tensor | float]) -> list[Tensor | float]:
    """The outputs with their tensors on the CPU: the read that ends a turn."""
    return [output.detach().cpu() if isinstance(output, Tensor) else output for output in outputs]


@dataclass
class Comparison:
    """Outputs of turns compared so far, and the largest difference among them: relative, with a tenth absolute."""

    tolerance: Tolerance
    turns: int = 0
    largest: float = 0.0
    parted: int | None = None
    """The first turn whose outputs had other bits."""

    def turn(self, expected: Sequence[Tensor | float], outputs: Sequence[Tensor | float]) -> None:
        """Compare the outputs of the next turn, brought to the host before. Training is compared no longer when it
        has gone on with other bits for ``_TELLING`` turns."""
        limit = self.tolerance.tight if self.turns < self.tolerance.strict else self.tolerance.loose
        self.turns += 1
        if self.parted is not None and limit > self.tolerance.tight and self.turns - self.parted > _TELLING:
            return
        self._compare(f"turn {self.turns}", expected, outputs, limit)
        if self.largest and self.parted is None:
            self.parted = self.turns

    def state(self, expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Compare what the turns have left."""
        self._compare("the state after all turns", on_host(expected), on_host(outputs), self.tolerance.loose)

    def demand_equal_bits(self) -> None:
        """Raise where anything differed at all."""
        if self.largest:
            raise Wrong(f"nothing was compiled, and outputs differ by {self.largest:.0e}")

    @property
    def words(self) -> str:
        return "bitwise" if self.largest == 0 else f"within {self.largest:.0e}"

    def _compare(
        self, where: str, expected: Sequence[Tensor | float], outputs: Sequence[Tensor | float], limit: float
    ) -> None:
        if len(expected) != len(outputs):
            raise Wrong(f"{where}: {len(outputs)} outputs in place of {len(expected)}")
        for index, (theirs, mine) in enumerate(zip(expected, outputs, strict=True)):
            off = _difference(where, torch.as_tensor(theirs), torch.as_tensor(mine))
            if not off <= limit:  # not `off > limit`: a NaN has to fail too
                raise Wrong(f"{where}: output {index + 1} is off by {off:.1e}")
            self.largest = max(self.largest, off)


def _difference(where: str, expected: Tensor, output: Tensor) -> float:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        raise Wrong(
            f"{where}: {output.dtype} {tuple(output.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
        )
    same = (output == expected) | (output.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    mine, theirs = output[~same].double(), expected[~same].double()
    return float(((mine - theirs).abs() / (theirs.abs() + 0.1)).max())
