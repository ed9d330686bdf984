"""``marid.trace``: the file that Perfetto and TensorBoard open."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid.execute.compiled.workers import Compiler, Job
from marid.report.operator_times import operator_times
from tests.helpers import DEVICE
from tests.remote_helpers import connected

pytestmark = pytest.mark.in_process("what runs in this process has lanes of its own")
_NUMBER = (int, float)
# What the trace event format wants of events of each phase: names and types of their fields.
_FIELDS: dict[str, dict[str, Any]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": _NUMBER, "dur": _NUMBER, "args": dict},
}
_CLOCK = 0.002  # microseconds that rounding may take or give


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, after a check of everything that a viewer relies on."""
    found = json.loads(path.read_text())
    assert set(found) == {"schemaVersion", "displayTimeUnit", "traceEvents"}
    lanes: dict[int, list[tuple[float, float]]] = {}
    named: set[int] = set()
    for event in found["traceEvents"]:
        fields = _FIELDS[event["ph"]]
        assert set(event) == {"ph", *fields}, event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        if event["ph"] == "M":
            named.add(event["tid"])
            continue
        assert event["ts"] >= 0, event
        assert event["tid"] in named
        lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        stack: list[float] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= began + _CLOCK:
                stack.pop()
            assert not stack or ended <= stack[-1] + _CLOCK, "slices of one lane lie across each other"
            stack.append(ended)
    return found["traceEvents"]


def lane(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The slices and spans in the lane of this name."""
    (number,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name]
    return [event for event in events if event["tid"] == number and event["ph"] != "M"]


def test_programs_and_operators_with_module_and_line(tmp_path: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE)
    marid.materialize(x, *layer.parameters())
    file = tmp_path / "trace.json"
    with marid.trace(file):
        for _ in range(3):
            layer(x).sum().backward()
            layer[0].weight.grad.sum().item()
    layer(x).sum().item()
    events = read(file)
    operators = [e for e in lane(events, "running") if e["cat"] == "cpu_op"]
    linear = [e for e in operators if e["name"] == "aten::addmm"]
    assert len(linear) == 3
    assert {(e["args"]["module"], e["args"]["phase"]) for e in linear} == {("0", "forward")}
    assert all(e["args"]["source"].startswith(f"{__file__}:") for e in linear)
    assert any(e["args"]["phase"] == "backward" for e in operators)
    programs = [e for e in lane(events, "running") if e["cat"] == "user_annotation"]
    assert sum(e["args"]["operators"] for e in programs) == len(operators)
    in_order = sorted(operators, key=lambda e: e["ts"])
    # TensorBoard's profiler leaves out what seems to begin within another operator and to end behind it.
    assert all(one["ts"] + one["dur"] < other["ts"] for one, other in itertools.pairwise(in_order))
    recording = lane(events, "recording")
    assert {e["name"] for e in recording} == {"recording", "wait: item()"}
    assert not operator_times.wanted


def test_what_runs_ahead_waits_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marid.frontend.materialize.may_go_ahead", lambda: True)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    w = torch.ones(64, 64, device=DEVICE)
    file = tmp_path / "trace.json"
    with marid.trace(file):
        for _ in range(8):
            x = w
            for _ in range(100):
                x = (x @ w).mul(1 / 64)
            x.sum().item()
    events = read(file)
    queued = lane(events, "queue")
    assert queued
    assert all(e["name"].startswith("program: ") for e in queued)
    assert len([e for e in lane(events, "running") if e["name"] == "aten::mm"]) == 800


def test_what_is_compiled_has_a_lane(tmp_path: Path) -> None:
    """From when it was asked for to the answer; one lies across another."""
    file = tmp_path / "trace.json"
    compiler = Compiler()
    with marid.trace(file):
        for number in (1, 2):
            request = {"structure": {"part": {"instructions": [{}] * 3}}}
            compiler.jobs.append(Job(request, number=number))
        for answer in ({"id": 1, "error": "no"}, {"id": 2, "path": "there", "conditions": []}):
            assert compiler._take(json.dumps(answer).encode())
    events = read(file)
    (first,), (second,) = lane(events, "compiling"), lane(events, "compiling 2")
    assert first["args"] == {"operators": 3, "succeeded": False}
    assert second["args"] == {"operators": 3, "succeeded": True}
    assert first["ts"] < second["ts"] < first["ts"] + first["dur"]


def test_each_worker_has_a_lane(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with connected(6, 7), marid.trace(file):
        for index in (6, 7):
            torch.ones(3, device=f"{DEVICE}:{index}").mul(2).sum().item()
    events = read(file)
    for index in (6, 7):
        programs = lane(events, f"worker {index}")
        assert sum(program["args"]["operators"] for program in programs) == 3


def test_starting_and_stopping(tmp_path: Path) -> None:
    trace = marid.trace(tmp_path / "trace.json")
    with pytest.raises(RuntimeError, match="has not begun"):
        trace.stop()
    trace.start()
    with pytest.raises(RuntimeError, match="has begun already"):
        trace.start()
    (torch.ones(3, device=DEVICE) + 1).sum().item()
    trace.stop()
    assert lane(read(tmp_path / "trace.json"), "running")
    trace.start()
    trace.stop()
    assert not lane(read(tmp_path / "trace.json"), "running")
    with pytest.raises(FileNotFoundError):
        marid.trace(tmp_path / "no" / "trace.json").start()
