"""What PyTorch calls at the end of its own import, where Marid is installed: it makes the device known.

Outside of the package, so that nothing of it is imported where ``MARID_AUTOLOAD=0`` switches this off.
"""

from __future__ import annotations

import os

__all__ = ["autoload"]


def autoload() -> None:
    """Register the device, as ``import marid`` does."""
    if os.environ.get("MARID_AUTOLOAD", "1").strip().lower() not in ("", "0", "false", "no", "off"):
        import marid  # noqa: F401
