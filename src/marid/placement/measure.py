"""How fast devices and the links between them are, measured."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence

import torch

from marid.frontend import handles

_PRODUCTS = 4
_LEAST, _MOST = 64 << 10, 2 << 20


def data_bytes(rooms: Iterable[int | None]) -> int:
    """Bytes of what is measured with, where there is so much room: a small part of it."""
    return max(_LEAST, min([_MOST, *(room // 16 for room in rooms if room is not None)]))


def _rounded(speed: float) -> float:
    """A speed to half a power of two, so that devices of one kind are equal in spite of noise."""
    return 2.0 ** (round(2 * math.log2(speed)) / 2)


def speeds(devices: Sequence[int], nbytes: int) -> dict[int, float]:
    """Floating-point operations a second of each device, in products of float32 matrices of so many bytes."""
    found = {}
    width = math.isqrt(nbytes // 4)
    for index in devices:
        matrix = torch.full((width, width), 1.0 / width, device=f"{handles.DEVICE_TYPE}:{index}")
        fastest = math.inf
        for _ in range(3):
            begun = time.perf_counter()
            product = matrix
            for _ in range(_PRODUCTS):
                product = product @ matrix
            product[0, 0].item()
            fastest = min(fastest, time.perf_counter() - begun)
        found[index] = _rounded(2 * width**3 * _PRODUCTS / fastest)
    return found


def link_speed(devices: Sequence[int], nbytes: int) -> float:
    """Bytes a second from one device to another, of the slowest pair of neighbours."""
    slowest = math.inf
    for first, second in itertools.pairwise(devices):
        data = torch.zeros(nbytes, dtype=torch.uint8, device=f"{handles.DEVICE_TYPE}:{first}")
        data[0].item()
        fastest = math.inf
        for _ in range(3):
            begun = time.perf_counter()
            data.to(f"{handles.DEVICE_TYPE}:{second}")[0].item()
            fastest = min(fastest, time.perf_counter() - begun)
        slowest = min(slowest, nbytes / fastest)
    return _rounded(slowest) if slowest < math.inf else 1e9
