"""Tracebacks that end at the user's line: Marid's own frames are left out of them.

An error that leaves Marid passes a place that says ``except BaseException as error: fold(error); raise``. A bare
``raise`` adds no frame, so nothing of Marid is left; and a ``try`` costs nothing as long as nothing is raised.
``MARID_FULL_TRACEBACK=1`` keeps everything.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, TypeVar

from marid.settings import settings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def fold(error: BaseException) -> None:
    """Leave Marid's frames out of the traceback of an error, and of those that it names as its reasons."""
    met: set[int] = set()
    while not settings.full_traceback and id(error) not in met:
        met.add(id(error))
        error.__traceback__ = _without_own(error.__traceback__)
        reason = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if reason is None:
            break
        error = reason


def folded(function: _Function) -> _Function:
    """``function``, with errors that are folded."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            fold(error)
            raise

    return wrapper  # pyright: ignore[reportReturnType]


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    if not any(_is_own(entry.tb_frame.f_code) for entry in entries):
        return entries[0] if entries else None
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if not _is_own(entry.tb_frame.f_code):
            line = -1 if entry.tb_lineno is None else entry.tb_lineno  # Ctrl-C falls between two lines, too
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
    return kept


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN)
