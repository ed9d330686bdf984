"""The C++ half of Marid, built once per PyTorch and Python version when it is first needed (``marid/built.py``).

A Python module (``module.cpp``), to which each file adds functions: plain ones in C++, which ``expose.h`` gives a
signature in Python, and ones that take Python's objects as they are. ``device.cpp`` is the device guard,
``memory.cpp`` the memory of planned runs, ``programs.cpp`` puts programs together, ``execute.cpp`` runs them without
Python, and ``queue.cpp`` on the device's own thread, ``compiled.cpp`` has the parts of them that were compiled,
``guard.cpp`` tests numbers for ``marid.compile``, ``rwkv7.cpp`` has the operators of a model; ``gemm/`` multiplies
matrices, and has a page of its own (``docs/matrix_kernels.md``). Kernels for this machine's vector unit are in
``*_kernels.cpp``. ``kernels.cpp``, ``direct.cpp``, ``call.cpp``, ``record.cpp``, ``order.cpp`` and ``results.cpp``
record the usual operations, ``known_calls.cpp`` finds what is known of such calls, ``resident.cpp`` counts what their
values hold, ``stack.cpp`` finds where they were written, ``accumulate.cpp`` lays sums of gradients out, ``zeros.cpp``
has the rules for zeros without memory, ``dispatch.cpp`` leaves others to Python, ``handle.cpp`` is what tensors of
the device are, ``host_calls.cpp`` tells of calls on those of the host, ``autocast.cpp`` casts before some operations,
``derive.cpp`` says what they return for new sizes, ``cut.cpp`` chooses what runs, ``bind.cpp`` makes a program's key
of it, ``runs.cpp`` begins runs and hands out their results, ``placement.cpp`` says where results lie meanwhile,
``state.cpp`` compares what ``marid.compile`` works on, ``concretely.cpp`` sets the state of dispatch, and
``immediate.cpp`` and ``immediate_results.cpp`` run operations as they are called.

Where it is not built and cannot be, the import raises ``ImportError``.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch

from marid.built import build, library_path, load


def _load() -> Any:
    path = library_path()
    try:
        if not path.exists():
            build(path)
        return load(path)
    except (OSError, ImportError) as error:
        reason = str(error)
    except subprocess.CalledProcessError as error:
        reason = f"the compiler failed:\n{error.stderr}"
    raise ImportError(
        f"marid's C++ half is not there for PyTorch {torch.__version__}, and cannot be built here: {reason}. Install a "
        "C++ compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev), or a wheel of marid that "
        "was built for this PyTorch and this Python (make wheel)"
    )


module: Any = _load()
"""The C++ half. Addresses of what it owns are ints here, and None is null."""


def _omp_pause() -> int | None:
    """The address of ``omp_pause_resource_all`` in the OpenMP library that PyTorch uses, where that is libgomp."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if "libgomp" in line}
    if len(paths) != 1:
        return None
    function = getattr(ctypes.CDLL(paths.pop()), "omp_pause_resource_all", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


omp_pause: int | None = _omp_pause()
"""Gives back the OpenMP threads of the calling thread (see ``queue.cpp``), or None where that cannot be done."""

_PAUSE_SOFT = 1  # omp_pause_soft


def release_openmp_threads() -> None:
    """Give back the OpenMP threads of this thread, where that can be done."""
    if omp_pause is not None:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(omp_pause)(_PAUSE_SOFT)
