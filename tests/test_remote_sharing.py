"""Sessions of one worker: brief work goes first while a long program of another session runs, and both are right."""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import marid
from marid.remote.launch.local import LocalWorker
from marid.remote.launch.openmp import openmp_settings
from marid.remote.wire.endpoints import make_client
from tests.helpers import DEVICE
from tests.remote_helpers import worker_process

HERE = 5
"""The device that is the worker in this process, where other tests' tensors are on others."""

PREFILL = f"""
import sys, torch, marid
marid.connect(sys.argv[1], key=sys.argv[2] if len(sys.argv) > 2 else None)
torch.manual_seed(0)
torch.set_grad_enabled(False)
weights = [torch.randn(512, 512) / 23 for _ in range(60)]
x = torch.randn(512, 512)

def forward(x, weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x

weights[0] @ weights[0]  # MKL's first product of a process now and then has other bits (docs/decisions.md)
expected = forward(x, weights)
weights, x = [weight.to("{DEVICE}") for weight in weights], x.to("{DEVICE}")
(weights[0] @ weights[0]).cpu()
print("ready", flush=True)
runs = 0
while True:
    result = forward(x, weights).cpu()
    assert torch.equal(result, expected), (result - expected).abs().max()
    runs += 1
    if runs == 2:
        print("running", flush=True)
    if runs % 10 == 0:
        print(runs, flush=True)
"""


@contextlib.contextmanager
def _prefilling(worker: LocalWorker, *key: str) -> Iterator[subprocess.Popen[str]]:
    """Another client, which runs one long program after the other, and compares what it gets."""
    command = [sys.executable, "-c", PREFILL, worker.address, *key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for expected in ("ready", "running"):
            line = process.stdout.readline().strip()
            assert line == expected, (line, process.stderr.read() if process.stderr is not None else "")
        yield process
        assert process.poll() is None, process.communicate()
    finally:
        process.kill()
        process.communicate()


def _decoding() -> Callable[[], None]:
    """A step such as a token's: what it gives depends on all steps before it."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    there = copy.deepcopy(layers).to(f"{DEVICE}:{HERE}")
    expected = torch.randn(1, 256)
    state = expected.to(f"{DEVICE}:{HERE}")

    def step() -> None:
        nonlocal state, expected
        with torch.no_grad():
            state, expected = torch.tanh(there(state)), torch.tanh(layers(expected))
            assert torch.equal(state.cpu(), expected)

    return step


def _median(step: Callable[[], None], count: int) -> float:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
        time.sleep(0.005)  # a reader of tokens
    return statistics.median(taken)


def _beside_a_prompt(*options: str) -> tuple[float, int]:
    """Seconds of a step beside another client's programs, and how many messages went first."""
    with worker_process(*options) as worker:
        marid.connect(worker.address, first=HERE)
        try:
            step = _decoding()
            _median(step, 10)
            with _prefilling(worker):
                found = _median(step, 40)
            remote = marid.stats().remote
            assert remote is not None
            return found, remote.workers[HERE]["went_first"]
        finally:
            marid.disconnect(HERE, force=True)


def test_brief_work_goes_first() -> None:
    """A token does not wait for a whole prompt of somebody else, which is right all the same. Sessions take turns where
    memory is limited."""
    first, went_first = _beside_a_prompt()
    in_turn, none = _beside_a_prompt("--memory-limit", "2g")
    assert went_first >= 10
    assert none == 0
    assert first < in_turn  # a tenth of it on an idle machine


def test_long_work_has_a_low_priority(tmp_path: Path) -> None:
    """Behind keys too, where each owner has a process: the one with the prompts hears that others are brief."""
    keys = tmp_path / "keys"
    for name in ("ann", "bob"):
        make_client(keys, name)
    with worker_process("--keys", str(keys)) as worker:
        marid.connect(worker.address, key=keys / "ann.json", first=HERE)
        try:
            step = _decoding()
            _median(step, 10)
            with _prefilling(worker, str(keys / "bob.json")):
                _median(step, 20)
                policies = _policies(_descendants(worker.process.pid))
            assert set(policies) == {os.SCHED_OTHER, os.SCHED_IDLE}
        finally:
            marid.disconnect(HERE, force=True)


def _descendants(pid: int) -> list[int]:
    children = [
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in _descendants(child))]


def _policies(pids: list[int]) -> list[int]:
    """How each thread is scheduled."""
    return [os.sched_getscheduler(int(task.name)) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]


OTHERS_SETTINGS = f"""
import sys, torch, marid
marid.connect(sys.argv[1])
torch.set_float32_matmul_precision("medium")
torch.manual_seed(0)
weights = [torch.randn(512, 512) / 23 for _ in range(40)]
x = torch.randn(512, 512)

def forward(x, weights):
    for weight in weights:
        x = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.1)
    return x

weights[0] @ weights[0]
torch.manual_seed(1)
expected = [forward(x, weights) for _ in range(30)]
weights, x = [weight.to("{DEVICE}") for weight in weights], x.to("{DEVICE}")
(weights[0] @ weights[0]).cpu()
torch.manual_seed(1)
print("ready", flush=True)
for run, one in enumerate(expected):
    assert torch.equal(forward(x, weights).cpu(), one), run
    if run == 2:
        print("running", flush=True)
print("equal", flush=True)
"""


def test_settings_and_random_numbers_are_those_of_the_session() -> None:
    """While a program with other settings runs in the background, and draws, too."""
    with worker_process() as worker:
        marid.connect(worker.address, first=HERE)
        try:
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.5), torch.nn.Linear(256, 256))
            there = copy.deepcopy(model).to(f"{DEVICE}:{HERE}")
            x = torch.randn(8, 256)
            for _ in range(10):
                there(x.to(f"{DEVICE}:{HERE}")).cpu()
            command = [sys.executable, "-c", OTHERS_SETTINGS, worker.address]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            while other.stdout.readline().strip() != "running":
                assert other.poll() is None
            steps = 0
            while other.poll() is None:
                torch.manual_seed(steps)
                expected = model(x)
                torch.manual_seed(steps)
                assert torch.equal(there(x.to(f"{DEVICE}:{HERE}")).cpu(), expected)
                steps += 1
            assert other.stdout.read().strip() == "equal"
            assert steps > 10
            other.stdout.close()
            remote = marid.stats().remote
            assert remote is not None
            assert remote.workers[HERE]["went_first"] > 0
        finally:
            marid.disconnect(HERE, force=True)


def test_a_worker_begins_with_settings_of_openmp() -> None:
    """Unless its user has chosen: they are read once, so it has to begin again."""
    assert openmp_settings({"OMP_WAIT_POLICY": "PASSIVE"}) == {}
    without = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-m", "marid", "worker", "--bind", "127.0.0.1:0", "--until-eof"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=without, text=True) as worker:
        assert worker.stdout is not None
        assert "marid worker on cpu" in worker.stdout.readline()
        found = Path(f"/proc/{worker.pid}/environ").read_text().split("\0")
        assert {f"{name}={value}" for name, value in openmp_settings(without).items()} <= set(found)
        assert "OMP_WAIT_POLICY=ACTIVE" in found


@pytest.mark.conformance  # when a signal comes is a matter of load
def test_a_program_that_others_go_before_can_be_stopped() -> None:
    """Ctrl-C of its client ends it, and what went first meanwhile is right."""
    script = textwrap.dedent(f"""
        import signal, sys, threading, time, torch, marid
        marid.connect(sys.argv[1])
        x = torch.randn(512, 512, device="{DEVICE}") / 23
        (x @ x).cpu()  # MKL's first product of a process now and then has other bits (docs/decisions.md)
        def run(count):
            y = x
            for _ in range(count):
                y = torch.tanh(y @ x)
            return y
        print(run(50).sum().item(), flush=True)
        y = run(4000)
        threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
        try:
            y.cpu()
            print("was not stopped", flush=True)
        except KeyboardInterrupt:
            print("stopped", flush=True)
        print(run(50).sum().item(), flush=True)
    """)
    with worker_process() as worker:
        marid.connect(worker.address, first=HERE)
        try:
            step = _decoding()
            command = [sys.executable, "-c", script, worker.address]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            before = other.stdout.readline()
            while other.poll() is None:
                step()
            stopped, after = other.stdout.read().splitlines()
            assert stopped == "stopped"
            assert after == before.strip()
            other.stdout.close()
        finally:
            marid.disconnect(HERE, force=True)
