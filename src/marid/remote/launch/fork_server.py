"""The process behind ``marid worker``: it has imported all that is needed, and forks the processes that do the work.

It holds no tensors, no keys and no sockets, and has one thread, so a process that it forks can begin at once, without
importing PyTorch again, and has nothing that belongs to another. When the one that listens (the *front*) is killed, it
forks another one for the same address. Without keys the front runs programs itself (``worker.py``); with keys it is the
supervisor (``supervisor.py``), which has one more process forked for each owner of a key.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

Front = Callable[[str, socket.socket], None]
"""Serves on an address until it is told to stop (SIGTERM); tells the keeper the address that it has got, and with keys
which processes it wants, through the socket."""
Owned = Callable[[str], None]
"""Serves one owner, on a channel of the supervisor's."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_LOOK = 0.5  # seconds between looks at whether to go on
_FAREWELL = 3.0  # seconds that processes may take to end
_QUICK, _QUICK_ENDS = 2.0, 5  # so many fronts in a row that were killed within so many seconds are a fault of ours
_LINE = 4096


class ForkServer:
    """Keeps a front alive at ``address``. ``announce`` is called with the address that it listens at, once."""

    def __init__(self, address: str, front: Front, owned: Owned, announce: Callable[[str], None]) -> None:
        self._address = address
        self._front = front
        self._owned = owned
        self._announce = announce
        self._announced = False
        self._front_pid = 0
        self._owned_pids: dict[int, str] = {}
        self._channel: socket.socket | None = None
        self._text = b""

    def run(self, until: Callable[[], bool] | None = None) -> int:
        """Until ``until`` says so (asked twice a second), Ctrl-C or SIGTERM; the exit status."""
        signal.signal(signal.SIGTERM, _interrupted)
        out, into = os.pipe()
        os.set_blocking(into, False)
        before = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            return self._run(until, out)
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._end()

    def _run(self, until: Callable[[], bool] | None, woken: int) -> int:
        quick = 0
        while True:
            started = time.monotonic()
            self._start_front()
            status = self._watch(until, woken)
            if status is None or status == 0 or not self._announced:
                return abs(status or 0)
            quick = quick + 1 if time.monotonic() - started < _QUICK else 0
            if quick >= _QUICK_ENDS:
                print("marid worker: its processes are killed as soon as they start", file=sys.stderr)
                return 1

    def _start_front(self) -> None:
        self._kill_owned()
        ours, theirs = socket.socketpair()
        self._channel, self._text = ours, b""
        self._front_pid = self._fork(lambda: self._front(self._address, theirs), theirs)
        theirs.close()

    def _watch(self, until: Callable[[], bool] | None, woken: int) -> int | None:
        """Until the front has ended (its exit status, negative for a signal) or it is time (None)."""
        assert self._channel is not None
        listened = [self._channel, woken]
        while True:
            ready, _, _ = select.select(listened, [], [], _LOOK)
            if woken in ready:
                os.read(woken, _LINE)
            if self._channel in ready and not self._receive():
                listened.remove(self._channel)  # it has ended, or is about to
            for pid, status in _ended():
                if pid == self._front_pid:
                    self._front_pid = 0
                    return status
                self._notify("ended", self._owned_pids.pop(pid, ""))
            if until is not None and until():
                return None

    def _receive(self) -> bool:
        """What the front says; whether it goes on. Processes are all that it can ask for."""
        assert self._channel is not None
        try:
            data = self._channel.recv(_LINE)
        except OSError:
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            kind, _, rest = line.decode(errors="replace").partition(" ")
            if kind == "address":
                if not self._announced:
                    self._announce(rest)
                self._address, self._announced = rest, True
            elif kind == "spawn":
                pid = self._fork(lambda path=rest: self._owned(path), None)
                self._owned_pids[pid] = rest
            elif kind == "end":
                for pid in [pid for pid, path in self._owned_pids.items() if path == rest]:
                    os.kill(pid, signal.SIGKILL)
        self._text = self._text[-_LINE:]
        return bool(data)

    def _notify(self, kind: str, path: str) -> None:
        if path and self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(f"{kind} {path}\n".encode())

    def _fork(self, target: Callable[[], None], kept: socket.socket | None) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            _begin(parent)
            if self._channel is not None:
                self._channel.close()
            del kept
            target()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _kill_owned(self) -> None:
        for pid in self._owned_pids:
            os.kill(pid, signal.SIGKILL)
        if self._channel is not None:
            self._channel.close()

    def _end(self) -> None:
        if self._front_pid:
            os.kill(self._front_pid, signal.SIGTERM)
            until = time.monotonic() + _FAREWELL
            while time.monotonic() < until and not any(pid == self._front_pid for pid, _ in _ended()):
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._front_pid, signal.SIGKILL)
        for pid in self._owned_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _interrupted(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _ended() -> list[tuple[int, int]]:
    """The children that have ended, with their exit statuses."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _begin(keeper: int) -> None:
    """What a process does first that was forked: it ends with its keeper, however that ends."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the keeper, which ends all
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def hide_from_others() -> None:
    """Let no other process of this user look into the memory of this one, nor the kernel write it to a file."""
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
