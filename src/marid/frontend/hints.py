"""What is said beside PyTorch's own words when a program ends because it asked for a device that is not there."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any

from marid.frontend import handles

_UNKNOWN = "device type at start of device string: "
_NO_CUDA = ("Torch not compiled with CUDA enabled", "Cannot get CUDA generator", "Found no NVIDIA driver")


def hinting(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``sys.excepthook``, with a note on errors about devices."""

    @functools.wraps(hook)
    def show(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        hint = _hint(str(error)) if isinstance(error, (AssertionError, RuntimeError)) else None
        if hint is not None:
            error.add_note(hint)
        return hook(kind, error, trace)

    return show


def _hint(message: str) -> str | None:
    if message.startswith(_NO_CUDA):
        return (
            f"There is no CUDA here. Marid's device is called {handles.DEVICE_TYPE!r}, and "
            "`marid run --as-cuda` lets a script that asks for 'cuda' have it."
        )
    if "opt_ready_stream && opt_parent_stream" in message:
        return (
            f"PyTorch has one accelerator in a process, here {handles.DEVICE_TYPE!r}, and cannot run the backward of "
            "tensors of another (pytorch/pytorch#161129): train on CUDA in a process that does not import marid, or "
            "on Marid's device with MARID_ENGINE=cuda:0."
        )
    given = message.partition(_UNKNOWN)[2].partition(":")[0].strip()
    if not given:
        return None
    if given == "marid" or difflib.get_close_matches(given, [handles.DEVICE_TYPE], cutoff=0.7):
        return f"Did you mean {handles.DEVICE_TYPE!r}? So Marid's device is called."
    return f"Marid's device is called {handles.DEVICE_TYPE!r}."
