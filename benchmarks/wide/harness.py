"""Starts a process for each workload, so that none warms another, and gathers what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import marid
from benchmarks.suite.process import cold_caches, environment
from benchmarks.wide.checks import Comparison, Wrong
from benchmarks.wide.worker import Options
from benchmarks.wide.workloads import Workload

__all__ = ["Plan", "run"]

_ROOT = Path(__file__).parents[2]
_ENGINE = Path(marid.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Plan:
    """How to measure: turns, what is compiled or replayed, whether first seconds of a process count, on what, and whom
    to tell."""

    turns: int = 40
    warmup: int = 30
    warmup_seconds: float = 3.0
    compiled: bool = True
    cold: bool = False
    threads: int = 0
    timeout: float = 600.0
    on: str = "cpu"
    replayed: bool = False
    say: Callable[[str], None] = lambda _text: None


def run(workloads: Sequence[Workload], plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each workload: ``status`` is ``"ok"``, ``"wrong"`` or ``"failed"``, and only the first has figures."""
    for workload in workloads:
        plan.say(workload.name)
        row = _cold_row(workload, plan) if plan.cold else _ask(_options(workload, plan), plan, None)
        yield {"workload": workload.name, "title": workload.title, **row}


def _options(workload: Workload, plan: Plan) -> Options:
    return Options(
        workload.name, plan.turns, plan.warmup, plan.warmup_seconds, plan.threads, on=plan.on, replayed=plan.replayed
    )


def _ask(options: Options, plan: Plan, caches: Path | None) -> dict[str, Any]:
    """The answer of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.wide.worker", json.dumps(asdict(options))]
    with tempfile.TemporaryFile() as errors:  # not a pipe: a compiler's process may hold it open for longer
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(plan, caches),
                cwd=_ROOT,
                timeout=plan.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "message": f"no answer within {plan.timeout:.0f} s"}
        if done.returncode or not done.stdout:
            errors.seek(0)
            last = " / ".join(errors.read().decode(errors="replace").strip().splitlines()[-3:])
            return {"status": "failed", "message": f"the process ended with status {done.returncode}: {last}"}
    return json.loads(done.stdout)


def _environment(plan: Plan, caches: Path | None) -> dict[str, str]:
    """That of this process, but with Marid's settings at their defaults."""
    env = environment(plan.threads, caches)
    for name in [
        name for name in env if name.startswith("MARID_") and name not in ("MARID_CACHE_DIR", "MARID_AUTOLOAD")
    ]:
        del env[name]
    env["MARID_ENGINE"] = plan.on
    env["MARID_COMPILE"] = "1" if plan.compiled else "0"
    env["PYTHONPATH"] = os.pathsep.join(map(str, (_ENGINE, _ROOT)))
    return env


def _cold_row(workload: Workload, plan: Plan) -> dict[str, Any]:
    """The first seconds of a process for each device, one after the other, both with empty caches."""
    answers, outputs = {}, {}
    for device in ("cpu", "remote_accelerator"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outputs.pt"
            options = replace(_options(workload, plan), cold=device, outputs=str(file))
            answers[device] = answer = _ask(options, plan, cold_caches(Path(folder) / "caches"))
            if answer["status"] != "ok":
                return answer
            outputs[device] = torch.load(file, weights_only=True)
    eager, lazy = answers["cpu"], answers["remote_accelerator"]
    comparison = Comparison(workload.tolerance)
    try:
        for expected, mine in zip(outputs["cpu"], outputs["remote_accelerator"], strict=False):
            comparison.turn(expected, mine)
        if not lazy["a_turn"]["compiled_runs"]:
            comparison.demand_equal_bits()
    except Wrong as error:
        return {"status": "wrong", "message": str(error)}
    return {
        "status": "ok",
        "eager_ms": eager["ms"],
        "marid_ms": lazy["ms"],
        "ratio": lazy["ms"] / eager["ms"],
        "processor_ratio": lazy["processor_ms"] / eager["processor_ms"],
        "turns": lazy["turns"],
        "eager_turns": eager["turns"],
        "output": comparison.words,
        "a_turn": lazy["a_turn"],
    }
