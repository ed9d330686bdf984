"""No operator runs eagerly by accident: those that do are listed in ``fallbacks.txt``."""

from __future__ import annotations

import pytest
import torch

import marid
from marid.remote.worker.admitted import is_admitted

from . import fallbacks, opinfo

_REFUSED_BY_WORKERS = {
    "aten::_batch_norm_with_update",
    "aten::_scaled_mm_v2",
    "aten::batch_norm_backward",
    "aten::linalg_ldl_solve",
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
}
"""What no module calls, and what calls other operators behind every check."""


def _found(samples: int) -> set[str]:
    return {name for op in opinfo.operators() for name in fallbacks.found_by(op, samples)}


def test_what_runs_eagerly_and_what_workers_refuse_is_listed() -> None:
    """On the first samples of each operator, and in backward without a dispatch mode, with which autograd calls
    others."""
    recorded: set[str] = set()
    with marid.on_record(lambda one: recorded.add(one.operator)):
        assert _found(1) <= set(fallbacks.allowed())
    assert len(recorded) > 300
    assert {name for name in recorded if not _is_admitted(name)} <= _REFUSED_BY_WORKERS


def _is_admitted(name: str) -> bool:
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base)
    return any(is_admitted(getattr(packet, overload)) for overload in packet.overloads())


@pytest.mark.conformance
def test_what_is_listed_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)  # what runs at once anyway is no fallback
    assert _found(20) == set(fallbacks.allowed())
