"""What kernels ask of the process that they run in: the client's switches are the worker's while it works for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from marid.errors import WireError
from marid.native import module
from marid.remote.wire.codec import as_list, dtype_name, dtype_named

__all__ = ["Switches", "apply", "current", "switches_from", "switches_to"]

_PRECISIONS = ("highest", "high", "medium")
_DEFAULTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # PyTorch takes no others as the default


class Switches(NamedTuple):
    """As ``torch.get_default_dtype()`` and the like have them; ``deterministic`` is 0, 1 (warn only) or 2."""

    default_dtype: torch.dtype = torch.float32
    deterministic: int = 0
    fill_uninitialized: bool = True
    precision: str = "highest"
    mkldnn: bool = True


_known: dict[int, Switches] = {}
"""By what C++ makes of them: one number, at a third of the time with cold caches, where each step asks."""


def current() -> Switches:
    """Those of this process."""
    key = module.switches()
    found = _known.get(key)
    if found is None:
        found = _known[key] = _asked()
    return found


def _asked() -> Switches:
    private: Any = torch._C
    deterministic = 0
    if private._get_deterministic_algorithms():
        deterministic = 1 if private._get_deterministic_algorithms_warn_only() else 2
    return Switches(
        torch.get_default_dtype(),
        deterministic,
        private._get_deterministic_fill_uninitialized_memory(),
        private._get_float32_matmul_precision(),
        private._get_mkldnn_enabled(),
    )


def apply(switches: Switches) -> None:
    """Set them in this process."""
    before = current()
    if switches is before or switches == before:
        return
    private: Any = torch._C
    if switches.default_dtype is not before.default_dtype:
        torch.set_default_dtype(switches.default_dtype)
    private._set_deterministic_algorithms(switches.deterministic > 0, warn_only=switches.deterministic == 1)
    private._set_deterministic_fill_uninitialized_memory(switches.fill_uninitialized)
    private._set_float32_matmul_precision(switches.precision)
    private._set_mkldnn_enabled(switches.mkldnn)


def switches_to(switches: Switches) -> list[Any]:
    """As plain data."""
    return [dtype_name(switches.default_dtype), *switches[1:]]


def switches_from(data: Any) -> Switches:
    """What ``switches_to`` was given. Raises ``WireError``."""
    parts = as_list(data, 5, "switches")
    if len(parts) != 5:
        raise WireError("there are five switches")
    dtype, deterministic, fill, precision, mkldnn = parts
    found = Switches(dtype_named(dtype), deterministic, fill, precision, mkldnn)
    fits = type(deterministic) is int and 0 <= deterministic <= 2 and type(fill) is bool and type(mkldnn) is bool
    if not fits or precision not in _PRECISIONS or found.default_dtype not in _DEFAULTS:
        raise WireError("a switch has a value that it cannot have")
    return found
