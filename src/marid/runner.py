"""Running a script on the device as ``python script.py`` would run it."""

from __future__ import annotations

import atexit
import builtins
import io
import os
import sys
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Any

import torch

from marid import frameworks
from marid.api import explain, stats
from marid.frontend import handles, printing, script_random, script_warnings
from marid.registration import first_use
from marid.report.document import report
from marid.settings import settings

_CANNOT_OPEN = 2  # the exit code of python for a script that cannot be read


@dataclass(frozen=True)
class Job:
    """A script, its arguments, and how to run it."""

    script: str
    arguments: tuple[str, ...] = ()
    as_cuda: bool = False
    summary: bool = True
    explain: bool = False
    report: str | None = None
    """Where the HTML report is to be written at the end, if anywhere."""

    def run(self) -> None:
        """Run the script as ``__main__`` in this process.

        What the script raises leaves this function for the interpreter to handle, so that exit codes, Ctrl-C and
        ``atexit`` are Python's own; ``sys.excepthook`` is told to leave out the frames above the script's.
        """
        path = os.path.join(os.getcwd(), self.script)  # not normalised, as python does it
        source = _read(path)
        use_the_device(self.as_cuda)
        if self.report is not None:
            settings.profile_operators = True
            settings.immediate_bytes = 0  # what runs at once is in no program
            atexit.register(_report, os.getpid(), self.report, self.script)
        if self.summary or self.explain:
            from marid.report import summary  # noqa: F401  (now: a script may have modules of the same names as rich)

            # Registered first, so called after every function that the script registers.
            atexit.register(_summarise, os.getpid(), self.explain)
        sys.argv[:] = [self.script, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        main = _main_module(path)
        sys.modules["__main__"] = main
        try:
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
        except BaseException as error:
            _hide_own_frames(error)
            raise


_FOR_CHILDREN = "MARID_RUN"
"""The variable from which processes that the script spawns know what they are part of."""


def use_the_device(as_cuda: bool) -> None:
    """Have the rest of this process use the device, and what ``multiprocessing`` starts from it."""
    first_use()
    printing.show_as_python_does(names_device=as_cuda)
    script_warnings.install()
    # Marid compiles what it records; a second compiler in front of it would only see opaque tensors.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ[_FOR_CHILDREN] = "--as-cuda" if as_cuda else ""
    if as_cuda:
        from marid import as_cuda as cuda  # changes PyTorch's modules: only on request

        cuda.install()
    else:
        torch.set_default_device(handles.DEVICE_TYPE)
        script_random.install()
        frameworks.choose_the_device()


def go_on_in_child() -> None:
    """Use the device in a process that ``multiprocessing`` has started from one under ``marid run``."""
    use_the_device(os.environ[_FOR_CHILDREN] == "--as-cuda")


def _read(path: str) -> bytes:
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        print(f"marid: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_OPEN)


def _main_module(path: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    return main


def _hide_own_frames(error: BaseException) -> None:
    """Make ``sys.excepthook``, whichever the script left there, see the traceback from the script's frame on."""
    assert error.__traceback__ is not None
    visible = error.__traceback__.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        if value is error:
            traceback = visible
            value.__traceback__ = visible
        hook(kind, value, traceback)

    sys.excepthook = show


def _summarise(process: int, explained: bool) -> None:
    if os.getpid() == process:  # not in a fork of the script
        from marid.report import summary

        summary.show(explain() if explained else summary.render(stats()))


def _report(process: int, path: str, script: str) -> None:
    if os.getpid() == process:  # not in a fork of the script
        try:
            written = report(path, title=os.path.basename(script))
        except OSError as error:
            print(f"marid: the report cannot be written: {error}", file=sys.stderr)
        else:
            print(f"marid: report written to {written}", file=sys.stderr)
