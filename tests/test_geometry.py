"""The executor's invariant: a result has the geometry that was recorded, whatever its kernel makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.errors import MaterializationError
from marid.execute import executable
from marid.frontend import handles, infer
from marid.frontend.engines import local_engine as engine
from marid.frontend.record import recorder_of
from tests import operators  # noqa: F401
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import connected

pytestmark = [pytest.mark.mispredicts]

ops = torch.ops.marid_tests
_LARGE = 160, 170


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is known of the operators whose meta kernels are wrong is what those say, before and after. Everything is
    recorded."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    monkeypatch.setattr(infer, "_DISTRUSTED", set(infer._DISTRUSTED))
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    yield
    mul, norm = torch.ops.aten.mul.Tensor, torch.ops.aten.native_batch_norm.default
    for func in (ops.turned.default, ops.shorter.default, ops.itself.default, mul, norm):
        recorder = recorder_of(func)
        recorder.forget()
        if recorder.deriver is not None:
            recorder.deriver._trusted.clear()


def _record_wrongly(func: Any, known: Any, spec: Any) -> None:
    """Let calls of ``func`` with what is ``known`` be recorded with another spec."""
    recorder = recorder_of(func)
    (key,) = (key for key, one in recorder.known.items() if one is known)
    known.rule.outs[0].spec = spec
    recorder.learn(key, known.rule, (), None, 0)


def _lies(func: Any, *, stride: tuple[int, ...]) -> None:
    """Let the newest kind of call of ``func`` be recorded with other strides."""
    known = list(recorder_of(func).known.values())[-1]
    of = known.rule.outs[0].spec
    _record_wrongly(func, known, handles.spec(of.shape, stride, of.offset, of.dtype, of.device))


def test_a_result_is_laid_out_as_recorded_and_the_next_one_is_recorded_right() -> None:
    """The first one has the strides that the user has seen, and its views the elements; the second one is exact."""
    x = torch.rand(_LARGE)
    expected = ops.turned(x)
    lazy = x.to(DEVICE)
    y = ops.turned(lazy)
    assert y.stride() == x.stride() != expected.stride()
    row, flat_view = y[3], y.view(-1)[200:300]
    assert torch.equal((row + 1).cpu(), expected[3] + 1)
    assert torch.equal(flat_view.cpu(), expected.reshape(-1)[200:300])
    assert y.cpu().stride() == y.stride()
    (wrong,) = marid.stats().mispredictions
    assert (wrong.operator, wrong.count) == ("marid_tests::turned", 1)
    assert "test_geometry.py" in wrong.source
    again = ops.turned(lazy)
    assert_same(again, expected)
    assert_same(ops.turned(torch.rand(170, 160).to(DEVICE)).stride(), ops.turned(torch.rand(170, 160)).stride())
    assert len(marid.stats().mispredictions) == 1


def _differing(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 3
    z = y.t() + 1
    y[2].mul_(2)
    return [y, z, y.reshape(-1)[10:30].sum(), y + z.t()]


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("runs", [0, 1, 2, 5])
def test_whenever_it_differs(runs: int, plans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first run, as a table, and in planned memory."""
    if plans:
        monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    x = torch.rand(8, 6)
    lazy = x.to(DEVICE)
    recorder_of(torch.ops.aten.mul.Tensor).forget()
    for _ in range(runs):
        assert_same([t.cpu() for t in _differing(lazy)], _differing(x))
    lazy * 3
    _lies(torch.ops.aten.mul.Tensor, stride=(1, 8))
    results = _differing(lazy)
    assert results[0].stride() == (1, 8)
    for got, right in zip(results, _differing(x), strict=True):
        assert torch.equal(got.cpu(), right)
    assert [one.operator for one in marid.stats().mispredictions] == ["aten::mul"]
    for _ in range(3):
        assert_same([t.cpu() for t in _differing(lazy)], _differing(x))


def test_without_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs run in Python, and are compared there."""
    monkeypatch.setattr(executable.Executable, "prepared", lambda _: None)
    for runs in (0, 2):
        marid.reset_stats()
        test_whenever_it_differs(runs, False, monkeypatch)


def test_while_running_ahead() -> None:
    """On the device's own thread the run stops behind it, and is gone on with where it is read."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.rand(_LARGE)
        lazy, losses = x.to(DEVICE), []
        for step in range(12):
            y = ops.turned(lazy * step) if step == 9 else (lazy * step) * 2
            losses.append((y.reshape(-1)[:50] * torch.arange(50, device=DEVICE)).sum())
            if step % 3 == 2:
                losses[-1].item()
        expected = [((x * step) * 2).view(-1)[:50].mul(torch.arange(50)).sum() for step in range(12)]
        assert_same([loss.cpu() for loss in losses], expected)
    finally:
        torch.set_num_threads(threads)


def test_under_marid_compile() -> None:
    """A replay is held to what its recordings say."""
    x = torch.rand(_LARGE)

    @marid.compile
    def function(t: torch.Tensor) -> torch.Tensor:
        return ops.turned(t)[3] + 1

    lazy = x.to(DEVICE)
    for _ in range(4):
        assert torch.equal(function(lazy).cpu(), ops.turned(x)[3] + 1)


@pytest.mark.parametrize("operator", [ops.shorter])
def test_what_cannot_be_laid_out_raises_at_its_line(operator: Callable[..., Any]) -> None:
    """Of another shape: the error names the line; recorded once more, it is right."""
    x = torch.rand(_LARGE)
    lazy = x.to(DEVICE)
    y = operator(lazy)
    with pytest.raises(MaterializationError, match=r"(?s)fake kernel and its kernel disagree.*test_geometry.py"):
        y.cpu()
    assert len(marid.stats().mispredictions) == 1
    assert_same(operator(lazy), operator(x))


def test_memory_that_is_shared_against_what_its_schema_says() -> None:
    """A result is the caller's own; the next call runs at once, and does what the kernel does."""
    x = torch.rand(_LARGE)
    lazy = x.to(DEVICE)
    y = ops.itself(lazy)
    y.add_(1)
    assert_same([y, lazy], [x + 1, x])
    assert "in other memory" in marid.stats().mispredictions[0].what
    ops.itself(lazy)
    assert marid.stats().fallbacks == {"marid_tests::itself": 1}


@pytest.mark.parametrize("batches", [1, 3])
def test_batch_norm_writes_its_statistics_once(batches: int) -> None:
    """What differs is not done again: the operator has written by then."""
    x = torch.rand(4, 3, 8, 8)
    here, there = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to(DEVICE)
    for _ in range(batches):
        here(x)
        there(x.to(DEVICE)).cpu()
    there(x.to(DEVICE))
    _lies(torch.ops.aten.native_batch_norm.default, stride=(192, 1, 24, 3))
    assert torch.equal(there(x.to(DEVICE)).cpu(), here(x))
    here(x)
    assert len(marid.stats().mispredictions) == 1
    assert torch.equal(there.running_mean.cpu(), here.running_mean)  # pyright: ignore[reportOptionalMemberAccess]


def test_on_a_worker() -> None:
    """The worker lays it out as recorded, and says so; the client counts it and records the next one right."""
    x = torch.rand(_LARGE)
    expected = ops.turned(x)
    with connected(3, imports=["tests.operators"]):
        lazy = x.to(f"{DEVICE}:3")
        y = ops.turned(lazy)
        assert y.stride() != expected.stride()
        assert torch.equal(y[3].cpu(), expected[3])
        (wrong,) = marid.stats().mispredictions
        assert (wrong.operator, wrong.count) == ("marid_tests::turned", 1)
        assert "test_geometry.py" in wrong.source
        again = ops.turned(lazy)
        assert_same(again, expected)
        assert len(marid.stats().mispredictions) == 1
