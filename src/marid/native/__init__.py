"""The C++ half of Marid, built once per PyTorch and Python version on first import.

A library called through ctypes: ``device.cpp`` is the device guard, ``memory.cpp`` the memory of planned runs,
``execute.cpp`` runs programs without Python, ``compiled.cpp`` the parts of them that were compiled, ``products.cpp``,
``trials.cpp``, ``multiply.cpp`` and ``multiply_row.cpp`` products of matrices. The same file is a Python module:
``kernels.cpp``, ``call.cpp`` and ``record.cpp`` record the usual operations, ``dispatch.cpp`` leaves others to Python,
``autocast.cpp`` casts before some of them, ``derive.cpp`` tells what they return for new sizes, ``cut.cpp`` chooses
what runs and finds its program, ``runs.cpp`` begins runs and hands out their results, ``concretely.cpp`` sets the state
of dispatch. Where Python's headers are not installed those are left out, and Python does it all.

Without a compiler PyTorch's Python guard is used: then there is one device index, ``torch.Generator`` cannot be made
for the device, an exception raised inside a backward hook ends the process, and programs run as Python source that
allocates as eager PyTorch does.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from marid.settings import settings

__all__ = ["int64s", "library", "module"]

logger = logging.getLogger("marid")

_MODULE = "marid_native"
_PYTHON = Path(sysconfig.get_paths()["include"])
_HAS_MODULE = (_PYTHON / "Python.h").exists()
_OF_MODULE = "accumulate autocast call concretely cut derive dispatch geometry kernels record runs".split()
_SOURCES = [path for path in sorted(Path(__file__).parent.glob("*.cpp")) if _HAS_MODULE or path.stem not in _OF_MODULE]
_OPTIONS = ["-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _load() -> ctypes.CDLL | None:
    if not settings.native:
        return None
    path = _library_path()
    try:
        if not path.exists():
            _build(path)
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        _explain_loss(str(error))
    except subprocess.CalledProcessError as error:
        _explain_loss(f"the compiler failed:\n{error.stderr}")
    return None


def _library_path() -> Path:
    """Where the library is, or is to be built.

    That is beside its sources, like the compiled files of Python; where we may not write, with the cached files.
    """
    identity = f"{torch.__version__} {sys.version} {sys.platform} {_OPTIONS} ".encode()
    identity += b"".join(source.read_bytes() for source in [*_SOURCES, *sorted(Path(__file__).parent.glob("*.h"))])
    name = f"native-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    beside, cached = Path(__file__).parent / "_built" / name, settings.cache_dir / name
    if beside.exists() or (not cached.exists() and os.access(Path(__file__).parent, os.W_OK)):
        return beside
    return cached


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) was found")
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Built under a private name and moved into place, so that processes starting together never see half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / "native.so"
        options = [*_OPTIONS, f"-I{root / 'include'}", f"-I{_PYTHON}"]
        if torch.backends.openmp.is_available() and "clang" not in Path(compiler).name:
            options.append("-fopenmp")  # for products; not for the linker: PyTorch brings a library of its own
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in _SOURCES]
        compiling = [
            (command := [compiler, *options, "-c", str(source), "-o", made], _started(command))
            for source, made in zip(_SOURCES, objects, strict=True)
        ]
        for command, process in compiling:
            _, errors = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        command = [compiler, "-shared", *objects, "-o", str(built), *libraries]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(path)


def _load_module() -> Any:
    if library is None or not _HAS_MODULE:
        return None
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, library._name)
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def int64s(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An array for a function of the library; each number must fit into 64 bits."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_TEXT, _CHAR = ctypes.c_char_p, ctypes.c_char
_INT64S, _POINTERS = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_void_p)

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "marid_set_geometry": (None, [_POINTER, _INT, _INT, _INT64S, _INT64S, _INT64]),
    "marid_view_by_strides": (None, [_POINTER]),
    "marid_set_device_count": (None, [_INT]),
    "marid_set_current_device": (None, [_INT]),
    "marid_current_device": (_INT, []),
    "marid_memory_install": (None, [_INT64]),
    "marid_memory_place": (_INT64, [_INT64, _INT64S, _INT64S, _INT64S, _INT64, _INT64S]),
    "marid_memory_plan": (_POINTER, [_INT64, _INT64S, _INT64S, _INT64, _INT64S]),
    "marid_memory_forget": (None, [_POINTER]),
    "marid_memory_watch": (None, [_INT64]),
    "marid_memory_follow": (_INT, [_POINTER, _INT64]),
    "marid_memory_end": (_INT, []),
    "marid_memory_release": (None, []),
    "marid_memory_arena_bytes": (_INT64, []),
    "marid_memory_end_watched": (_POINTER, []),
    "marid_memory_seen_blocks": (_INT64, [_POINTER]),
    "marid_memory_seen_events": (_INT64, [_POINTER]),
    "marid_memory_seen": (None, [_POINTER, _INT64S, _INT64S]),
    "marid_memory_cached": (_INT64, []),
    "marid_memory_trim": (None, []),
    "marid_program_new": (_POINTER, [_INT64]),
    "marid_program_free": (None, [_POINTER]),
    "marid_program_operation": (_INT64, [_POINTER, _TEXT, _TEXT]),
    "marid_program_out": (_INT, [_POINTER, _TEXT, _TEXT]),
    "marid_program_argument": (_INT, [_POINTER, _INT, _INT64]),
    "marid_program_result": (None, [_POINTER, _INT64, _INT64, _INT64, _INT64, _INT64, _INT]),
    "marid_program_resized": (None, [_POINTER, _INT64]),
    "marid_program_dying": (None, [_POINTER, _INT64]),
    "marid_program_list": (_INT64, [_POINTER, _INT64, _INT64S]),
    "marid_program_constant": (_INT64, [_POINTER, _CHAR, _INT64, _TEXT]),
    "marid_run_free": (None, [_POINTER]),
    "marid_run_go": (_INT, [_POINTER, _POINTER, ctypes.c_double]),
    "marid_run_differs": (_INT, [_POINTER]),
    "marid_run_next": (_INT64, [_POINTER]),
    "marid_run_has": (_INT, [_POINTER, _INT64]),
    "marid_compiled_load": (_POINTER, [_TEXT, _INT]),
    "marid_compiled_unload": (None, [_POINTER]),
    "marid_compiled_problem": (_TEXT, []),
    "marid_compiled_instance": (_INT64, [_POINTER, _INT64, _INT64, _INT64S, _INT64, _INT64S, _INT64, _INT64S]),
    "marid_compiled_drop": (None, [_INT64]),
    "marid_compiled_failed": (_INT, [_INT64]),
    "marid_products_enable": (None, [_INT]),
    "marid_products_configure": (None, [_INT, _INT64, ctypes.c_double, ctypes.c_double, _INT64]),
    "marid_products_count": (_INT64, []),
    "marid_job_new": (_POINTER, [_POINTER, _INT64, _INT64S, _POINTERS, _INT64S, _INT, _POINTER, _INT64]),
    "marid_queue_release_threads": (None, [_POINTER]),
    "marid_job_submit": (_INT64, [_POINTER, _POINTER]),
    "marid_job_state": (_INT, [_POINTER]),
    "marid_job_watched": (_POINTER, [_POINTER]),
    "marid_job_left": (_INT, [_POINTER]),
    "marid_job_seconds": (ctypes.c_double, [_POINTER]),
    "marid_job_warnings": (_POINTER, [_POINTER]),
    "marid_job_free": (None, [_POINTER]),
    "marid_queue_done": (_INT64, []),
    "marid_queue_wait": (_INT, [_INT64, ctypes.c_double]),
    "marid_queue_is_here": (_INT, []),
    "marid_queue_halted": (_INT, []),
    "marid_queue_resume": (None, []),
    "marid_queue_stop": (None, []),
    "marid_queue_forked": (None, []),
}


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _explain_loss(reason: str) -> None:
    logger.warning(
        "marid runs without its C++ half: %s. One device index is available, torch.Generator cannot be made for the "
        "device, an exception raised in a backward hook ends the process, and memory is not planned. Install g++ to "
        "lift this.",
        reason,
    )


library: ctypes.CDLL | None = _load()
"""The loaded library, or None when it cannot be built (the reason is logged as a warning)."""

module: Any = _load_module()
"""The Python module of the library, or None where there is no library or Python's headers are not installed."""


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
