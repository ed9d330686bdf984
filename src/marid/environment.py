"""``marid env``: what a report of a bug needs to say of this machine and this process.

It works where the C++ half is not there and cannot be built, and nothing else of Marid can be imported: so it imports
what needs that half only where it has been loaded.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from marid.built import has_headers, library_path, the_compiler
from marid.execute.compiled.disk import DiskCache, folder
from marid.report.units import bytes_text
from marid.settings import Settings, settings

# Of the vector and matrix units that PyTorch's kernels, oneDNN's and ours have versions for.
_FLAGS = """avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni
    amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimddp bf16 i8mm sve sve2"""


def is_asked_for() -> bool:
    """Whether this process is ``marid env`` or ``python -m marid env``."""
    given = sys.orig_argv
    by_module = any(given[place : place + 3] == ["-m", "marid", "env"] for place in range(len(given)))
    return by_module or (Path(sys.argv[0]).stem == "marid" and sys.argv[1:2] == ["env"])


def describe(version: str, problem: str | None = None) -> dict[str, dict[str, Any]]:
    """The environment by topic, as plain data (bytes are numbers): of Marid ``version``, whose C++ half has this
    ``problem``. Values of variables are told only where they are settings, which hold no secrets."""
    library = library_path()
    return {
        "versions": {
            "marid": version,
            "torch": str(torch.__version__),
            "torch git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": platform.platform(),
        },
        "processor": {
            **_processor(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": _memory(),
        },
        "C++ half": {
            "compiler": _compiler(),
            "python headers": has_headers(),
            "library": str(library),
            "built": library.exists(),
            "problem": problem,
        },
        "compiled code": _cache(),
        "devices": _engines(),
        "variables": dict(_variables()),
    }


def text_of(found: dict[str, dict[str, Any]]) -> str:
    """The same for people: a line for each fact."""
    lines = []
    for topic, facts in found.items():
        lines.append(topic)
        lines += [
            f"  {name}: {_shown(name, value)}" for name, value in facts.items() if value is not None or name in _ALWAYS
        ]
        lines += [] if facts else ["  none"]
    return "\n".join(lines)


_ALWAYS = {"compiler": "none, so nothing is compiled"}
"""What is said of facts that are not there; others are left out then."""


def _shown(name: str, value: Any) -> str:
    if value is None:
        return _ALWAYS[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return bytes_text(value) if name in ("memory", "size", "limit") else str(value)


def _processor() -> dict[str, Any]:
    facts: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""  # no Linux
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    model = facts.get("model name") or platform.processor() or platform.machine()
    return {"model": model, "flags": [flag for flag in _FLAGS.split() if flag in flags]}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _compiler() -> str | None:
    found = the_compiler()
    if found is None:
        return None
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{found}, which does not say its version: {error}"
    return f"{found}: {(told.splitlines() or [''])[0]}"


def _cache() -> dict[str, Any]:
    entries = DiskCache(folder(), settings.cache_bytes).entries()
    size = sum(nbytes for _, nbytes, _ in entries)
    return {"folder": str(folder()), "parts": len(entries), "size": size, "limit": settings.cache_bytes}


def _engines() -> dict[str, list[str]]:
    """What runs the programs of which devices, workers by their address; nothing where no device can be used."""
    loaded = sys.modules.get("marid.frontend.engines")
    found: dict[str, list[str]] = {}
    for index in range(settings.devices if loaded is not None else 0):
        found.setdefault(loaded.engine_of(index).name, []).append(f":{index}")  # pyright: ignore
    return found


def _variables() -> Iterator[tuple[str, str]]:
    known = {f"MARID_{field.name.upper()}" for field in fields(Settings)} | {"MARID_AUTOLOAD", "MARID_RUN"}
    for name in sorted(os.environ):
        if name.startswith("MARID_"):
            yield name, os.environ[name] if name in known else "set, but no setting"
