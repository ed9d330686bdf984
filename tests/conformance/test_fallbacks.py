"""No operator runs eagerly by accident: those that do are listed in ``fallbacks.txt``."""

from __future__ import annotations

import pytest

from . import fallbacks, opinfo


def _found(samples: int) -> set[str]:
    return {name for op in opinfo.operators() for name in fallbacks.found_by(op, samples)}


def test_what_runs_eagerly_is_listed() -> None:
    """On the first samples of each operator."""
    assert _found(1) <= set(fallbacks.allowed())


@pytest.mark.conformance
def test_what_is_listed_runs_eagerly() -> None:
    assert _found(20) == set(fallbacks.allowed())
