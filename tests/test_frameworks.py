"""Lightning, Accelerate and transformers train on the device, and their losses are those of the CPU.

The frameworks are in the extra ``frameworks``; without one of them, its tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import DEVICE

SCRIPTS = Path(__file__).parent / "framework_scripts"
PYTHON = [sys.executable]
MARID = [sys.executable, "-m", "marid", "run", "--no-summary"]
AS_CUDA = [*MARID[:-1], "--as-cuda", "--no-summary"]


def _printed(folder: Path, command: list[str], script: str, *arguments: str) -> str:
    folder.mkdir()
    done = subprocess.run(
        [*command, str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"} if command is PYTHON and arguments == ("cpu",) else None,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(MARID, ("auto", DEVICE)), (PYTHON, ("marid", DEVICE)), (AS_CUDA, ("gpu", "cuda"))],
    ids=["auto", "named", "as_cuda"],
)
def test_lightning(tmp_path: Path, command: list[str], arguments: tuple[str, str]) -> None:
    """By itself under ``marid run``, by name elsewhere, and as a GPU."""
    pytest.importorskip("lightning")
    expected = _printed(tmp_path / "cpu", PYTHON, "lightning_trainer.py", "cpu", "cpu")
    assert _printed(tmp_path / "lazy", command, "lightning_trainer.py", *arguments) == expected


@pytest.mark.parametrize("script", ["accelerate_loop.py", "transformers_trainer.py"])
@pytest.mark.parametrize(("command", "device"), [(MARID, DEVICE), (AS_CUDA, "cuda")], ids=["run", "as_cuda"])
def test_accelerate_and_transformers(tmp_path: Path, script: str, command: list[str], device: str) -> None:
    """A script that names no device trains on it under ``marid run``."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    expected = _printed(tmp_path / "cpu", PYTHON, script, "cpu")
    assert _printed(tmp_path / "lazy", command, script, device) == expected
