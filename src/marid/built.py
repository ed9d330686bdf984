"""Where the C++ half of Marid is, and building it.

Apart from ``native``, which has it built: what registers the device takes it only where that has been done.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from marid.settings import settings

_FOLDER = Path(__file__).parent / "native"
_ABI = EXTENSION_SUFFIXES[0]  # Python's version, the processor and the system
_FILES = sorted(Path(folder, name) for folder, _, names in os.walk(_FOLDER) for name in names)
_SOURCES = [file for file in _FILES if file.suffix == ".cpp"]
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
VECTOR_FLAGS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
_OF_KERNELS = (
    [
        "-O3",
        "-fno-math-errno",
        f"-DCPU_CAPABILITY={_CAPABILITY}",
        f"-DCPU_CAPABILITY_{_CAPABILITY}",
        *VECTOR_FLAGS[_CAPABILITY],
    ]
    if (_CAPABILITY in VECTOR_FLAGS)
    else ["-O3", "-fno-math-errno", "-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
)
"""For ``*_kernels.cpp``, which are compiled for the vector unit that PyTorch uses here, as its own kernels are."""
# Without NDEBUG, objects of PyTorch have members in its headers that they have not in its libraries.
_OPTIONS = [
    "-std=c++20",
    "-O2",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-semantic-interposition",
    "-fno-plt",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
]


def library_path() -> Path:
    """Where the library is, or is to be built.

    That is beside its sources, like the compiled files of Python; where we may not write, with the cached files.
    """
    identity = f"{torch.__version__} {_ABI} {_OPTIONS} {_OF_KERNELS} ".encode()
    identity += b"".join(file.read_bytes() for file in [*_SOURCES, *(file for file in _FILES if file.suffix == ".h")])
    name = f"native-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    beside, cached = _FOLDER / "_built" / name, settings.cache_dir / name
    if beside.exists() or (not cached.exists() and os.access(_FOLDER, os.W_OK)):
        return beside
    return cached


@functools.cache
def load(path: Path) -> Any:
    """The library, which is a Python module. Raises ``ImportError`` where it cannot be loaded."""
    loader = ExtensionFileLoader("marid_native", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def the_compiler() -> str | None:
    """The C++ compiler that would be taken, if there is one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def has_headers() -> bool:
    """Whether Python's headers are installed."""
    return (_include() / "Python.h").exists()


def _include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def build(path: Path) -> None:
    """Compile the library, or wait for the process that does. Raises ``OSError`` without a compiler or Python's
    headers, ``CalledProcessError`` where that fails."""
    from filelock import FileLock  # not where the library is there: PyTorch's import would load it too

    compiler = the_compiler()
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) was found")
    if not has_headers():
        raise OSError(f"Python's headers are not installed ({_include()} has no Python.h)")
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Built under a private name and moved into place: who does not wait never sees half a file.
    with FileLock(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        if path.exists():
            return
        built = Path(scratch) / "native.so"
        options = [*_OPTIONS, f"-I{_FOLDER}", f"-I{root / 'include'}", f"-I{_include()}"]
        if torch.backends.openmp.is_available() and "clang" not in Path(compiler).name:
            options.append("-fopenmp")  # for products; not for the linker: PyTorch brings a library of its own
        objects = [str(Path(scratch) / f"{index}-{source.stem}.o") for index, source in enumerate(_SOURCES)]
        commands = [
            [compiler, *options, *_options_of(source), "-c", str(source), "-o", made]
            for source, made in zip(_SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes most of a gigabyte
            list(pool.map(_run, commands))
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        command = [compiler, "-shared", *objects, "-o", str(built), *libraries]
        _run(command)
        built.replace(path)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _options_of(source: Path) -> list[str]:
    return _OF_KERNELS if source.stem.endswith("_kernels") else []
