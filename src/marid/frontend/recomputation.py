"""``torch.utils.checkpoint`` on the device: what is computed again draws the numbers that it drew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from marid.frontend import handles, random

States = tuple[list[int], list[torch.Tensor]]


def on_the_device(kind: str | None) -> str:
    """The type of device whose generators are kept where no argument is on one. (PyTorch takes the accelerator of the
    process, but asks only once, perhaps before there was one.)"""
    return handles.DEVICE_TYPE if kind in (None, "cpu") else kind


def keeping_generators(states: Callable[..., States]) -> Callable[..., States]:
    """``get_device_states``, which keeps generators of devices by the positional arguments; but tensors may come in
    other ways, and the CPU's generator is kept whatever they are. So those of all devices are kept here."""

    @functools.wraps(states)
    def wrapper(*args: Any) -> States:
        indices, found = states(*args)
        if torch.utils.checkpoint._infer_device_type(*args) == handles.DEVICE_TYPE:
            for index in sorted({*range(handles.device_count)} - {*indices}):
                indices.append(index)
                found.append(random.default_generator(index).get_state())
        return indices, found

    return wrapper
