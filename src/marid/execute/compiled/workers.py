"""Whom parts are sent to for compiling: one process, started when it is first needed, never waited for.

Jobs are asked for (``submit``) and looked after (``poll``) on the thread that runs programs; neither blocks. A worker
that dies is replaced once for the job it had; a job whose second worker dies too is given up.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marid import policy
from marid.report.hooks import Compiled, compiled
from marid.report.stats import counters
from marid.settings import settings

_WORKER = Path(__file__).with_name("worker.py")
_LEAST = 19  # the highest niceness
_KEPT_OUT = ("MARID_", "TORCH", "AOT_INDUCTOR", "AOTI_", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS", "OMP_")


@dataclass
class Job:
    """A part to compile. ``answer`` is None until there is one: with ``path`` and ``conditions``, or with ``error``."""

    request: dict[str, Any]
    attempts: int = 0
    answer: dict[str, Any] | None = None
    number: int = field(default_factory=itertools.count(1).__next__)
    asked: float = field(default_factory=time.perf_counter)


class Compiler:
    """The worker process and what it was asked for. Not thread-safe: used under the engine's lock."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._scratch: str | None = None
        self._unsent = b""
        self._received = b""
        self._niceness = _LEAST  # at most; less once it got no processor
        self._watched = 0.0, 0.0  # when it was last looked at how much of a processor it gets, and its seconds then

    def submit(self, request: dict[str, Any]) -> Job:
        """Ask for a part."""
        self._check_owner()
        if not self.jobs and self.process is not None and self.process.poll() is not None:
            self._end()  # it had nothing to do for too long
        if not self.jobs and self.process is not None:
            self._watched = time.monotonic(), _processor_seconds(self.process.pid)
        job = Job(request)
        self.jobs.append(job)
        self.poll()
        return job

    def poll(self) -> None:
        """Take what answers there are, and see to it that somebody works on the rest. Never waits."""
        self._check_owner()
        if not self.jobs:
            return
        try:
            if self.process is None:
                self._start()
            self._send()
            self._receive()
            self._insist()
        except OSError as error:
            self._lose(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the worker, and forget what it was asked for."""
        for job in self.jobs:
            job.answer = {"error": "closed"}
        self.jobs.clear()
        self._end()

    def _check_owner(self) -> None:
        if self._owner != os.getpid():  # a fork: the worker is the parent's
            if self.process is not None:
                self.process.returncode = 0  # nothing to wait for
            self.jobs, self.process, self._scratch, self._owner = [], None, None, os.getpid()
            self._unsent = self._received = b""

    def _start(self) -> None:
        if not sys.executable:
            raise OSError("there is no Python to start")
        self._scratch = tempfile.mkdtemp(prefix="marid-compile-")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_KEPT_OUT)}
        # One thread each for PyTorch and its compilers, and no compiling in the worker.
        environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MARID_COMPILE": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(_WORKER),
                str(os.getpid()),
                str(policy.COMPILER_IDLE),
                self._scratch,
                str(min(settings.compile_niceness, self._niceness)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # Ctrl-C is for the script; in a session of its own, autogroups would make nice do nothing
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        os.set_blocking(self.process.stdout.fileno(), False)
        counters.compile_workers += 1
        self._watched = time.monotonic(), 0.0
        self._received = b""
        self._unsent = b"".join(_line(job) for job in self.jobs)

    def _send(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        for job in self.jobs:
            if not job.attempts:
                job.attempts = 1
                if _line(job) not in self._unsent:
                    self._unsent += _line(job)
        while self._unsent:
            try:
                sent = os.write(self.process.stdin.fileno(), self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def _receive(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        while True:
            try:
                more = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not more:
                self._lose("the compile worker died")
                return
            self._received += more
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                if not self._take(line):
                    self._lose("the compile worker said something that is no answer")
                    return

    def _take(self, line: bytes) -> bool:
        try:
            answer = json.loads(line)
            number = answer["id"]
            if "error" not in answer and not (
                isinstance(answer["path"], str) and isinstance(answer["conditions"], list)
            ):
                return False
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        for job in self.jobs:
            if job.number == number:
                job.answer = answer
                if compiled.listeners:
                    count = len(job.request["structure"]["part"]["instructions"])
                    compiled.tell(Compiled(count, job.asked, time.perf_counter(), "error" not in answer))
        self.jobs = [job for job in self.jobs if job.answer is None]
        return True

    def _insist(self) -> None:
        """Start the worker anew, giving way less, where the script leaves it no processor: it would never be done. A
        process cannot take back of its own how far it gives way."""
        now, (since, before) = time.monotonic(), self._watched
        if self.process is None or not self.jobs or now - since < policy.COMPILER_STARVED:
            return
        seconds = _processor_seconds(self.process.pid)
        self._watched = now, seconds
        starved = seconds - before < policy.COMPILER_SHARE * (now - since)
        if starved and min(settings.compile_niceness, self._niceness) > policy.COMPILER_NICENESS:
            self._niceness = policy.COMPILER_NICENESS
            self._end()

    def _lose(self, reason: str) -> None:
        """The worker is gone. Its first job may be why: that one is tried once more, the others wait for it."""
        self._end()
        counters.compile_workers_lost += 1
        if self.jobs:
            first = self.jobs[0]
            first.attempts += 1
            if first.attempts > 2:
                first.answer = {"error": reason}
                del self.jobs[0]

    def _end(self) -> None:
        process, scratch = self.process, self._scratch
        self.process = self._scratch = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _processor_seconds(pid: int) -> float:
    """Of a process and its children that have ended; without end where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return float("inf")
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _line(job: Job) -> bytes:
    return json.dumps({"id": job.number, **job.request}).encode() + b"\n"


compiler = Compiler()
"""The worker of this process."""


@atexit.register
def _close() -> None:
    if compiler._owner == os.getpid():
        compiler.close()
