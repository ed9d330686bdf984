"""What figures depend on: the machine, and the versions of everybody who takes part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

import marid

__all__ = ["device_name", "machine", "versions"]

_PEERS = ("transformers", "jax", "mlx", "tinygrad", "numpy")


def machine() -> dict[str, Any]:
    """A description of this machine, and how busy it is now."""
    return {
        "system": platform.platform(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def device_name(device: str) -> str:
    """What a device of PyTorch is called by its maker."""
    return _processor() if device == "cpu" else torch.cuda.get_device_name(device)


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch, Marid and of the peers that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "marid": marid.__version__}
    for name in _PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
