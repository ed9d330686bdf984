"""Build and load the C++ device guard (``native.cpp``), once per PyTorch version.

Without a compiler PyTorch's Python guard is used: then there is one device index, ``torch.Generator`` cannot be made
for the device, and an exception raised inside a backward hook ends the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from marid.settings import settings

logger = logging.getLogger("marid")

_SOURCE = Path(__file__).with_name("native.cpp")


def load() -> ctypes.CDLL | None:
    """The loaded library, or None when it cannot be built; the reason is logged as a warning."""
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
    identity = f"{torch.__version__} {sys.platform} {torch._C._GLIBCXX_USE_CXX11_ABI} ".encode() + _SOURCE.read_bytes()
    return settings.cache_dir / f"guard-{hashlib.sha256(identity).hexdigest()[:16]}.so"


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) was found")
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Built under a private name and moved into place, so that processes starting together never see half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / "guard.so"
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        command += [f"-I{root / 'include'}", str(_SOURCE), "-o", str(built)]
        command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    int64_array = ctypes.POINTER(ctypes.c_int64)
    library.marid_set_geometry.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        int64_array,
        int64_array,
        ctypes.c_int64,
    ]
    library.marid_set_geometry.restype = None
    library.marid_set_device_count.argtypes = [ctypes.c_int]
    library.marid_set_current_device.argtypes = [ctypes.c_int]
    library.marid_current_device.restype = ctypes.c_int
    return library


def _explain_loss(reason: str) -> None:
    logger.warning(
        "marid runs without its C++ device guard: %s. One device index is available, torch.Generator cannot be made "
        "for the device, and an exception raised in a backward hook ends the process. Install g++ to lift this.",
        reason,
    )
