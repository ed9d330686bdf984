"""What kernels ask of the process that they run in: the client's settings are the worker's while it works for it."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from marid.native import module
from marid.remote.wire.fields import FLAG, choice, whole

_DEFAULT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # PyTorch takes no others
_PRODUCTS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""The precision of products by that of oneDNN's, which ``torch.set_float32_matmul_precision`` sets."""
_PRECISIONS = tuple(_PRODUCTS)


class KernelSettings(NamedTuple):
    """As ``torch.get_default_dtype()`` and the like have them; ``deterministic`` is 0, 1 (warn only) or 2."""

    default_dtype: Annotated[torch.dtype, choice(_DEFAULT_DTYPES, "default dtype")] = torch.float32
    deterministic: Annotated[int, whole(0, 2, "deterministic algorithms")] = 0
    fill_uninitialized: Annotated[bool, FLAG] = True
    precision: Annotated[str, choice(("highest", "high", "medium"), "precision of products")] = "highest"
    mkldnn: Annotated[bool, FLAG] = True
    convolutions: Annotated[str, choice(_PRECISIONS, "precision of convolutions")] = "none"
    recurrent: Annotated[str, choice(_PRECISIONS, "precision of recurrent layers")] = "none"


_by_key: dict[int, KernelSettings] = {}
"""By what C++ makes of them: one number, at a third of the time with cold caches, where each step asks."""


def current() -> KernelSettings:
    """Those of this process."""
    key = module.switches()
    found = _by_key.get(key)
    if found is None:
        found = _by_key[key] = _asked()
    return found


def _asked() -> KernelSettings:
    private: Any = torch._C
    deterministic = 0
    if private._get_deterministic_algorithms():
        deterministic = 1 if private._get_deterministic_algorithms_warn_only() else 2
    return KernelSettings(
        torch.get_default_dtype(),
        deterministic,
        private._get_deterministic_fill_uninitialized_memory(),
        _PRODUCTS[private._get_fp32_precision_getter("mkldnn", "matmul")],
        private._get_mkldnn_enabled(),
        *[private._get_fp32_precision_getter("mkldnn", operation) for operation in ("conv", "rnn")],
    )


def apply(settings: KernelSettings) -> None:
    """Set them in this process."""
    before = current()
    if settings is before or settings == before:
        return
    private: Any = torch._C
    if settings.default_dtype is not before.default_dtype:
        torch.set_default_dtype(settings.default_dtype)
    private._set_deterministic_algorithms(settings.deterministic > 0, warn_only=settings.deterministic == 1)
    private._set_deterministic_fill_uninitialized_memory(settings.fill_uninitialized)
    private._set_float32_matmul_precision(settings.precision)
    private._set_mkldnn_enabled(settings.mkldnn)
    private._set_fp32_precision_setter("mkldnn", "conv", settings.convolutions)
    private._set_fp32_precision_setter("mkldnn", "rnn", settings.recurrent)
