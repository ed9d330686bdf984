"""The process in which one contestant of a benchmark runs: told what to do on stdin, answers on stdout, in JSON lines.

Run by its path, so that Marid is imported only where it is what is measured: its hooks would slow the others. What
a contestant prints goes to stderr.

Requests are ``{"do": "build"}``, ``{"do": "run", "count": n}``, ``{"do": "settle"}``, ``{"do": "output", "path": p}``
and ``{"do": "finish"}``; every answer has ``"ok"``, and a request that failed ends the process.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Lab"]

_SETTLING = 300.0  # seconds that compilers in the background may take


@dataclass(frozen=True)
class Timed:
    """The output of a call that took its time itself."""

    output: Any
    seconds: float


@dataclass
class Lab:
    """What a contestant is given. ``facts`` go into the report; ``timed(output, seconds)`` is what a call returns of
    which only a part counts."""

    peer: str
    options: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    timed: type[Timed] = Timed
    settle: Callable[[], None] = lambda: None

    def marid(self) -> Any:
        """Import Marid, the one that started the benchmark, and report what it did at the end."""
        root = self.options["root"]
        sys.path.insert(0, root)
        try:
            import marid
        finally:
            sys.path.remove(root)
        found = Path(marid.__file__).resolve().parents[1]
        if found != Path(root).resolve():
            raise ImportError(f"another marid was found, in {found}")

        marid.settings.compile_ms = (
            1  # what is worth compiling is compiled while warming up, not while others are timed
        )

        def note() -> None:
            stats = marid.stats()
            self.facts["marid"] = {
                "programs_built": stats.programs_built,
                "programs_reused": stats.programs_reused,
                "ops_captured": stats.ops_captured,
                "fallbacks": stats.fallbacks,
                "automatic_cuts": stats.automatic_cuts,
                "recompiles": [str(cause) for one in marid.explain().recompiles for cause in one.differences][:20],
                "planned_peak": stats.planned_peak,
                "planned_lower_bound": stats.planned_lower_bound,
                "peak_memory": stats.peak_memory,
                "memory_allocated": stats.memory_allocated,
            }
            # Whether anything but the flat tier ran: then results need not be eager PyTorch's bit for bit.
            self.facts["flat"] = not stats.compiled_runs

        def settle() -> None:
            deadline = time.monotonic() + _SETTLING
            while marid.stats().programs_compiling and time.monotonic() < deadline:
                time.sleep(0.05)

        self.settle = settle
        self.at_end.append(note)
        return marid


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    contestant, peer, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    lab = Lab(peer, options)
    step: Callable[[], Any] | None = None
    before = last = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "build":
                module = _load(contestant)
                _limit_threads(options["threads"])
                module.prepare(lab)
                before = resident()
                started = time.perf_counter()
                step = module.build(lab)
                answer(ok=True, seconds=time.perf_counter() - started)
            elif request["do"] == "run":
                assert step is not None
                last = None
                seconds, outputs = [], []
                for _ in range(request["count"]):
                    last = None  # its memory is free for the next
                    started = time.perf_counter()
                    last = step()
                    taken = time.perf_counter() - started
                    if isinstance(last, Timed):
                        taken, last = last.seconds, last.output
                    seconds.append(taken)
                    outputs.append(last if isinstance(last, (int, float, list)) else None)
                answer(ok=True, seconds=seconds, outputs=outputs)
            elif request["do"] == "settle":
                lab.settle()
                answer(ok=True)
            elif request["do"] == "output":
                _save(last, request["path"])
                answer(ok=True)
            elif request["do"] == "finish":
                peak = peak_resident()
                for function in lab.at_end:
                    function()
                answer(ok=True, facts=lab.facts, resident_before=before, resident_peak=peak)
                break
            else:
                raise ValueError(f"unknown request {request}")
        except BaseException as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip()
            answer(ok=False, error=text[:2000], missing=isinstance(error, ModuleNotFoundError))
            break
    answers.close()
    # Frameworks with threads of their own may not end well at exit, and all that counts has been said.
    sys.stderr.flush()
    os._exit(0)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"contestant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _limit_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _save(output: Any, path: str) -> None:
    import numpy

    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(output, torch.Tensor)
    array = output.detach().cpu().numpy() if is_tensor else numpy.asarray(output)
    numpy.save(path, array, allow_pickle=False)


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return _status("VmRSS")


def peak_resident() -> int:
    """The most that it had."""
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
