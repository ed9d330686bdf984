"""Mixing with CPU tensors on purpose: ``lift`` and ``capture()``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from marid.engine.snapshot import snapshot
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import hold_back, read_value
from marid.frontend.meaning import understand
from marid.frontend.observe import observer
from marid.graph.computation import ComputationGraph
from marid.graph.dispatch_state import concretely


class _Depth(threading.local):
    captures = 0


_depth = _Depth()


def lifts_everything() -> bool:
    """Whether CPU tensors meeting lazy ones are lifted in this thread."""
    return _depth.captures > 0


def lift(tensor: torch.Tensor, device: int | None = None) -> Any:
    """A lazy tensor with the value of a CPU tensor, as it is now; no gradient flows back."""
    index = handles.current_device() if device is None else device
    with concretely():
        copied = snapshot(tensor.detach())
    of = handles.spec_of(copied, index)
    value = handles.source(engine_of(index).adopt(copied), of)
    watching = observer()
    if watching is not None:
        watching.upload(value, tensor, snapshot)
    return handles.wrap(value, of)


class _Capture(TorchFunctionMode):
    """``torch.device(...)`` as a context, and a record of the lazy tensors made inside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._context = DeviceContext(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._context.__torch_function__(func, types, args, kwargs)


@contextmanager
def capture(device: int | None = None) -> Iterator[ComputationGraph]:
    """Tensors made inside are lazy without naming a device, and CPU tensors that meet lazy ones are lifted.

    Gives a ``ComputationGraph`` that holds, after the block, what was recorded inside and is still pending. Nests, and
    leaves nothing behind after an exception.
    """
    index = handles.current_device() if device is None else device
    graph = ComputationGraph([], [], read_value, understand)
    tape = handles.tape(index)
    start = next(tape.sequence)
    _depth.captures += 1
    try:
        with hold_back(), _Capture(torch.device(handles.DEVICE_TYPE, index)):
            yield graph
    finally:
        _depth.captures -= 1
        graph.replace([node for node in tape.pending() if node.seq > start])
