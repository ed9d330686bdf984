"""Noticing that a recorded function reads what no recording can watch: a clock, the environment, a file, the network,
and, without an operator that reads it, a tensor of the CPU.

While its Python runs, the interpreter reports each call that its thread makes (``sys.setprofile``). What PyTorch and
Marid read for themselves does not count, nor what the standard library reads to report or to import, nor what runs
because Python's collector does.
"""

from __future__ import annotations

import datetime
import gc
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import CodeType, FrameType, GeneratorType, ModuleType
from typing import Any, Self

import torch

from marid.frontend import handles
from marid.semantics.scopes import INTERNAL, Site, capture_site, site_table
from marid.semantics.source_files import is_of_the_standard_library

_SYSTEM, _CLOCK, _FILE, _NETWORK = "the operating system", "the clock", "a file", "the network"
_TENSOR = "a tensor of the CPU"
# By module: what its C functions read. Of some, only these functions; of others, all but these.
_MODULES = {
    "time": _CLOCK,
    "posix": _SYSTEM,
    "nt": _SYSTEM,
    "resource": _SYSTEM,
    "_posixsubprocess": _SYSTEM,
    "_winapi": _SYSTEM,
    "_uuid": _SYSTEM,
    "select": _NETWORK,
    "_socket": _NETWORK,
    "_io": _FILE,
    "builtins": "the terminal",
    "torch._C": _TENSOR,
}
_ONLY = {"_io": {"open", "open_code"}, "builtins": {"input"}, "torch._C": {"_to_dlpack", "_to_dlpack_versioned"}}
_BUT = {"time": {"sleep", "mktime"}, "posix": {"fspath", "putenv", "unsetenv", "_exit"}, "nt": {"fspath", "putenv"}}
_METHODS: list[tuple[type, set[str], str]] = [
    (datetime.date, {"now", "utcnow", "today"}, _CLOCK),
    (io.IOBase, {"read", "read1", "readall", "readinto", "readinto1", "readline", "readlines", "peek"}, _FILE),
    (socket.SocketType, {"accept", "recv", "recvfrom", "recv_into", "recvfrom_into", "recvmsg"}, _NETWORK),
]
_CODES: dict[CodeType, str] = {
    getattr(type(os.environ), name).__code__: "the environment" for name in ("__getitem__", "__iter__", "__len__")
}
_TENSOR_SOURCE = sys.modules[torch.Tensor.__module__].__file__
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ASIDE = {"logging", "warnings", "linecache", "traceback", "importlib", "_frozen_importlib"}


def has_profiler() -> bool:
    """Whether this thread has a profiler, so that nothing can be noticed."""
    return sys.getprofile() is not None


class ImpureWatch:
    """Context manager. ``refusal`` says what was read and at which line, or None.

    ``generators`` are those whose advance is noticed; ``told`` gets each call of a function of Python, and each return.
    The thread must have no other profiler (``has_profiler``).
    """

    def __init__(self, generators: list[GeneratorType[Any, Any, Any]], told: Callable[[FrameType, str], None]) -> None:
        self._told = told
        self.refusal: str | None = None
        self._frames = {id(one.gi_frame): one.gi_frame for one in generators if one.gi_frame is not None}
        self._thread = get_ident()
        self._collecting = False

    def __enter__(self) -> Self:
        gc.callbacks.insert(0, self._collector_begins)  # before and behind all that others have it call
        gc.callbacks.append(self._collector_ends)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.getprofile() == self._called:
            sys.setprofile(None)
        else:
            self.refusal = self.refusal or "it sets the profiler of the thread"
        gc.callbacks.remove(self._collector_begins)
        gc.callbacks.remove(self._collector_ends)
        self._frames.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is not the function's."""
        ours = sys.getprofile() == self._called
        if ours:
            sys.setprofile(None)
        try:
            yield
        finally:
            if ours:
                sys.setprofile(self._called)

    def _collector_begins(self, _phase: str, _: dict[str, int]) -> None:
        if get_ident() == self._thread:
            self._collecting = True

    def _collector_ends(self, phase: str, _: dict[str, int]) -> None:
        if phase == "stop" and get_ident() == self._thread:
            self._collecting = False

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if self._collecting:
            return
        if event in ("call", "return"):
            self._told(frame, event)
        what, caller = None, frame.f_back
        if event == "c_call":
            what, caller = _read_by(function), frame
        elif event == "call":
            what = "a generator that was there before" if id(frame) in self._frames else _CODES.get(frame.f_code)
        if what is not None and self.refusal is None:
            site = _reader(caller) if what is _TENSOR else _asker(caller)
            if site is not None:
                self.refusal = f"it reads {what} at {site}"


def _read_by(function: Any) -> str | None:
    """What a function in C reads that nobody can watch; None for nothing."""
    owner = function.__self__
    if type(owner) is ModuleType:
        module, name = owner.__name__, function.__name__
        if module not in _MODULES or name in _BUT.get(module, ()) or name not in _ONLY.get(module, (name,)):
            return None
        return _MODULES[module]
    if isinstance(owner, torch.Tensor):
        return _TENSOR if function.__name__ in ("numpy", "tolist") and not handles.is_lazy(owner) else None
    kind = owner if isinstance(owner, type) else type(owner)
    for base, names, what in _METHODS:
        if function.__name__ in names and issubclass(kind, base):
            return what
    return None


def _asker(frame: FrameType | None) -> Site | None:
    """Whose line reads through the standard library; None for PyTorch's, Marid's, and what is read aside."""
    while frame is not None and is_of_the_standard_library(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _ASIDE:
            return None
        frame = frame.f_back
    return None if frame is None or site_table(frame.f_code) is INTERNAL else capture_site(frame)


def _reader(frame: FrameType | None) -> Site | None:
    """Whose line reads a tensor of the CPU, whoever does it for that line; None for Marid's."""
    own = frame
    while own is not None and own.f_code.co_filename == _TENSOR_SOURCE:
        own = own.f_back
    return None if frame is None or own is None or own.f_code.co_filename.startswith(_OWN) else capture_site(frame)
