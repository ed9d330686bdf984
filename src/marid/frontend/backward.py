"""Backward runs on the thread that called it, as it does on the CPU: there the user's line is found, and exceptions and
Ctrl-C arrive as they should.

Autograd has a thread for each device. PyTorch's switch for that belongs to a thread, so it is set for as long as a
backward runs, and for what is on the CPU too: a graph whose end is there may go on to the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.autograd import graph

from marid.native import module
from marid.semantics.tracebacks import fold

WHY = "backward runs on the thread that called it"


def on_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, without threads of autograd. What it returns is of the device's class of tensors, as all is that Python
    sees of a backward (``native/backward.cpp``)."""
    original = inspect.unwrap(run)
    is_original = original is run and run.__module__ == graph.__name__
    return module.on_this_thread(run, getattr(original, "__code__", None), fold, graph.log if is_original else None)
