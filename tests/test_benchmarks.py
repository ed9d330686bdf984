"""The benchmarks run, and check what they measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_capture_benchmark(tmp_path: Path) -> None:
    """It prints a table for people and writes the same for machines."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "capture.py"), "--rounds", "1", "--nodes", "1000"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "recording an operation" in done.stdout
    seen = json.loads(figures.read_text())
    assert {row["operation"] for row in seen["recording"]} >= {"tanh", "neg"}
    assert all(row["ratio"] > 0 for row in seen["recording"])
    assert abs(seen["replay"]["cut_bind_and_replay_above_aten_us"]) < 1000  # less than nothing where it is faster
    assert [row["nodes"] for row in seen["linearity"]] == [10, 100, 1000]
