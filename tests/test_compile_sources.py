"""``marid.compile`` and what a function reads beside its arguments: never stale, whatever it is."""

from __future__ import annotations

import ctypes
import datetime
import gc
import itertools
import logging
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import marid
from marid.replay.checks import Checks
from marid.semantics.source_files import is_of_a_package
from tests.helpers import DEVICE, assert_same

CALLS, CHANGE = 20, 10  # the call before which what is outside changes
LATE = types.SimpleNamespace(value=1.0)


def _constant_at_first() -> Iterator[float]:
    for call in itertools.count():
        yield 1.0 if call < CHANGE else float(call)


class _World:
    """What is outside of the function, and changes half way."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "number"
        self._patch = monkeypatch
        self.set(1)

    def set(self, number: int) -> None:
        self._patch.setenv("MARID_TEST_NUMBER", str(number))
        self._patch.setattr(sys, "argv", ["script", str(number)])
        self.file.write_text("1" * number)


Source = Callable[[_World], Callable[[], float]]


def _opened(world: _World) -> Callable[[], float]:
    handle = world.file.open()

    def read() -> float:
        handle.seek(0)
        return float(len(handle.read()))

    return read


def _iterating(world: _World) -> Callable[[], float]:
    numbers = iter([1.0] * CHANGE + [2.0] * CALLS)

    def read() -> float:
        for number in numbers:
            return number
        raise AssertionError

    return read


def _drawing(make: Callable[[], Any]) -> Source:
    def source(world: _World) -> Callable[[], float]:
        generator = make()
        return lambda: float(generator.random() < 0.9)

    return source


def _advancing(world: _World) -> Callable[[], float]:
    numbers = _constant_at_first()
    return lambda: next(numbers)


def _counting(world: _World) -> Callable[[], float]:
    numbers = itertools.count()
    return lambda: float(next(numbers) >= CHANGE)


# These are noticed while the function is recorded.
NOTICED: dict[str, Source] = {
    "time": lambda _: lambda: time.time(),
    "monotonic": lambda _: lambda: time.monotonic() // 3600,
    "perf_counter": lambda _: lambda: time.perf_counter() // 3600,
    "datetime": lambda _: lambda: datetime.datetime.now().timestamp() // 86400,
    "today": lambda _: lambda: datetime.date.today().toordinal(),
    "environ": lambda _: lambda: float(os.environ["MARID_TEST_NUMBER"]),
    "environ.get": lambda _: lambda: float(os.environ.get("MARID_TEST_NUMBER", "0")),
    "getenv": lambda _: lambda: float(os.getenv("MARID_TEST_NUMBER", "0")),
    "in environ": lambda _: lambda: float("MARID_TEST_NUMBER" in os.environ),
    "getpid": lambda _: lambda: float(os.getpid()),
    "urandom": lambda _: lambda: float(len(os.urandom(3))),
    "a file": lambda world: lambda: float(len(world.file.read_text())),
    "an open file": _opened,
    "the size of a file": lambda world: lambda: float(world.file.stat().st_size),
    "a listing": lambda world: lambda: float(len(os.listdir(world.file.parent))),
    "a generator of Python": _drawing(lambda: random.Random(3)),
    "a generator of numpy": _drawing(lambda: np.random.default_rng(3)),
    "an old generator of numpy": _drawing(lambda: np.random.RandomState(3)),
    "a generator function": _advancing,
    "an iterator": _iterating,
    "a count": _counting,
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _World:
    return _World(tmp_path, monkeypatch)


def _function_of(source: Source, world: _World) -> Callable[[torch.Tensor], torch.Tensor]:
    read = source(world)
    return lambda x: x + read()


def _calls(source: Source, world: _World) -> Any:
    """Each compiled call lies between an eager one before and one after it; with sources of their own."""
    before, after = _function_of(source, world), _function_of(source, world)
    compiled = marid.compile(_function_of(source, world))
    x = torch.zeros(1, dtype=torch.float64)
    for call in range(CALLS):
        if call == CHANGE:
            world.set(2)
        low, found, high = before(x), compiled(x.to(DEVICE)), after(x)
        assert low.item() <= found.item() <= high.item(), call
    return compiled


@pytest.mark.parametrize("name", NOTICED)
def test_what_cannot_be_watched_is_noticed_and_never_replayed(
    name: str, world: _World, caplog: pytest.LogCaptureFixture
) -> None:
    """Values are those of eager calls, the reason is told, and once."""
    with caplog.at_level(logging.WARNING, logger="marid"):
        compiled = _calls(NOTICED[name], world)
    assert compiled.stats().replays == 0
    assert len(caplog.records) == 1
    reason = caplog.records[0].getMessage()
    assert "test_compile_sources.py" in reason or "drawn on the host" in reason or "(numbers)" in reason, reason
    assert marid.stats().functions[0].fallbacks


def test_numbers_typed_in_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["1"] * CHANGE + ["2"] * CALLS)
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(readline=lambda: f"{next(answers)}\n", fileno=lambda: -1))
    monkeypatch.setattr(
        "sys.stdout", types.SimpleNamespace(write=lambda _: None, flush=lambda: None, fileno=lambda: -1)
    )
    compiled = marid.compile(lambda x: x + float(input()))
    found = [compiled(torch.zeros(1, device=DEVICE)).item() for _ in range(CALLS)]
    assert found == [1.0] * CHANGE + [2.0] * (CALLS - CHANGE)
    assert compiled.stats().replays == 0


class _Config:
    scale = 1.0


settings = {"scale": 1.0}


# These are watched: the function is replayed, and recorded anew when they change.
WATCHED: dict[str, tuple[Callable[[], float], Callable[[float], Any]]] = {
    "sys.argv": (lambda: float(sys.argv[1]), lambda value: sys.argv.__setitem__(1, str(value))),
    "an attribute of a class": (lambda: _Config.scale, lambda value: setattr(_Config, "scale", value)),
    "a dictionary": (lambda: settings["scale"], lambda value: settings.__setitem__("scale", value)),
    "a bound method in C": (
        lambda read=settings.__getitem__: read("scale"),
        lambda value: settings.__setitem__("scale", value),
    ),
    "an object": (lambda: LATE.value, lambda value: setattr(LATE, "value", value)),
    "what an installed module holds": (lambda: float(np.e), lambda value: setattr(np, "e", value)),
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.usefixtures("world")
def test_what_is_watched_is_replayed_until_it_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = WATCHED[name]
    monkeypatch.setattr(np, "e", np.e)
    change(1.0)
    compiled = marid.compile(lambda x: x * read())
    for call in range(CALLS):
        if call == CHANGE:
            change(3.0)
        x = torch.full((2,), float(call))
        assert_same(compiled(x.to(DEVICE)), x * read())
    change(1.0)
    assert compiled.stats().replays == CALLS - 4


def test_what_pytorch_and_reports_read_is_no_reason(world: _World) -> None:
    """A log message has a time, and a first import reads files."""
    log = logging.getLogger("marid.tests.sources")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    log.setLevel(logging.INFO)
    layer = torch.nn.Linear(2, 2).to(DEVICE)

    def run(x: torch.Tensor) -> torch.Tensor:
        log.info("at work")
        return layer(x)

    compiled = marid.compile(run)
    for _ in range(CALLS):
        with torch.no_grad():
            assert_same(compiled(torch.ones(1, 2, device=DEVICE)).cpu(), layer(torch.ones(1, 2, device=DEVICE)).cpu())
    assert compiled.stats().replays >= CALLS - 3


def test_what_runs_because_the_collector_does_is_no_reason() -> None:
    """Callbacks and finalizers come in the midst of whatever runs."""

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            time.monotonic()

    def callback(*_: Any) -> None:
        time.perf_counter()

    @marid.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        Finalized()
        gc.collect()
        return x * 2

    gc.callbacks.append(callback)
    try:
        x = torch.ones(3, device=DEVICE)
        for _ in range(6):
            assert_same(function(x), torch.full((3,), 2.0))
    finally:
        gc.callbacks.remove(callback)
    (stats,) = (one for one in marid.stats().functions if one.name.endswith("function"))
    assert stats.replays >= 3
    assert not any("clock" in reason for reason in stats.fallbacks)


def test_another_profiler_is_left_in_place() -> None:
    seen: list[str] = []
    compiled = marid.compile(lambda x: x * 2)
    profiler = lambda _frame, event, _arg: seen.append(event)  # noqa: E731
    sys.setprofile(profiler)
    try:
        compiled(torch.ones(1, device=DEVICE))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert seen
    assert compiled.stats().recordings == 0
    assert any("another profiler" in reason for reason in compiled.stats().fallbacks)
    for _ in range(4):
        compiled(torch.ones(1, device=DEVICE))
        assert sys.getprofile() is None
    sys.setprofile(profiler)
    try:
        compiled(torch.ones(1, device=DEVICE))
    finally:
        sys.setprofile(None)
    assert compiled.stats().replays == 3


def test_a_function_that_sets_a_profiler_is_not_replayed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(lambda *_: None)
        y = x * time.time()
        sys.setprofile(None)
        return y

    compiled = marid.compile(function)
    found = {compiled(torch.ones(1, dtype=torch.float64, device=DEVICE)).item() for _ in range(12)}
    assert len(found) == 12
    assert compiled.stats().replays == 0
    assert sys.getprofile() is None


def test_a_recording_replaces_nothing_of_pytorch() -> None:
    """Other threads see the methods that are always there."""
    names = ("item", "tolist", "numpy", "__array__", "__dlpack__", "__float__")
    before = [getattr(torch.Tensor, name) for name in names]

    @marid.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        assert [getattr(torch.Tensor, name) for name in names] == before
        return x * 2

    for _ in range(4):
        function(torch.ones(1, device=DEVICE))
    assert function.stats().replays == 2


# --- checks against the Python ---------------------------------------------------------------------------------------


class _Odd:
    """Its state is in C, behind attributes that Python computes."""

    def __init__(self) -> None:
        self._cell = ctypes.c_double(1.0)

    @property
    def scale(self) -> float:
        return self._cell.value

    def __getattr__(self, name: str) -> Any:
        if name != "other":
            raise AttributeError(name)
        return self._cell.value

    def set(self, value: float) -> None:
        self._cell.value = value


class _Elements:
    def __init__(self) -> None:
        self._numbers = (ctypes.c_double * 1)(1.0)

    scale = property(lambda self: self._numbers[0])
    other = scale

    def set(self, value: float) -> None:
        self._numbers[0] = value


KINDS: dict[str, Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    "a number": lambda odd: lambda x: x * odd.scale,
    "an attribute that is computed": lambda odd: lambda x: x * odd.other,
    "other operations": lambda odd: lambda x: x.exp() if odd.scale > 1 else x.sin(),
    "more operations": lambda odd: lambda x: (x + 1).exp() if odd.scale > 1 else x + 1,
    "another result": lambda odd: lambda x: (x + 1, odd.scale),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [_Odd, _Elements])
def test_a_check_finds_what_nobody_can_watch(
    kind: str, odd: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """From the check on results are those of the Python, the user's own call included; told once, with the line."""
    hidden = odd()
    eager = KINDS[kind](hidden)
    compiled = marid.compile(eager)
    right = []
    with caplog.at_level(logging.WARNING, logger="marid"):
        for call in range(40):
            if call == 5:
                hidden.set(2.0)
            x = torch.full((2,), call / 40)
            found, expected = compiled(x.to(DEVICE)), eager(x)
            tensors = (
                [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
            )
            right.append(all(torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b)) for a, b in tensors))
    assert right[:5] == [True] * 5
    assert right[18:] == [True] * 22  # two recordings, sixteen replays, and the check
    assert not all(right)
    assert compiled.stats().replays == 16
    [record] = caplog.records
    assert "not watched" in record.getMessage()
    if kind != "another result":
        assert "test_compile_sources.py" in record.getMessage()


def test_checks_agree_with_training_steps() -> None:
    """A step with dropout, momentum and counters on the host, whose numbers are others each time: no check differs,
    and the losses and parameters are those of eager PyTorch."""

    def make(device: str) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.5, 0.6))

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step

    found = []
    for device in ("cpu", DEVICE):
        model, step = make(device)
        run = marid.compile(step) if device == DEVICE else step
        torch.manual_seed(1)
        losses = [run(torch.full((3, 4), call / 150, device=device)) for call in range(150)]
        found.append([losses, [p.detach() for p in model.parameters()]])
    assert_same(found[1], found[0])
    stats = marid.stats().functions[0]
    assert (stats.recordings, stats.replays) == (3 + 4, 150 - 3 - 4)
    assert all("was empty" in reason for reason in stats.fallbacks)  # the first step makes the optimizer's state


def test_a_check_compares_with_the_template_that_serves_the_call() -> None:
    """Calls whose arguments share memory for the first time at a check are no difference."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    compiled = marid.compile(run)
    for call in range(60):
        a = torch.full((2,), float(call))
        shares = call == 18
        b = a if shares else a.clone()
        lazy = a.to(DEVICE)
        assert_same(compiled(lazy, lazy if shares else b.to(DEVICE)), run(a, b))
    assert compiled.stats().fallbacks == {}


def test_checks_take_no_more_than_their_share() -> None:
    """With the first ones, which come soon, they take no more than the setting says, and never come where it is 0."""
    before = marid.settings.compile_verify
    try:
        for share in (0, 1, 10):
            marid.settings.compile_verify = share
            checks, spent, at = Checks(), 0.0, []
            for call in range(20_000):
                if checks.is_due():
                    checks.checked(0.020)
                    at.append(call)
                    spent += 0.020
                else:
                    checks.replayed(0.001)
            if share == 0:
                assert at == []
                continue
            assert at[:4] == [16, 32, 64, 128]
            assert len(at) > 8
            assert spent <= share / 100 * 0.001 * 20_000
    finally:
        marid.settings.compile_verify = before


def test_masked_arrays_are_watched_as_others() -> None:
    """Their own method that gives their bytes writes to them, which the constant of numpy does not let it."""
    values = np.ma.array([1.0, 2.0], mask=[False, True])

    @marid.compile
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if np.ma.masked is not values else x * float(values.sum())

    @marid.compile
    def summed(x: torch.Tensor) -> torch.Tensor:
        return x * float(values.sum())

    for call in range(CALLS):
        if call == CHANGE:
            values.mask = [False, False]
        x = torch.ones(2, device=DEVICE)
        assert scaled(x).tolist() == [2.0, 2.0]
        assert summed(x).tolist() == ([1.0, 1.0] if call < CHANGE else [3.0, 3.0])


def test_packages_of_debians_python_are_packages() -> None:
    for folder in ("site-packages", "dist-packages"):
        assert is_of_a_package(f"/usr/lib/python3/{folder}/rich/style.py")
    assert not is_of_a_package("/home/user/packages/style.py")
