"""A contestant's process, as the harness sees it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import marid
from benchmarks.suite.workloads import Workload
from marid.settings import settings

__all__ = ["Contestant", "Failure", "cold_caches", "environment"]

_HERE = Path(__file__).parent
_ROOT = Path(marid.__file__).resolve().parents[1]


class Failure(Exception):
    """A contestant could not go on; ``missing`` when what it needs is not installed."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Contestant:
    """One peer on one workload, in a process started now. ``born`` is the moment of its start.

    A context manager: leaving it ends the process. Methods raise ``Failure``.
    """

    def __init__(self, workload: Workload, peer: str, env: dict[str, str], threads: int, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        self._buffer = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        options = {**workload.options, "threads": threads, "root": str(_ROOT)}
        # -P: the folder of worker.py must not be searched for modules.
        command = [sys.executable, "-P", str(_HERE / "worker.py")]
        command += [str(_HERE / "contestants" / f"{workload.contestant}.py"), peer, json.dumps(options)]
        self.born = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # it had ended before it read what was written
                    stream.close()

    def build(self) -> float:
        """Import the framework, make model and data; the seconds that the latter took."""
        return self._ask({"do": "build"})["seconds"]

    def run(self, count: int) -> tuple[list[float], list[Any]]:
        """Call ``count`` times: the seconds, and the outputs where they are numbers."""
        answer = self._ask({"do": "run", "count": count})
        return answer["seconds"], answer["outputs"]

    def settle(self) -> None:
        """Wait until what it does in the background is done."""
        self._ask({"do": "settle"})

    def save_output(self, path: Path) -> None:
        """Write the array that the last call returned as an ``.npy`` file."""
        self._ask({"do": "output", "path": str(path)})

    def finish(self) -> dict[str, Any]:
        """``facts`` and ``resident_before``, ``resident_peak`` in bytes; nothing can be asked afterwards."""
        return self._ask({"do": "finish"})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read()
        except OSError as error:
            raise Failure(f"the process ended: {self._last_words() or error}") from None
        except Failure:
            self._process.kill()  # it must not go on beside the others
            raise
        if not answer.get("ok"):
            raise Failure(str(answer.get("error")), bool(answer.get("missing")))
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Failure(f"no answer within {self.timeout:.0f} s")
                if selector.select(left):
                    data = os.read(self._process.stdout.fileno(), 1 << 16)
                    if not data:
                        code = self._process.wait()
                        raise Failure(f"the process ended with status {code}: {self._last_words()}")
                    self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])


def environment(threads: int, cache: Path | None = None) -> dict[str, str]:
    """Environment of a contestant; with ``cache``, its compilers keep there what they keep between processes."""
    env = dict(os.environ)
    # `marid run` and test suites switch it off; and Marid's own limits are not what is measured.
    env.pop("TORCH_COMPILE_DISABLE", None)
    if threads:
        env.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    env["MARID_CACHE_DIR"] = str(settings.cache_dir)
    env["MARID_AUTOLOAD"] = "0"  # peers run without it, and Marid imports itself
    if cache is not None:
        env.update(MARID_CACHE_DIR=str(cache / "marid"), TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"))
        env.update(TRITON_CACHE_DIR=str(cache / "triton"), XLA_FLAGS=env.get("XLA_FLAGS", ""))
    return env


def cold_caches(folder: Path) -> Path:
    """Empty caches in ``folder``, but for Marid's C++ half, which is built once a machine and not for a program."""
    target = folder / "marid"
    target.mkdir(parents=True, mode=0o700)
    for library in settings.cache_dir.glob("native-*.so"):
        (target / library.name).symlink_to(library.resolve())
    return folder
