"""The two translations: what a script calls ``"cuda"``, and what it is shown."""

from __future__ import annotations

from typing import Any

import torch

from marid.frontend import handles

CUDA, OURS = "cuda", handles.DEVICE_TYPE
COUNT = 1
"""How many devices there are: with more, scripts would share their work between devices that are all this machine."""


def ours() -> Any:
    """``torch.remote_accelerator``."""
    return getattr(torch, OURS)


def from_cuda(thing: Any) -> Any:
    """``"cuda"``, ``"cuda:0"`` or such a ``torch.device`` as our device; anything else as it is. Raises what CUDA
    raises for an index that is not there."""
    if isinstance(thing, str):
        if thing == CUDA or thing.startswith("cuda:"):
            _check(torch.device(thing).index)
            return OURS + thing.removeprefix(CUDA)
    elif isinstance(thing, torch.device) and thing.type == CUDA:
        _check(thing.index)
        return torch.device(OURS) if thing.index is None else torch.device(OURS, thing.index)
    return thing


def to_cuda(device: torch.device) -> torch.device:
    """What a script is shown instead of our device."""
    if device.type != OURS:
        return device
    return torch.device(CUDA) if device.index is None else torch.device(CUDA, device.index)


def index_of(device: Any) -> int:
    """The index of a device that is given as PyTorch takes it, None for the current one. Raises as ``from_cuda``."""
    if device is None:
        return handles.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    _check(index)
    return handles.current_device() if index is None or index < 0 else index


def _check(index: int | None) -> None:
    if index is not None and index >= COUNT:
        raise torch.AcceleratorError(
            f"CUDA error: invalid device ordinal\ncuda:{index} was asked for; `marid run --as-cuda` has one device"
        )
