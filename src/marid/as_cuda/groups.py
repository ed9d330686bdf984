"""``torch.distributed`` for scripts that ask for NCCL: gloo does what they get from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from marid.frontend.distributed import GLOO

_NCCL = "nccl"


def replace_backends() -> None:
    """Let groups of "nccl", and of gloo and "nccl" for two devices, be groups of gloo, which are for both devices."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return
    from torch.distributed import distributed_c10d as c10d

    c10d.Backend.__new__ = staticmethod(_gloo_for_nccl(c10d.Backend.__new__))
    c10d.Backend.default_device_backend_map["cuda"] = GLOO
    c10d._new_process_group_helper = _without("device_id", c10d._new_process_group_helper)
    c10d.barrier = torch.distributed.barrier = _without("device_ids", c10d.barrier)
    c10d.is_nccl_available = torch.distributed.is_nccl_available = lambda: True


def _gloo_for_nccl(make: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(make)
    def made(cls: Any, name: str) -> str:
        backend = make(cls, name)
        named = {pair.rpartition(":")[2] for pair in backend.split(",")}
        return GLOO if _NCCL in named and named <= {_NCCL, GLOO} else backend

    return made


def _without(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without the devices that NCCL is bound to or waits for."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = None
        return function(*args, **kwargs)

    return called
