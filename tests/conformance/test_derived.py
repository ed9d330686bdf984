"""What is derived for new sizes is what the CPU's kernels return, for every operator of PyTorch's database."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import torch

from marid.frontend import record

from . import derived, opinfo

OPERATORS = sorted(opinfo.operators(), key=opinfo.name_of)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SAMPLES = 25


@pytest.mark.conformance
@pytest.mark.parametrize("op", OPERATORS, ids=opinfo.name_of)
def test_what_is_derived_is_what_the_cpu_returns(op: opinfo.OpInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward for float32."""
    for recorder in record._recorders.values():
        recorder.forget()
    with derived.checked(monkeypatch) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grad = dtype is torch.float32 and op.supports_autograd
            for sample in itertools.islice(opinfo.samples_of(op, dtype, grad), SAMPLES):
                with contextlib.suppress(Exception):  # what is refused is the business of other tests
                    there = opinfo.moved(sample, op)
                    opinfo.call(op, there)
                    if grad:
                        opinfo._gradients(op, there)
    assert not found, "\n".join(found)
