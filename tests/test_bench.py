"""``python -m benchmarks.suite``: its statistics, its checks, and that no time is ever shown for a wrong output."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.suite import process, tables
from benchmarks.suite.__main__ import suite
from benchmarks.suite.checks import Wrong, compare_arrays, compare_sequences
from benchmarks.suite.command import Bench
from benchmarks.suite.harness import Plan, run
from benchmarks.suite.process import Contestant, Failure, environment
from benchmarks.suite.results import Report, Row, paired_ratio, spread
from benchmarks.suite.workloads import WORKLOADS, Tolerance, Workload

EXACT = Tolerance(0, 0)

# A contestant that needs no framework; what it does depends on its name.
FAKE = """
import os, sys, time

def prepare(lab):
    if lab.peer == "absent":
        import a_framework_that_is_not_there

def build(lab):
    calls = 0
    print("chatter on stdout")

    def call():
        nonlocal calls
        calls += 1
        value = 1.0 / calls
        if lab.peer == "raises" and calls == 4:
            raise ValueError("no more")
        if lab.peer == "dies" and calls == 4:
            sys.stderr.write("last words")
            sys.stderr.flush()
            os._exit(9)
        if lab.peer == "hangs" and calls == 4:
            time.sleep(60)
        if lab.peer == "wrong late" and calls == 9:
            value += 1e-3
        if lab.peer == "rounded":
            value *= 1 + 1e-7
        if lab.peer == "marid, inexact":
            value *= 1 + 1e-7
            lab.facts["flat"] = True
        if lab.peer == "nan":
            value = float("nan")
        if lab.peer == "silent":
            value = None
        time.sleep(0.02 if lab.peer == "slow" else 0.01)
        if lab.options["arrays"]:
            import numpy
            return numpy.full((2, 3), 5.0 + (lab.peer == "wrong late"), dtype="float32")
        return value

    return call
"""


def workload(folder: Path, peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Workload:
    """The fake contestant, with the real worker."""
    here = Path(process.__file__).parent
    (folder / "contestants").mkdir()
    (folder / "contestants" / "fake.py").write_text(FAKE)
    (folder / "worker.py").symlink_to(here / "worker.py")
    monkeypatch.setattr(process, "_HERE", folder)
    options = {"arrays": changes.pop("arrays", False)}
    settings: dict[str, Any] = {"unit": "ms", "scale": 1e3, "calls": 3, "warmup": 2, "rounds": 3, **changes}
    return Workload("fake", "a fake", "fake", options, peers, **settings)


def by_peer(rows: list[Row]) -> dict[str, Row]:
    return {row.peer: row for row in rows}


# --- statistics ------------------------------------------------------------------------------------------------------


def test_ratios_are_formed_within_rounds() -> None:
    """A machine that becomes ten times slower half-way changes both, and not the ratio."""
    reference = [[1.0, 1.1, 0.9], [1.0], [10.0, 10.0], [10.0]]
    mine = [[0.5, 0.5, 0.5], [0.5], [5.0, 50.0, 5.0], [5.0]]
    assert paired_ratio(mine, reference) == 0.5
    assert paired_ratio([], reference) is None
    assert paired_ratio([[1.0]], [[]]) is None
    assert paired_ratio([[1.0]], [[0.0]]) is None


def test_spread() -> None:
    assert spread([1.0, 2.0, 3.0]) is None
    assert spread([2.0] * 10) == 0
    assert spread([1.0, 1.0, 2.0, 3.0, 3.0]) == 1.0


def test_a_row_is_summarised_from_its_samples() -> None:
    reference = Row("w", "", "ms", 1e3, "eager", samples=[[2.0, 4.0], [2.0]])
    row = Row("w", "", "ms", 1e3, "marid", samples=[[1.0, 1.0], [1.0, 8.0]])
    reference.summarise(reference)
    row.summarise(reference)
    assert (reference.median, reference.ratio, reference.count) == (2.0, 1.0, 3)
    assert (row.median, row.count) == (1.0, 4)
    assert row.ratio == pytest.approx((1 / 3 + 4.5 / 2) / 2)


def test_a_refused_row_keeps_no_figure() -> None:
    row = Row("w", "", "ms", 1e3, "marid", samples=[[1.0]], first=2.0, peak_bytes=3)
    row.summarise(row)
    row.refuse("wrong", "because")
    row.summarise(row)
    assert (row.samples, row.median, row.ratio, row.spread, row.first, row.peak_bytes) == (
        [],
        None,
        None,
        None,
        None,
        None,
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def test_sequences_within_tolerance() -> None:
    assert compare_sequences([1.0, [2, 3]], [1.0, [2, 3]], EXACT) == "bitwise"
    assert compare_sequences([math.nan, math.inf], [math.nan, math.inf], EXACT) == "bitwise"
    assert compare_sequences([1.0 + 1e-6], [1.0], Tolerance(1e-4)).startswith("within ")
    assert compare_sequences([1.0, 1.05], [1.0, 1.0], Tolerance(1e-4, 0.1, strict=1)).startswith("within ")


@pytest.mark.parametrize(
    ("outputs", "reference", "tolerance"),
    [
        ([1.0, 1.05], [1.0, 1.0], Tolerance(1e-4, 0.1, strict=2)),
        ([1.0, 1.5], [1.0, 1.0], Tolerance(1e-4, 0.1, strict=1)),
        ([math.nan], [1.0], Tolerance(1e6, 1e6)),
        ([1.0], [math.nan], Tolerance(1e6, 1e6)),
        ([math.inf], [1.0], Tolerance(1e6, 1e6)),
        ([[1, 2]], [[1, 2, 3]], EXACT),
        ([[1, 2, 4]], [[1, 2, 3]], EXACT),
        ([None], [1.0], EXACT),
        ([None], [None], EXACT),
        ([[]], [[]], EXACT),
        ([], [], EXACT),
        ([], [1.0], EXACT),
    ],
)
def test_wrong_sequences(outputs: list[Any], reference: list[Any], tolerance: Tolerance) -> None:
    with pytest.raises(Wrong):
        compare_sequences(outputs, reference, tolerance)


def test_arrays() -> None:
    a = np.array([1.0, math.nan, math.inf, 0.0], dtype=np.float32)
    assert compare_arrays(a.copy(), a, EXACT) == "bitwise"
    assert compare_arrays(a + np.float32(1e-6), a, Tolerance(1e-4)).startswith("within ")
    for bad in (
        a[:2],
        a.astype(np.float64),
        a + np.float32(0.1),
        np.nan_to_num(a),
        np.where(np.isinf(a), np.float32(1), a),
        np.where(a == 0, np.float32(math.nan), a),
    ):
        with pytest.raises(Wrong):
            compare_arrays(bad, a, Tolerance(1e-4))
    with pytest.raises(Wrong):
        compare_arrays(a[:0], a[:0], EXACT)


# --- contestants -----------------------------------------------------------------------------------------------------


def test_each_way_to_end_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = ("slow", "eager", "absent", "raises", "dies", "hangs", "wrong late", "rounded", "nan", "silent")
    entered = workload(tmp_path, (*peers, "marid, inexact", "unwanted"), monkeypatch)
    said: list[str] = []
    plan = Plan(timeout=3, left_out=lambda peer: "not now" if peer == "unwanted" else None, say=said.append)
    rows = run(entered, plan)
    found = by_peer(rows)
    assert rows[0].peer == "eager"
    assert {peer: row.status for peer, row in found.items()} == {
        "eager": "ok",
        "slow": "ok",
        "absent": "missing",
        "raises": "failed",
        "dies": "failed",
        "hangs": "failed",
        "wrong late": "wrong",
        "rounded": "ok",
        "nan": "wrong",
        "silent": "failed",
        "marid, inexact": "wrong",
        "unwanted": "left out",
    }
    assert "a_framework_that_is_not_there" in found["absent"].message
    assert "ValueError: no more" in found["raises"].message
    assert "status 9" in found["dies"].message
    assert "last words" in found["dies"].message
    assert "no answer within 3 s" in found["hangs"].message
    assert "call 9" in found["wrong late"].message
    assert "bit for bit" in found["marid, inexact"].message
    for row in rows:
        if row.status == "ok":
            assert [len(samples) for samples in row.samples] == [3, 3, 3]
            assert row.median is not None
            assert row.median >= 0.01
            assert row.peak_bytes is not None
        else:
            assert (row.samples, row.median, row.ratio, row.first) == ([], None, None, None)
    assert found["eager"].ratio == 1
    assert found["slow"].ratio is not None
    assert found["slow"].ratio > 1.2
    assert (found["eager"].agreement, found["rounded"].agreement) == ("bitwise", "within 9e-08")
    turns = [text for text in said if "round" in text]
    assert [turns.index(f"fake: eager, round {n}") > turns.index(f"fake: slow, round {n}") for n in (1, 2)] == [
        False,
        True,
    ]


def test_arrays_are_compared_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_peer(run(workload(tmp_path, ("eager", "slow", "wrong late"), monkeypatch, arrays=True), Plan()))
    assert {peer: row.status for peer, row in found.items()} == {"eager": "ok", "slow": "ok", "wrong late": "wrong"}
    assert "6 of 6 elements are wrong" in found["wrong late"].message


def test_without_a_reference_nothing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = workload(tmp_path, ("raises", "slow"), monkeypatch, reference="raises")
    found = by_peer(run(entered, Plan()))
    assert found["slow"].status == "failed"
    assert "nothing to compare with" in found["slow"].message
    assert found["slow"].samples == []


@pytest.mark.parametrize("kind", ["start", "passes", "memory"])
def test_fresh_processes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = ("eager", "slow", "wrong late", "raises", "absent")
    entered = workload(tmp_path, peers, monkeypatch, kind=kind, calls=12, steps=(1, 5, 12), rounds=2)
    rows = run(entered, Plan())
    good = [row for row in rows if row.status == "ok"]
    bad = [row for row in rows if row.status != "ok"]
    assert {row.peer for row in good} == (
        {"eager", "slow, cold cache", "slow, warm cache"} if kind == "start" else {"eager", "slow"}
    )
    assert {row.status for row in bad} == {"wrong", "failed", "missing"}
    assert all(row.samples == [] and row.median is None for row in bad)
    assert all(len(row.samples) == 2 for row in good)
    metrics = list(dict.fromkeys(row.metric for row in good))
    assert (
        metrics
        == {
            "start": ["to step 1", "to step 5", "to step 12", "median step", "slowest step but the first"],
            "passes": ["all passes", "last pass"],
            "memory": ["peak of the process", "above the imports", "tensors alive at once"],
        }[kind]
    )
    if kind == "start":
        mine = {row.metric: row.median for row in good if row.peer == "slow, cold cache"}
        assert mine["to step 1"] < mine["to step 5"] < mine["to step 12"]
        assert 0.02 <= mine["median step"] <= mine["slowest step but the first"] < mine["to step 1"]
    elif kind == "passes":
        mine = {row.metric: row.median for row in good if row.peer == "slow"}
        assert mine["last pass"] >= 0.02  # it sleeps so long
        assert mine["all passes"] >= 12 * 0.02
    else:
        mine = {row.metric: row.median for row in good if row.peer == "slow"}
        assert mine["peak of the process"] > mine["above the imports"] >= 0
        assert mine["peak of the process"] > 5e6


def test_contestants_leave_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = workload(tmp_path, ("hangs",), monkeypatch)
    with Contestant(entered, "hangs", environment(0), 0, timeout=20) as contestant:
        contestant.build()
        contestant.run(2)
        number = contestant._process.pid
        os.kill(number, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    with Contestant(entered, "hangs", environment(0), 0, timeout=20) as contestant:
        contestant.build()
        os.kill(contestant._process.pid, signal.SIGKILL)
        with pytest.raises(Failure, match="the process ended"):
            contestant.run(2)
    with Contestant(entered, "hangs", environment(0), 0, timeout=1) as contestant:
        contestant.build()
        started = time.monotonic()
        with pytest.raises(Failure, match="no answer"):
            contestant.run(5)
        assert time.monotonic() - started < 10
        assert contestant._process.wait(10) != 0  # killed: it must not go on beside the others


def test_eager_peers_run_without_marid() -> None:
    """The device that an installed Marid is known by is not there either."""
    (mlp,) = [w.sized(True) for w in WORKLOADS if w.name == "mlp"]
    with Contestant(mlp, "eager", environment(0), 0, timeout=120) as contestant:
        contestant.build()
        contestant.run(1)
        assert contestant.finish()["facts"] == {}
    script = Path(process.__file__).parent / "worker.py"
    code = (
        f"import sys; sys.argv = ['worker']; sys.path.insert(0, {str(script.parent)!r}); import worker; "
        f"module = worker._load(worker.Path({str(script.parent / 'contestants' / 'gpt.py')!r})); "
        "module.prepare(worker.Lab('eager', {})); sys.exit('marid' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(0), timeout=120, check=False).returncode == 0


def test_environment_of_contestants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    env = environment(3, tmp_path)
    assert "TORCH_COMPILE_DISABLE" not in env
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["MARID_CACHE_DIR"].startswith(str(tmp_path))
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


# --- reports ---------------------------------------------------------------------------------------------------------


def a_report() -> Report:
    row = Row("w", "", "ms", 1e3, "eager", samples=[[0.1, 0.2], [0.3]], first=1.5, peak_bytes=7, agreement="bitwise")
    row.summarise(row)
    bad = Row("w", "", "ms", 1e3, "marid", facts={"x": math.inf})
    bad.refuse("wrong", "call 1 returned | 2\nnot 3")
    versions = {"torch": "2"}
    return Report(
        {"cores": 2, "processor": "cpu"}, versions, {"quick": True}, {"w": "a title"}, "today", 3.0, [row, bad]
    )


def test_json_has_all_that_the_figures_were_made_from(tmp_path: Path) -> None:
    report = a_report()
    report.write(tmp_path / "figures.json")
    data = json.loads((tmp_path / "figures.json").read_text())
    assert data["schema"] == 1
    assert set(data) == {"schema", "machine", "versions", "options", "workloads", "started", "seconds", "rows"}
    row = data["rows"][0]
    assert set(row) == {
        *("workload", "metric", "unit", "scale", "peer", "status", "message", "samples", "median", "ratio", "spread"),
        *("first", "peak_bytes", "agreement", "facts"),
    }
    assert sorted(sample for samples in row["samples"] for sample in samples)[1] == row["median"] == 0.2
    assert data["rows"][1]["facts"] == {"x": "inf"}  # JSON has no infinity
    again = Report.read(tmp_path / "figures.json")
    assert (again.rows[0], again.machine, again.failed) == (report.rows[0], report.machine, True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{}]}'])
def test_files_that_are_no_report(text: str, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read as figures"):
        Report.read(tmp_path / "figures.json")


@pytest.mark.parametrize(
    ("peer", "status", "failed"),
    [
        ("JAX", "ok", False),
        ("JAX", "missing", False),
        ("JAX", "failed", False),
        ("JAX", "wrong", True),
        ("marid", "failed", True),
        ("marid.compile", "missing", False),
        ("eager", "failed", True),
        ("torch.compile", "left out", False),
    ],
)
def test_what_makes_a_run_fail(peer: str, status: str, failed: bool) -> None:
    report = Report({}, {}, {}, {}, "", rows=[Row("w", "", "ms", 1, peer, status=status)])
    assert report.failed is failed


def test_tables_show_no_figure_where_there_is_none() -> None:
    text = tables.markdown(a_report())
    assert "### w: a title; ms" in text
    assert "| eager | 200 | 1.00 | 3 |" in text
    assert "| marid | wrong |  |  |  |  |  | call 1 returned \\| 2 not 3 |" in text
    assert "quick sizes: no figures to quote" in text


def test_workloads_are_well_formed() -> None:
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)
    for entry in WORKLOADS:
        assert entry.reference in entry.peers
        assert any(peer.startswith("marid") for peer in entry.peers)
        assert (Path(process.__file__).parent / "contestants" / f"{entry.contestant}.py").is_file()
        small = entry.sized(True)
        assert set(small.options) == set(entry.options)
        assert small.rounds <= entry.rounds


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    """Two tiny workloads, from the command line to the files."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.suite",
        "--quick",
        "--only",
        "tiny",
        "--only",
        "mlp",
        "--peers",
        "marid",
    ]
    files = [tmp_path / "figures.json", tmp_path / "figures.md"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--threads", "1", "--json", str(files[0]), "--markdown", str(files[1])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(files[0])
    assert list(report.workloads) == ["tiny", "mlp"]
    for name in report.workloads:
        found = by_peer([row for row in report.rows if row.workload == name])
        assert (found["eager"].status, found["marid"].status) == ("ok", "ok")
        assert found["marid"].agreement == "bitwise"
        assert found["marid"].facts["marid"]["programs_reused"] > 0
        assert "<unknown>" not in str(found["marid"].facts["marid"]["recompiles"])  # contestants are user code
        assert len(found["marid"].samples) == 2
        assert found["JAX"].status == "left out"
    assert "marid" in done.stdout
    assert "no figures to quote" in done.stdout
    assert "| marid |" in files[1].read_text()


def test_the_list_and_wrong_names() -> None:
    listed = CliRunner().invoke(suite, ["--list"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == [w.name for w in WORKLOADS]
    wrong = CliRunner().invoke(suite, ["--only", "nothing"])
    assert wrong.exit_code == 2
    assert "nothing" in wrong.output


def test_a_wrong_output_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entered = workload(tmp_path, ("eager", "marid, inexact"), monkeypatch)
    assert Bench(json=tmp_path / "figures.json").run([entered]) == 1
    out = capsys.readouterr().out
    assert "wrong" in out
    (row,) = [line for line in out.splitlines() if line.startswith("marid, inexact")]
    assert "ms" not in row.replace("marid, inexact", "")
    data = json.loads((tmp_path / "figures.json").read_text())
    assert [row["samples"] for row in data["rows"] if row["peer"] != "eager"] == [[]]
