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


def register() -> None:
    """Give every factory its device kernel."""
    for name in named("factory"):
        func = overload_named(name)
        if func is not None:
            schema = func._schema
            default_dtype = facts_of(func).default_dtype
            module.register_factory(schema.name, schema.overload_name, _kernel(func), default_dtype)


def _kernel(func: Any) -> Any:
    if func is torch.ops.aten._efficientzerotensor.default:
        func = torch.ops.aten.zeros.default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
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
