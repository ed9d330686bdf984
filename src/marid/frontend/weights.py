"""Weights of a file as tensors: lazy ones, by which a worker reads the file itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from marid.engine.safetensors import Entry, read_file
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.graph.dispatch_state import concretely
from marid.semantics.tracebacks import folded


class Weights(dict[str, torch.Tensor]):
    """Tensors by name, and what else a file says."""

    metadata: dict[str, Any]


@folded
def load_file(path: str | os.PathLike[str], device: torch.device | str | int = handles.DEVICE_TYPE) -> Weights:
    """The tensors of a safetensors or GGUF file (``.gguf``), by name; for ``module.load_state_dict``. The metadata of a
    GGUF file is in the attribute ``metadata``.

    Where the device is a worker's, this process sends the names of the contents (their hashes), and the worker reads
    what it finds under the same path; only what it does not find there, or finds changed, is uploaded. The file must
    stay as it is while tensors that were loaded from it are alive: it is read again when a worker is lost. A GGUF file
    can be loaded to the CPU too. Its packed matrices stay packed (``QuantizedTensor``), there and on the way.

    Raises ``ValueError`` for what is no such file, and ``OSError``.
    """
    place = torch.device(device)
    packed = Path(path).suffix == ".gguf"
    if place.type != handles.DEVICE_TYPE and not (packed and place.type == "cpu"):
        raise ValueError(f"marid.load_file() loads to {handles.DEVICE_TYPE}, not to {place}: use safetensors for that")
    found = Weights()
    found.metadata = {}
    if packed:
        from marid.engine import gguf_files
        from marid.frontend.quantized import QuantizedTensor
        from marid.frontend.quantized_operators import PACKINGS

        found.metadata, entries = gguf_files.read_file(path, PACKINGS)
        placed = _placed(path, entries, place)
        for name, entry in entries.items():
            is_packed = isinstance(entry, gguf_files.PackedEntry)
            found[name] = QuantizedTensor(placed[name], entry.packing) if is_packed else placed[name]
        return found
    found.update(_placed(path, read_file(path), place))
    return found


def _placed(path: Any, entries: dict[str, Entry], place: torch.device) -> dict[str, torch.Tensor]:
    if place.type == "cpu":
        return {name: entry.tensor for name, entry in entries.items()}
    handles.check_index(place)
    index = handles.current_device() if place.index is None else place.index
    absolute = os.path.abspath(path)
    found: dict[str, torch.Tensor] = {}
    with concretely():
        for name, entry in entries.items():
            spec = handles.spec_of(entry.tensor, index)
            buffer = engine_of(index).load(entry.tensor, absolute, entry.offset)
            found[name] = handles.wrap(handles.source(buffer, spec), spec)
    return found
