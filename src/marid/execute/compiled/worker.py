"""The process that compiles. Started as a script by ``workers.py``; one at a time, at the lowest priority.

It reads jobs from its standard input, one JSON text a line, and answers each with one line. It ends when nobody has
asked for a while, and when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

_LAST = 19  # the highest niceness


def _prepare(niceness: int) -> None:
    """Be of no hindrance, and import from the package without what importing it does: no device is needed here."""
    with contextlib.suppress(OSError):
        os.nice(niceness)
        if niceness >= _LAST and hasattr(os, "SCHED_IDLE"):
            # A processor that only runs this counts as free, so no two threads of a kernel share the other one.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    package = types.ModuleType("marid")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["marid"] = package


def _watch(parent: int, scratch: str) -> None:
    """End, with every compiler that was started, when the parent is gone: it may be killed, without a word."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _end(scratch)


def _end(scratch: str) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # this process is the first of its group


def _serve(jobs: int, answers: int, idle: float) -> None:
    import torch

    from marid.execute.compiled.lower import Refused

    torch.set_num_threads(1)
    pending = b""
    while True:
        while b"\n" not in pending:
            if not select.select([jobs], [], [], idle)[0]:
                return
            more = os.read(jobs, 1 << 16)
            if not more:
                return
            pending += more
        line, _, pending = pending.partition(b"\n")
        job = json.loads(line)
        try:
            answer: dict[str, Any] = _compile(job)
        except Refused as error:
            answer = {"error": str(error)}
        except Exception as error:  # whatever Inductor or the compiler say: the part stays flat
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-4000:]}
        text = memoryview(json.dumps({"id": job["id"], **answer}).encode() + b"\n")
        while text:
            text = text[os.write(answers, text) :]


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    from marid.execute.compiled.disk import DiskCache
    from marid.execute.compiled.lower import compile_part

    structure = job["structure"]
    cache = DiskCache(Path(job["folder"]), job["limit"])
    found = cache.find(structure)  # another process may have been faster
    if found is not None:
        return {"path": str(found.path), "conditions": found.conditions}
    path, conditions = compile_part(structure["part"], job["hints"], structure["threads"])
    try:
        entry = cache.store(structure, path, conditions)
    except OSError as error:
        kept = Path(tempfile.mkdtemp(prefix="marid-part-", dir=tempfile.tempdir)) / "part.so"
        shutil.copyfile(path, kept)
        return {"path": str(kept), "conditions": conditions, "unstored": str(error), "compiled": True}
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    return {"path": str(entry.path), "conditions": conditions, "compiled": True}


def main() -> None:
    """Serve until there is nothing more to do."""
    parent, idle, scratch, niceness = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    threading.Thread(target=_watch, args=(parent, scratch), daemon=True).start()
    _prepare(niceness)
    # Answers go to a descriptor of their own: what compilers print must not be among them.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = scratch
    try:
        _serve(0, answers, idle)
    finally:
        _end(scratch)


if __name__ == "__main__":
    main()
