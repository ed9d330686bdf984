"""Differential fuzzing: random programs do on the lazy device exactly what they do on the CPU.

``MARID_FUZZ_PROGRAMS`` sets how many programs the conformance run takes (50,000 unless it is set).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import marid
from tests.fuzz.programs import PROFILES, Mismatch, Program, check, minimised, programs, script

pytestmark = [pytest.mark.filterwarnings("ignore")]

PROGRAMS = 2000
CONFORMANCE_PROGRAMS = int(os.environ.get("MARID_FUZZ_PROGRAMS", "50000"))
# Hypothesis remembers every program of a run and slows down as they grow, so that many are taken in batches.
BATCHES = -(-CONFORMANCE_PROGRAMS // (500 * len(PROFILES)))


def _fuzz(profile: str, count: int, runs: int = 2, explores: bool = False) -> None:
    """Check ``count`` programs: the same at each call, or others each time when it ``explores``."""
    ran = 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=not explores,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    )
    @given(programs(profile))
    def run(program: Program) -> None:
        nonlocal ran
        ran += 1
        check(program, runs=runs)

    gc.collect()
    gc.freeze()  # PyTorch's own objects are many, and collected for each leak that is shrunk
    try:
        run()
    except Mismatch as failure:
        smallest = minimised(failure)
        text = f"{smallest}\n\n{script(smallest.program, smallest.raising)}"
        raise AssertionError(text) from failure
    finally:
        gc.unfreeze()
    assert ran >= count


@pytest.mark.parametrize("profile", PROFILES)
def test_random_programs(profile: str) -> None:
    """Values, metadata, errors, gradients and aliasing are equal, and nothing is left behind."""
    _fuzz(profile, PROGRAMS // len(PROFILES))


@pytest.mark.in_process("operations run at once in this process alone")
@pytest.mark.parametrize("profile", PROFILES)
def test_random_programs_at_once(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of operations that run as they are written from the first read on."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    _fuzz(profile, PROGRAMS // 4 // len(PROFILES), runs=3)
    assert marid.stats().ops_immediate > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_random_programs_in_planned_memory(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, repeated until every program follows a memory plan, however small it is."""
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    _fuzz(profile, PROGRAMS // 10 // len(PROFILES), runs=7)


@pytest.mark.conformance
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("profile", PROFILES)
def test_many_random_programs(profile: str, batch: int) -> None:
    """The same over a number of programs that takes long."""
    _fuzz(profile, -(-CONFORMANCE_PROGRAMS // (BATCHES * len(PROFILES))), explores=True)


# --- the fuzzer itself -----------------------------------------------------------------------------------------------

_WRONG_VALUE = ("t1 = torch.zeros(2, device=device)", "t2 = t1 + (device != 'cpu')")


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("t2 = t1 + (device != 'cpu')", "value of t2"),
        ("t2 = t1.reshape(2, 1) if device == 'cpu' else t1", "t2.shape"),
        ("t2 = t1[1:] if device == 'cpu' else t1[:1]", "t2.storage_offset"),
        ("t1.requires_grad_(device == 'cpu')", "t1.requires_grad"),
        ("if device != 'cpu': raise ValueError", "device raises ValueError"),
        ("if device == 'cpu': raise ValueError", "device raises nothing"),
        ("read((t1 + (device == 'cpu')).tolist())", "device reads"),
        ("t2 = t1.view(2) if device == 'cpu' else t1.clone()", "share other memory"),
        ("if device == 'cpu': del t1", "cpu has"),
        ("t1.requires_grad_(); (t1 * (2 if device == 'cpu' else 3)).sum().backward()", "value of t1.grad"),
    ],
)
def test_every_kind_of_difference_is_found(statement: str, what: str) -> None:
    """A program that looks at its device is a device with a bug."""
    with pytest.raises(Mismatch, match=what):
        check(("t1 = torch.zeros(2, device=device)", statement))


def test_a_failure_is_reduced_to_what_it_needs() -> None:
    """Statements that a failure does not need are taken out."""
    program = (*_WRONG_VALUE[:1], "t3 = t1 * 2", "read(t3.tolist())", _WRONG_VALUE[1], "del t3")
    with pytest.raises(Mismatch) as caught:
        check(program)
    assert minimised(caught.value).program == _WRONG_VALUE


@pytest.mark.parametrize(("program", "verdict"), [(_WRONG_VALUE, "different"), (_WRONG_VALUE[:1], "equal")])
def test_a_printed_script_runs_and_shows_the_difference(program: Program, verdict: str, tmp_path: Path) -> None:
    """What a failure prints is a complete Python script, errors and blocks included."""
    block = ("t4 = t1.view(7, 11)", "if t1.sum() < 1:\n    t1.add_(2)\nelse:\n    t1 = t1 * 2", "read(t1.sum().item())")
    path = tmp_path / "failure.py"
    path.write_text(script((*program, *block), frozenset([len(program)])))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == verdict
    assert "RuntimeError" in done.stdout
