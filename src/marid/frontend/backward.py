"""Backward runs on the thread that called it, as it does on the CPU: there the user's line is found, and exceptions and
Ctrl-C arrive as they should.

Autograd has a thread for each device. PyTorch's switch for that belongs to a thread, so it is set for as long as a
backward runs, and for what is on the CPU too: a graph whose end is there may go on to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from marid.native import module
from marid.semantics.tracebacks import fold

WHY = "backward runs on the thread that called it"
_is_enabled: Callable[[], bool] = torch._C._is_multithreading_enabled
_set_enabled: Callable[[bool], None] = torch._C._set_multithreading_enabled
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def on_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, without threads of autograd. What it returns is of the device's class of tensors, as all is that Python
    sees of a backward (``native/backward.cpp``)."""

    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before, shows = _is_enabled(), _are_transforms_active()
        _set_enabled(False)
        if shows:
            module.show_gradients(1)
        try:
            return module.give_class(run(*args, **kwargs))
        except BaseException as error:
            fold(error)
            raise
        finally:
            if shows:
                module.show_gradients(-1)
            _set_enabled(before)

    return wrapper
