"""Operators without a tensor argument, registered on the device one by one: each records a single node.

A blanket fallback for the device would be shorter, but it breaks ``torch.tensor(data, device=...)``.
"""

from __future__ import annotations

from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.calls import unsupported
from marid.frontend.record import Recorder, recorder_of
from marid.native import module
from marid.ops.facts import facts_of, named, overload_named
from marid.semantics.tracebacks import fold

_RECORDED_AS = {"aten::_efficientzerotensor": "aten::zeros"}
"""What has no memory on the CPU has some on the device."""


def register() -> None:
    """Give every factory its device kernel. Operators are looked up when they are first called: this runs within the
    first operation of a process."""
    default_dtype = set(named("default_dtype"))
    for name in named("factory"):
        base, overload = name.split(".")
        overload = "" if overload == "default" else overload
        recorded = _RECORDED_AS.get(base, base)
        module.register_factory(
            base, overload, _kernel(f"{recorded}.{overload or 'default'}"), name in default_dtype, recorded
        )


def _kernel(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            func = overload_named(name)
            layout = kwargs.get("layout")
            if layout is not None and layout is not torch.strided:
                raise unsupported(func._schema.name, f"layout {layout} was asked for")
            if kwargs.get("pin_memory"):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if "dtype" not in kwargs and facts_of(func).default_dtype:
                kwargs["dtype"] = torch.get_default_dtype()
            handles.check_index(kwargs.get("device"))
            with handles.below_autograd():
                recorder = recorder_of(func)
                return (recorder.handler or Recorder.record)(recorder, args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    return kernel
