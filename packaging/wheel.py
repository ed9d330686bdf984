"""Build a wheel that carries the C++ half: for this Python, the installed PyTorch, and each vector unit up to this
machine's.

    python packaging/wheel.py DESTINATION
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
UNITS = ["DEFAULT", "AVX2", "AVX512"]


def main(destination: Path) -> None:
    """Put the wheel into a folder."""
    unit = torch.backends.cpu.get_cpu_capability()
    units = UNITS[: UNITS.index(unit) + 1] if unit in UNITS else [unit]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "marid"
        copy.mkdir()
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        shutil.copytree(
            ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("_built", "__pycache__", "*.egg-info")
        )
        for unit in units:
            chosen = {"ATEN_CPU_CAPABILITY": unit.lower(), "PYTHONPATH": str(copy / "src"), "MARID_AUTOLOAD": "0"}
            subprocess.run([sys.executable, "-c", "import marid"], env={**os.environ, **chosen}, check=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(destination),
            str(copy),
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
