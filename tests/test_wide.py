"""``python -m benchmarks.wide``: its programs do the same on both devices, and its figures are what they say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import marid
from benchmarks.suite.workloads import Tolerance
from benchmarks.wide import harness, table
from benchmarks.wide.__main__ import wide
from benchmarks.wide.checks import Comparison, Wrong, on_host
from benchmarks.wide.harness import Plan
from benchmarks.wide.overhead import overhead
from benchmarks.wide.worker import build
from benchmarks.wide.workloads import WORKLOADS, Workload


def _cases() -> list[Any]:
    # The stride of a complex `abs` of a large batch of one is recorded otherwise than it is computed, the first time.
    marks = {"whisper": [pytest.mark.mispredicts]}
    return [pytest.param(workload, id=workload.name, marks=marks.get(workload.name, [])) for workload in WORKLOADS]


@pytest.mark.parametrize("workload", _cases())
def test_both_devices_return_the_same(workload: Workload) -> None:
    """Two turns, the second of which works on what the first one left; nothing is compiled here."""
    programs = [build(workload, device) for device in ("cpu", "remote_accelerator")]
    torch.manual_seed(1)
    comparison = Comparison(Tolerance(0, 0))
    for _ in range(2):
        expected, outputs = (on_host(program.turn()) for program in programs)
        comparison.turn(expected, outputs)
    comparison.state(*(program.state() for program in programs))
    assert comparison.words == "bitwise"
    assert marid.stats().ops_captured  # the second program did run on the device


def test_names_are_unique_and_there_are_enough() -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(set(names)) == len(names) >= 24


def row(name: str, ratio: float, processor: float = 1.0, **changes: Any) -> dict[str, Any]:
    counts = {"operations": 1234.0, "reads": 1.0, "at_once": 0.0, "replays": 0.0, "fallbacks": 1.0, "dynamic": 2.0}
    figures = {"status": "ok", "eager_ms": 2.0, "marid_ms": 2.0 * ratio, "ratio": ratio, "processor_ratio": processor}
    return {"workload": name, **figures, "output": "bitwise", "a_turn": counts, **changes}


def test_the_summary_line() -> None:
    """The mean is geometric; what is at the limit is not slower; the worst is named."""
    rows = [row("a", 0.5, 2.0), row("b", 2.0, 2.0), row("c", 1.05), row("d", 1.06)]
    mean, processor = math.prod([0.5, 2.0, 1.05, 1.06]) ** 0.25, 4.0**0.25
    assert table.summary(rows) == (
        f"4 workloads: geometric mean {mean:.2f} of eager PyTorch (processor time {processor:.2f}); "
        "2 slower than 1.05; worst b 2.00"
    )


def test_what_has_no_figure_is_named_and_not_counted() -> None:
    wrong = {"workload": "b", "status": "wrong", "message": "turn 3: output 1 is off by 1.0e-01"}
    line = table.summary([row("a", 0.5), wrong])
    assert line.startswith("1 workloads: geometric mean 0.50 ")
    assert line.endswith("worst a 0.50; without a figure: b wrong")
    assert table.summary([wrong]) == "no figures; without a figure: b wrong"
    cells = table.markdown([row("a", 0.5), wrong], "conditions").splitlines()
    assert cells[2] == "| a | 2 | 1 | 0.50 | 1.00 | 1,234 | 1 | 0 | 0 | 3 | bitwise |"
    assert cells[3].startswith("| b | wrong |")
    assert "off by" in cells[3]


def test_differences_are_found() -> None:
    """In values, shapes, dtypes and numbers of outputs, also where a NaN came instead of a number."""
    one = torch.ones(3)
    for other in ([torch.ones(2)], [one.double()], [one * 1.1], [one * math.nan], [one, one], []):
        with pytest.raises(Wrong):
            Comparison(Tolerance()).turn([one], other)
    close = Comparison(Tolerance())
    close.turn([one, math.nan, torch.tensor([True])], [one * (1 + 1e-6), math.nan, torch.tensor([True])])
    assert close.words.startswith("within ")
    with pytest.raises(Wrong, match="nothing was compiled"):
        close.demand_equal_bits()


@pytest.mark.in_process("the processes it starts have their own device")
def test_the_command(tmp_path: Path) -> None:
    """One workload in a process of its own, on the terminal and in both files."""
    figures, page = tmp_path / "figures.json", tmp_path / "figures.md"
    options = ["--only", "clipping", "--quick", "--no-compile", "--json", str(figures), "--markdown", str(page)]
    done = CliRunner().invoke(wide, options)
    assert done.exit_code == 0, done.output
    assert "1 workloads: geometric mean" in done.output
    seen = json.loads(figures.read_text())
    (figure,) = seen["rows"]
    assert figure["output"] == "bitwise"
    assert figure["a_turn"]["operations"] > 100
    assert len(figure["samples"]["marid"]) == 3
    assert re.search(r"\| clipping \|", page.read_text())


@pytest.mark.in_process("the processes it starts have their own device")
def test_a_process_that_fails_or_hangs_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Workload("not there", "", WORKLOADS[0].build)
    (failed,) = harness.run([unknown], Plan(turns=1, warmup=1, warmup_seconds=0))
    assert failed["status"] == "failed"
    (late,) = harness.run([WORKLOADS[0]], Plan(timeout=0.2))
    assert late["message"] == "no answer within 0 s"
    monkeypatch.setattr(harness, "_ROOT", Path("/"))
    monkeypatch.setattr(harness, "_ENGINE", Path("/"))
    (lost,) = harness.run([WORKLOADS[0]], Plan())
    assert "the process ended with status 1" in lost["message"]


@pytest.mark.in_process("the process it starts has its own device")
def test_the_parts_of_an_operation(capfd: pytest.CaptureFixture[str]) -> None:
    """Recording, cutting, running and the kernel make up what an operation of Marid's takes."""
    done = CliRunner().invoke(overhead, ["--only", "maml", "--turns", "2"])
    assert done.exit_code == 0, done.output
    name, operations, _, whole, *parts = capfd.readouterr().out.split()
    assert name == "maml"
    assert int(operations.replace(",", "")) > 100
    assert float(whole) == pytest.approx(sum(map(float, parts)), abs=0.05)
