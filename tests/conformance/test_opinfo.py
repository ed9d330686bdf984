"""Every operator of PyTorch's database, in every mode."""

from __future__ import annotations

import pytest

from . import opinfo

OPERATORS = sorted(opinfo.operators(), key=opinfo.name_of)


@pytest.mark.parametrize("op", OPERATORS, ids=opinfo.name_of)
def test_operator_equals_eager(op: opinfo.OpInfo) -> None:
    """On the first samples of each dtype."""
    found = [f"[{mode}] {line}" for mode in opinfo.MODES for line in opinfo.failures(op, mode)]
    assert not found, "\n".join(found)


@pytest.mark.conformance
@pytest.mark.parametrize("op", OPERATORS, ids=opinfo.name_of)
def test_operator_equals_eager_on_every_sample(op: opinfo.OpInfo) -> None:
    """On all samples of each dtype."""
    found = [f"[{mode}] {line}" for mode in opinfo.MODES for line in opinfo.failures(op, mode, None)]
    assert not found, "\n".join(found)
