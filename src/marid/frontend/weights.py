"""Weights of a file as lazy tensors."""

from __future__ import annotations

import os
from typing import Any

import torch

from marid.engine.inprocess import concretely
from marid.engine.safetensors import read_file
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.semantics.tracebacks import folded

__all__ = ["load_file"]


@folded
def load_file(
    path: str | os.PathLike[str], device: torch.device | str | int = handles.DEVICE_TYPE
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file on a lazy device, by name, for ``module.load_state_dict``.

    Where the device is a worker's, this process sends the names of the contents (their hashes), and the worker reads
    what it finds under the same path; only what it does not find there, or finds changed, is uploaded. The file must
    stay as it is while tensors that were loaded from it are alive: it is read again when a worker is lost.

    Raises ``ValueError`` for what is no such file, and ``OSError``.
    """
    place = torch.device(device)
    if place.type != handles.DEVICE_TYPE:
        raise ValueError(f"marid.load_file() loads to {handles.DEVICE_TYPE}, not to {place}: use safetensors for that")
    handles.check_index(place)
    index = handles.current_device() if place.index is None else place.index
    found: dict[str, Any] = {}
    absolute = os.path.abspath(path)
    with concretely():
        for name, entry in read_file(path).items():
            spec = handles.spec_of(entry.tensor, index)
            buffer = engine_of(index).load(entry.tensor, absolute, entry.offset)
            found[name] = handles.wrap(handles.source(buffer, spec), spec)
    return found
