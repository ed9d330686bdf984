"""``nn.DataParallel`` on several devices of this process: moving tensors between them, which PyTorch has for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from marid.frontend import handles

Move = Callable[..., Any]


def _is_here(*tensors: torch.Tensor) -> bool:
    """Whether the devices that are meant are ours: PyTorch gives their indices only."""
    return torch.version.cuda is None or any(handles.is_lazy(tensor) for tensor in tensors)


def _device(index: Any) -> torch.device:
    return torch.device(handles.DEVICE_TYPE, index) if isinstance(index, int) else torch.device(index)


def scattering(scatter: Move) -> Move:
    """``torch.nn.parallel.comm.scatter``."""

    @functools.wraps(scatter)
    def wrapper(
        tensor: torch.Tensor,
        devices: Sequence[Any] | None = None,
        chunk_sizes: Sequence[int] | None = None,
        dim: int = 0,
        streams: Any = None,
        *,
        out: Any = None,
    ) -> Any:
        if out is not None or devices is None or not _is_here(tensor):
            return scatter(tensor, devices, chunk_sizes, dim, streams, out=out)
        parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        return tuple(part.to(_device(device)) for part, device in zip(parts, devices, strict=False))

    return wrapper


def gathering(gather: Move) -> Move:
    """``torch.nn.parallel.comm.gather``."""

    @functools.wraps(gather)
    def wrapper(tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
        if out is not None or not _is_here(*tensors):
            return gather(tensors, dim, destination, out=out)
        target = _device(handles.current_device() if destination is None else destination)
        return torch.cat([tensor.to(target) for tensor in tensors], dim)

    return wrapper


def broadcasting(broadcast_coalesced: Move) -> Move:
    """``torch.nn.parallel.comm.broadcast_coalesced``."""

    @functools.wraps(broadcast_coalesced)
    def wrapper(tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = 10485760) -> Any:
        if not _is_here(*tensors):
            return broadcast_coalesced(tensors, devices, buffer_size)
        return [[tensor.to(_device(device)) for tensor in tensors] for device in devices]

    return wrapper


def reducing(reduce_add_coalesced: Move) -> Move:
    """``torch.nn.parallel.comm.reduce_add_coalesced``."""

    @functools.wraps(reduce_add_coalesced)
    def wrapper(inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, buffer_size: int = 10485760) -> Any:
        if not _is_here(*inputs[0]):
            return reduce_add_coalesced(inputs, destination, buffer_size)
        target = _device(handles.current_device() if destination is None else destination)
        return tuple(
            functools.reduce(torch.add, [one.to(target) for one in same]) for same in zip(*inputs, strict=True)
        )

    return wrapper
