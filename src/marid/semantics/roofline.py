"""How fast this machine is: the peak of its arithmetic and of its memory, measured once and kept on disk.

Reference: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from marid.settings import settings

_SIDE = 512
_MOVED = 32 << 20
_TRIES = 5
_OVERHEAD_CALLS = 2000


@dataclass(frozen=True)
class Machine:
    """``flops`` and ``half_flops`` (bfloat16) a second in products of matrices, ``bandwidth`` in bytes a second,
    ``overhead`` in seconds of one small operation, with as many ``threads`` as PyTorch had then."""

    flops: float
    half_flops: float
    bandwidth: float
    overhead: float
    threads: int

    def seconds(self, flops: int, nbytes: int, dtype: torch.dtype) -> float:
        """The least time for so much work in one operation; 0 for none."""
        if not flops and not nbytes:
            return 0.0
        peak = self.half_flops if dtype in (torch.bfloat16, torch.float16) else self.flops
        return max(flops / peak, nbytes / self.bandwidth, self.overhead)

    @property
    def ridge(self) -> float:
        """The arithmetic intensity, in FLOPs a byte, above which arithmetic bounds the time; below it memory does."""
        return self.flops / self.bandwidth


_known: dict[int, Machine] = {}


def machine() -> Machine:
    """This machine: as it was measured before with so many threads, else measured now, for some tenths of a second."""
    threads = torch.get_num_threads()
    if threads not in _known:
        path = settings.cache_dir / f"machine-{_name(threads)}.json"
        _known[threads] = found = _read(path) or _measured(threads)
        _keep(path, found)
    return _known[threads]


def _name(threads: int) -> str:
    said = (platform.node(), platform.machine(), platform.processor(), os.cpu_count(), torch.__version__, threads)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _read(path: Path) -> Machine | None:
    try:
        data = json.loads(path.read_text())
        found = Machine(**{name: data[name] for name in Machine.__dataclass_fields__})
        numbers = [float(value) for value in asdict(found).values()]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(0 < number < 1e20 for number in numbers) else None


def _keep(path: Path, found: Machine) -> None:
    with suppress(OSError):  # a machine that cannot be written down is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(found), file)
        os.replace(name, path)


def _measured(threads: int) -> Machine:
    def product(dtype: torch.dtype) -> float:
        a = torch.ones(_SIDE, _SIDE, dtype=dtype, device="cpu")
        return 2 * _SIDE**3 / _fastest(lambda: torch.mm(a, a))

    source = torch.ones(_MOVED // 4, device="cpu")
    target = torch.empty_like(source)
    small = torch.ones(4, device="cpu")

    def calls() -> None:
        for _ in range(_OVERHEAD_CALLS):
            small.neg()

    with torch.inference_mode():
        return Machine(
            flops=product(torch.float32),
            half_flops=product(torch.bfloat16),
            bandwidth=2 * _MOVED / _fastest(lambda: target.copy_(source)),
            overhead=_fastest(calls) / _OVERHEAD_CALLS,
            threads=threads,
        )


def _fastest(work: Callable[[], object]) -> float:
    """The seconds of the fastest of some calls."""
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)
