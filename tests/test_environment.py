"""``marid env``."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import marid
from marid import built
from marid.cli import commands
from marid.execute.compiled.disk import folder
from tests.remote_helpers import connected

COMMAND = [sys.executable, "-m", "marid"]


def _asked(*options: str) -> str:
    result = CliRunner().invoke(commands, ["env", *options])
    assert result.exit_code == 0, result.output
    return result.output


def _found() -> dict[str, dict[str, Any]]:
    return json.loads(_asked("--json"))


def test_json_says_what_is_there() -> None:
    """The versions, the processor, the C++ half and the caches that this process has."""
    found = _found()
    assert found["versions"]["marid"] == marid.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"].startswith(platform.python_version())
    assert found["processor"]["threads"] == torch.get_num_threads()
    assert found["processor"]["model"]
    assert found["C++ half"]["library"] == str(built.library_path())
    assert found["C++ half"]["built"] is True
    assert found["C++ half"]["problem"] is None
    assert found["compiled code"]["folder"] == str(folder())
    assert found["compiled code"]["limit"] == marid.settings.cache_bytes
    assert sum(map(len, found["devices"].values())) == marid.settings.devices


def test_the_text_says_the_same() -> None:
    """A line for each fact that is known."""
    text = _asked()
    for topic, facts in _found().items():
        assert f"{topic}\n" in text
        for name, value in facts.items():
            assert (f"  {name}: " in text) == (value is not None)
    assert f"torch: {torch.__version__}" in text
    assert "built: yes" in text


def test_only_settings_are_shown_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that somebody keeps in a variable does not get into a report."""
    monkeypatch.setenv("MARID_COMPILE", "0")
    monkeypatch.setenv("MARID_WORKER_KEY", "a secret")
    monkeypatch.setenv("OTHER", "a secret")
    variables = _found()["variables"]
    assert variables["MARID_COMPILE"] == "0"
    assert "MARID_WORKER_KEY" in variables
    assert "a secret" not in _asked() + _asked("--json")


def test_a_compiler_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said to be missing, or not to answer."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "does not say its version" in _found()["C++ half"]["compiler"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert _found()["C++ half"]["compiler"] is None
    assert "compiler: none, so nothing is compiled" in _asked()


@pytest.mark.in_process("connects workers of its own")
def test_workers_are_named() -> None:
    """With the devices that they are."""
    with connected(6, 7):
        devices = _found()["devices"]
    assert devices["local worker (cpu)"] == [":6", ":7"]
    assert devices["in-process engine"][0] == ":0"


def _elsewhere(folder: Path, **changes: str) -> dict[str, str]:
    """An environment in which Marid is a copy that was not built, and there is no compiler."""
    shutil.copytree(Path(marid.__file__).parent, folder / "marid", ignore=shutil.ignore_patterns("_built", "*.pyc"))
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    return kept | {"PYTHONPATH": str(folder), "PATH": "", "MARID_CACHE_DIR": str(folder / "cache"), **changes}


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_it_works_where_the_cpp_half_cannot_be_built(tmp_path: Path) -> None:
    """It says why, and that no device can be used; other commands raise that, as before."""
    environment = _elsewhere(tmp_path)
    done = _run(environment, "env", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["C++ half"]["built"] is False
    assert found["C++ half"]["library"].startswith(str(tmp_path))
    assert "no C++ compiler" in found["C++ half"]["problem"]
    assert found["devices"] == {}
    text = _run(environment, "env")
    assert "built: no" in text.stdout
    assert "devices\n  none" in text.stdout
    refused = _run(environment, "cache", "info")
    assert refused.returncode != 0
    assert "ImportError: marid's C++ half is not there" in refused.stderr


def test_the_command_says_what_click_says_here() -> None:
    """``python -m marid env`` in a process of its own."""
    done = _run(dict(os.environ), "env", "--json")
    assert done.returncode == 0, done.stderr
    found, here = json.loads(done.stdout), _found()
    assert found["versions"] == here["versions"]
    assert found["C++ half"] == here["C++ half"]
