"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """A number of bytes in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def seconds_text(seconds: float) -> str:
    """Seconds, as milliseconds where that is easier to read: ``2.50 s``, ``12.3 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
