"""What kernels warn of in a run becomes a warning in Python, at the user's line that waits, once the results are safe.

PyTorch warns when the Python function that was called returns; recorded operations have returned long before they run.
Without the C++ half such warnings go to standard error, as those of every ATen call without a Python function do.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from marid.native import library
from marid.semantics.scopes import current_site

__all__ = ["KernelWarnings", "report", "warn_of"]

_shown: dict[str, dict[Any, Any]] = {}  # for each file, what filters that show a warning once have shown
_reports: list[str] = []


def report(text: str) -> None:
    """Warn of something that is Marid's own, where and when kernels' warnings are."""
    _reports.append(text)


class KernelWarnings:
    """Context manager around a run on this thread; may be nested."""

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        self._kept = None if library is None else library.marid_warnings_begin()

    def __exit__(self, *_: object) -> None:
        if library is not None and self._kept is not None:
            library.marid_warnings_suspend(self._kept)
        warn_of(self._kept)


def warn_of(kept: int | None) -> None:
    """Warn, at the current line, of what kernels have warned of in a run that has ended, and of what was reported."""
    texts = [_reports.pop(0) for _ in range(len(_reports))]
    if library is not None and kept is not None:
        texts += _texts(kept)
        library.marid_warnings_free(kept)
    if texts:
        site = current_site()
        file, line = (site.file, site.line) if site is not None else ("<unknown>", 0)
        for text in texts:
            warnings.warn_explicit(text, UserWarning, file, line, registry=_shown.setdefault(file, {}))


def _texts(kept: int) -> Iterator[str]:
    assert library is not None
    for index in itertools.count():
        text = library.marid_warnings_text(kept, index)
        if text is None:
            return
        yield text.decode(errors="replace")
