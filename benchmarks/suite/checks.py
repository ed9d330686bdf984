"""Whether what a contestant computed is what the reference computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.suite.workloads import Tolerance

__all__ = ["Wrong", "compare_arrays", "compare_sequences"]


class Wrong(Exception):
    """An output is not what it has to be; the message says where and by how much."""


def compare_sequences(outputs: Sequence[Any], reference: Sequence[Any], tolerance: Tolerance) -> str:
    """Compare the outputs of the calls one by one: numbers or lists of numbers. How close they are, in words.

    Raises ``Wrong`` at the first that is farther off than ``tolerance`` allows, and when there is nothing to compare.
    """
    compared, largest = 0, 0.0
    for index, (output, expected) in enumerate(zip(outputs, reference, strict=False)):
        if output is None and expected is None:
            continue
        limit = tolerance.tight if index < tolerance.strict else tolerance.loose
        mine, theirs = _numbers(output), _numbers(expected)
        if len(mine) != len(theirs):
            raise Wrong(f"call {index + 1} returned {len(mine)} numbers, the reference {len(theirs)}")
        for a, b in zip(mine, theirs, strict=True):
            compared += 1
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            off = abs(a - b) / (abs(b) + 0.1)
            if not off <= limit:  # not `off > limit`: a NaN has to fail too
                raise Wrong(f"call {index + 1} returned {a!r}, the reference {b!r}")
            largest = max(largest, off)
    if not compared:
        raise Wrong("no output was compared")
    return _words(largest)


def compare_arrays(output: np.ndarray, reference: np.ndarray, tolerance: Tolerance) -> str:
    """The same for one large array."""
    if output.shape != reference.shape or output.dtype != reference.dtype:
        raise Wrong(f"the output is {output.dtype} {output.shape}, the reference {reference.dtype} {reference.shape}")
    if not output.size:
        raise Wrong("the output is empty")
    with np.errstate(invalid="ignore"):
        relative = np.abs(output.astype(np.float64) - reference) / (np.abs(reference) + 0.1)
    relative[(output == reference) | (np.isnan(output) & np.isnan(reference))] = 0
    bad = ~(relative <= tolerance.tight)
    if bad.any():
        where = int(np.argmax(bad))
        raise Wrong(
            f"{int(bad.sum())} of {bad.size} elements are wrong, the first is {output.flat[where]!r} and should be "
            f"{reference.flat[where]!r}"
        )
    return _words(float(relative.max()))


def _numbers(output: Any) -> list[float]:
    if isinstance(output, (int, float)):
        return [output]
    if not isinstance(output, list):
        raise Wrong(f"there is an output {output!r} that is no number")
    return output


def _words(largest: float) -> str:
    return "bitwise" if largest == 0 else f"within {largest:.0e}"
