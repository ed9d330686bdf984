"""Operators without a tensor argument, registered on the device one by one: each records a single node.

A blanket fallback for the device would be shorter, but it breaks ``torch.tensor(data, device=...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.eager import unsupported
from marid.frontend.record import Recorder, recorder_of
from marid.semantics.tracebacks import fold

__all__ = ["register"]

_FACTORIES = """
    empty.memory_format empty_strided
    zeros ones full scalar_tensor eye eye.m
    arange arange.start arange.start_step range range.step
    linspace linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor
    logspace logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor
    rand rand.generator randn randn.generator
    randint randint.generator randint.low randint.low_generator randperm randperm.generator
    tril_indices triu_indices _efficientzerotensor
    hann_window hann_window.periodic hamming_window hamming_window.periodic hamming_window.periodic_alpha
    hamming_window.periodic_alpha_beta blackman_window blackman_window.periodic bartlett_window
    bartlett_window.periodic kaiser_window kaiser_window.periodic kaiser_window.beta
""".split()


def register() -> Callable[[], None]:
    """Give every factory its device kernel. Returns what takes it away."""
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is not None and (overload or "default") in packet.overloads():
            library.impl(name, _kernel(_operator(name)), "PrivateUse1")
    for name in ("empty.memory_format", "zeros", "empty_strided"):
        for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1"):
            library.impl(name, _kernel(_operator(name)), key)
    for name in _partly_composite():
        library.impl(name, _recording(_operator(name)), "PrivateUse1")
    # torch.tensor(data, device=...) calls these with tensor subclasses switched off.
    for name in ("copy_", "_copy_from", "_to_copy", "_local_scalar_dense"):
        library.impl(name, _recording(getattr(torch.ops.aten, name).default), "PrivateUse1")
    return library._destroy


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
            if "dtype" not in kwargs and func in _TYPED:
                kwargs["dtype"] = torch.get_default_dtype()
            handles.check_index(kwargs.get("device"))
            with handles.below_autograd():
                recorder = recorder_of(func)
                return (recorder.handler or Recorder.record)(recorder, args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    return kernel


_TYPED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.rand.generator,
    torch.ops.aten.randn.default,
    torch.ops.aten.randn.generator,
    torch.ops.aten.eye.default,
    torch.ops.aten.eye.m,
}


def _recording(func: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(func)
        try:
            with handles.below_autograd():
                return (recorder.handler or Recorder.record)(recorder, args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    return kernel


def _partly_composite() -> list[str]:
    """Operators with a CPU kernel and a decomposition: without a kernel of its own the device would get the latter."""
    with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key
    names = set(with_kernel("CompositeImplicitAutograd")) & set(with_kernel("CPU"))
    return sorted(name for name in names if name.startswith("aten::"))


def _operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")
