"""Shared set-up of the tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Threads of kernels that wait for each other by spinning take the processors from tests beside them, and wait for
# those: twice the time in all. OpenMP reads it when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MARID_COMPILE", "0")  # what is compared bit for bit must not be compiled
os.environ.setdefault("MARID_COMPILE_NICENESS", "0")  # tests wait for it, and keep the machine busy
# Behind the variables: PyTorch's entry point for backends reads Marid's settings.
import torch

import marid
from marid.execute.compiled.workers import compiler
from marid.frontend.engines import assign, local_engine
from marid.frontend.materialize import forget_loops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--worker", action="store_true", help="remote_accelerator:0 and :1 are worker processes")
    parser.addoption(
        "--captured", action="store_true", help="the device captures, played by the CPU; here or (--worker) there"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background, and for all that tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "conformance: takes long; runs only with -m conformance")
    config.addinivalue_line(
        "markers", "in_process(reason): is about the processor as the engine; not with --worker or --captured"
    )
    config.addinivalue_line("markers", "mispredicts: makes results that are not what was recorded, on purpose")
    if config.getoption("--worker") and (hasattr(config, "workerinput") or not config.getoption("numprocesses", 0)):
        captured = ["tests.simulated_graphs"] if config.getoption("--captured") else []
        marid.connect(workers=2, imports=["tests.operators", *captured])
    elif config.getoption("--captured"):
        from tests.simulated_graphs import Apart

        assign((index, Apart.engine()) for index in range(2))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--worker") or config.getoption("--captured"):
        for item in items:
            for mark in item.iter_markers("in_process"):
                item.add_marker(pytest.mark.skip(reason=mark.args[0]))
    if "conformance" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="takes long; run it with -m conformance")
    for item in items:
        if item.get_closest_marker("conformance"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts with seeded generators, counters at zero and no loop in progress, and leaves the global defaults
    as they were. A result that is not what was recorded is a failure, though it reaches nobody."""
    torch.manual_seed(0)
    marid.reset_stats()
    forget_loops()
    marid.settings.verify_passes = True
    yield
    mispredictions = marid.stats().mispredictions
    torch.set_default_device(None)
    torch.remote_accelerator.set_device(0)  # pyright: ignore[reportAttributeAccessIssue]
    if request.node.get_closest_marker("mispredicts") is None:
        assert mispredictions == [], "results were not laid out as recorded"


@pytest.fixture
def nothing_alive() -> None:
    """Tensors that failed tests left in their tracebacks are gone as far as they can be: counts start from here."""
    gc.collect()


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything that runs three times is compiled; the cache is a folder of the test."""
    wanted = {"compile": True, "compile_after": 2, "compile_ms": 0, "immediate_bytes": 0, "cache_dir": tmp_path}
    kept = {name: getattr(marid.settings, name) for name in ("compile_niceness", "cache_bytes")}
    for name, value in (wanted | kept).items():
        monkeypatch.setattr(marid.settings, name, value)
    local_engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    yield tmp_path
    local_engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    compiler.close()


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns after nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations run at once from here on, whatever they make."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    torch.ones(2, device="remote_accelerator").sum().item()


@pytest.fixture(params=["recorded", "at once"])
def either_way(request: pytest.FixtureRequest) -> None:
    """Operations are recorded, or run at once whatever they make."""
    if request.param == "at once":
        request.getfixturevalue("at_once")
