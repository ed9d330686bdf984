"""What PyTorch calls at the end of its own import, where Marid is installed: it makes the device known.

Outside of the package, so that nothing of it is imported where ``MARID_AUTOLOAD=0`` switches this off.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

__all__ = ["autoload"]


def autoload() -> None:
    """Register the device, as ``import marid`` does; the rest is loaded by that import, or by the first tensor."""
    if os.environ.get("MARID_AUTOLOAD", "1").strip().lower() in ("", "0", "false", "no", "off"):
        return
    if "marid" in sys.modules:  # whose own import has imported PyTorch
        return
    package = sys.modules["marid"] = types.ModuleType("marid")
    package.__path__ = [str(Path(__file__).with_name("marid"))]
    try:
        importlib.import_module("marid.registration").register()
    finally:
        del sys.modules["marid"]  # an import of it is still to come
