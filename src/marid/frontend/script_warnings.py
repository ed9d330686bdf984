"""Warnings of a script under ``marid run`` name the lines that they name under ``python``.

A default device and ``--as-cuda`` are function modes, which PyTorch puts between a function and its caller; functions
that are written in Python appear twice then, before and behind the mode. A warning counts frames from where it is given
to find the line that it is about.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_MODES = (
    torch.overrides.__file__,
    os.path.join(os.path.dirname(torch.__file__), "utils", "_device.py"),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "as_cuda"),
)


def install() -> None:
    """Correct what is shown from now on."""
    show = warnings.showwarning

    @functools.wraps(show)
    def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
        stack = list(_from_the_warning(sys._getframe(1)))
        places = [(frame.f_code.co_filename, frame.f_lineno) for frame in stack]
        if (filename, lineno) in places:
            called = list(_without_modes(stack))[places.index((filename, lineno)) :]
            if called:
                filename, lineno = called[0].f_code.co_filename, called[0].f_lineno
        show(message, category, filename, lineno, *rest, **named)

    warnings.showwarning = showwarning


def _from_the_warning(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames that a warning counts, the innermost first."""
    while frame is not None and frame.f_code.co_filename == warnings.__file__:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _without_modes(stack: Iterable[types.FrameType]) -> Iterator[types.FrameType]:
    inner: types.CodeType | None = None
    in_mode = False
    for frame in stack:
        if frame.f_code.co_filename.startswith(_MODES):
            in_mode = True
        else:
            if not (in_mode and frame.f_code is inner):
                yield frame
            inner, in_mode = frame.f_code, False
