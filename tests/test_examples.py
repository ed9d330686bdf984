"""The scripts in ``examples``: on the device they print what they print under ``python``, to the last digit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remote_helpers import start_workers

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "diffusion.py": "--steps 21 --batch 8 --width 8",
    "fine_tune.py": "--epochs 1 --pictures 256",
    "fit_image.py": "--steps 3 --size 24 --width 16",
    "generate.py": "--tokens 8",
    "train_gpt.py": "--steps 12 --batch 4 --context 32 --width 32 --layers 2 --characters 10 --text 20000",
}
ELSEWHERE = {
    "data_parallel.py": "test_remote_parallel.py",
    "engine_from_scratch.py": "test_engine_from_scratch.py",
    "rwkv_chat.py": "test_rwkv7_text.py",
}
PYTHON = [sys.executable]
MARID = [sys.executable, "-m", "marid", "run", "--no-summary"]

pytestmark = pytest.mark.in_process("starts processes of its own")


def _printed(command: list[str], name: str, *more: str) -> str:
    if name == "generate.py":
        pytest.importorskip("transformers")
    env = {**os.environ, "MARID_COMPILE": "0"}
    command = [*command, str(EXAMPLES / name), *SMALL[name].split(), *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SMALL)
def test_examples_print_what_eager_pytorch_prints(name: str) -> None:
    expected = _printed(PYTHON, name)
    assert len(expected) > 20
    assert _printed(MARID, name) == expected


def test_text_is_the_same_from_a_worker() -> None:
    (worker,) = start_workers(1, transport="tcp")
    try:
        assert _printed(PYTHON, "generate.py", "--worker", worker.address) == _printed(PYTHON, "generate.py")
    finally:
        worker.stop()


def test_every_example_is_executed_and_in_the_gallery() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SMALL, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert name.removesuffix(".py") in (Path(__file__).parent / test).read_text()
    gallery = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    notebooks = {path.name for path in (EXAMPLES / "notebooks").glob("*.ipynb")}
    assert not [name for name in names | notebooks if f"`{name}`" not in gallery]
