"""Runs the core of the suite on several versions of Python and PyTorch, each pair in a virtual environment of its own.

    python tests/matrix.py --python 3.11 3.12 --torch 2.12.0 2.13.0

A pair whose interpreter or wheel cannot be had is left out with a message. The exit status is 1 when tests failed, and
when nothing could be run. ``PIP_INDEX_URL`` and pip's other settings decide which build of PyTorch is taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENVS = ROOT / "build" / "matrix"
PACKAGES = ["expecttest", "hypothesis", "pytest", "pytest-xdist", "scipy"]
CORE = """
    tensor autograd semantics geometry derive graph cut execute memory_plan products passes errors random device tuples
    accumulation recurrent serialization func_transforms layers public_names engine_from_scratch compile_sources
    remote_wire remote_engine
""".split()


def interpreter(version: str) -> str | None:
    """A Python of this version that runs, on the path or of pyenv; a shim on the path may stand for nothing."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        asked = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(candidate)
    return None


def prepared(python: str, version: str, torch: str) -> Path | None:
    """The interpreter of an environment with this PyTorch and Marid; None where PyTorch has no wheel for it."""
    venv = VENVS / f"python-{version}-torch-{torch}"
    inside = venv / "bin" / "python"
    if (venv / ".ready").exists():
        return inside
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(inside), "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*pip, f"torch=={torch}"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(venv)
        if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
            return None
        sys.exit(done.stderr)
    subprocess.run([*pip, "--editable", f"{ROOT}[remote]", *PACKAGES], check=True)
    (venv / ".ready").touch()
    return inside


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the core of the suite on several versions of Python and PyTorch.")
    parser.add_argument("--python", nargs="+", required=True)
    parser.add_argument("--torch", nargs="+", required=True)
    parser.add_argument("--workers", default=os.environ.get("WORKERS", "2"))
    parser.add_argument("--files", nargs="+", default=[f"tests/test_{name}.py" for name in CORE])
    options = parser.parse_args()
    results: list[tuple[str, str]] = []
    for version in options.python:
        python = interpreter(version)
        for torch in options.torch:
            name = f"Python {version}, PyTorch {torch}"
            inside = None if python is None else prepared(python, version, torch)
            if inside is None:
                why = "there is no such interpreter" if python is None else "there is no wheel of this PyTorch for it"
                results.append((name, f"left out: {why}"))
                print(f"== {name}: left out: {why}", flush=True)
                continue
            print(f"== {name}", flush=True)
            subprocess.run([str(inside), "-c", "import marid"], check=True)  # builds its C++ half before the workers
            command = [str(inside), "-m", "pytest", "-q", "-n", options.workers, "-m", "not conformance"]
            done = subprocess.run([*command, *options.files], cwd=ROOT, check=False)
            results.append((name, "passed" if done.returncode == 0 else "FAILED"))
    print("\n".join(f"{name}: {result}" for name, result in results))
    ran = [result for _, result in results if not result.startswith("left out")]
    sys.exit(not ran or "FAILED" in ran)


if __name__ == "__main__":
    main()
