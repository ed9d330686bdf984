"""Composite operators that arrive whole: PyTorch's own code takes them apart, and their parts are recorded.

Autograd takes them apart before they come here. Where it is off (inference mode) they arrive as they were called.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_composite", "taken_apart"]

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def is_composite(func: Any) -> bool:
    """Whether the CPU has no kernel of its own for an operator, but composes it of others."""
    return _has_kernel(func.name(), "CompositeImplicitAutograd") and not _has_kernel(func.name(), "CPU")


def taken_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` returns, by the operators that it is composed of.

    In inference mode the CPU composes most of them above the kernels that track views, which a call that comes here has
    passed. A view of a parameter requires gradients there too, and ``matmul`` asks that of a transposed weight before
    it folds a batch into one matrix.
    """
    if not torch.is_inference_mode_enabled() or _has_kernel(func.name(), "ADInplaceOrView"):
        return func.decompose(*args, **kwargs)
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _VIEWS):
        return func.decompose(*args, **kwargs)
