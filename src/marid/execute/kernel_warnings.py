"""What kernels warn of in a run becomes a warning in Python, at the user's line that waits, once the results are safe.

PyTorch warns when the Python function that was called returns; recorded operations have returned long before they run.
"""

from __future__ import annotations

import warnings
from typing import Any

from marid.native import module
from marid.semantics.scopes import current_site

_shown: dict[str, dict[Any, Any]] = {}  # for each file, what filters that show a warning once have shown
_reports: list[str] = []


def report(text: str) -> None:
    """Warn of something that is Marid's own, where and when kernels' warnings are."""
    _reports.append(text)


class KernelWarnings:
    """Context manager around a run on this thread; may be nested."""

    __slots__ = ("_kept",)

    def __enter__(self) -> None:
        self._kept = module.warnings_begin()

    def __exit__(self, *_: object) -> None:
        warn_of(module.warnings_end(self._kept))


def warn_of(texts: list[str]) -> None:
    """Warn, at the current line, of what kernels have warned of in a run that has ended, and of what was reported."""
    if not texts and not _reports:
        return
    site = current_site()
    file, line = (site.file, site.line) if site is not None else ("<unknown>", 0)
    for text in [*(_reports.pop(0) for _ in range(len(_reports))), *texts]:
        warnings.warn_explicit(text, UserWarning, file, line, registry=_shown.setdefault(file, {}))
