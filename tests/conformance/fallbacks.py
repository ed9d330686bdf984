"""Which operators run eagerly although the shapes of their results do not depend on data."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path

import torch
from torch.testing._internal.opinfo.core import OpInfo

import marid

from . import opinfo


@functools.cache
def allowed() -> dict[str, str]:
    """What ``fallbacks.txt`` allows: operator to reason."""
    lines = Path(__file__).with_name("fallbacks.txt").read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))


def found_by(op: OpInfo, samples: int) -> set[str]:
    """Those that run eagerly for the first samples of an operator that eager PyTorch accepts, forward and backward."""
    supported = sorted(op.supported_dtypes("cpu"), key=str)
    if not supported:
        return set()
    dtype = torch.float32 if torch.float32 in supported else supported[0]
    grad = dtype is torch.float32 and op.supports_autograd
    found: set[str] = set()
    for sample in itertools.islice(opinfo.samples_of(op, dtype, grad), samples):
        marid.reset_stats()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                there = opinfo.moved(sample, op)
                opinfo.call(op, there)
                if grad:
                    opinfo._gradients(op, there)
        except (opinfo.SparseSample, RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue  # what is refused is the business of other tests
        found |= set(marid.stats().fallbacks)
    return found
