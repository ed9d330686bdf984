"""The states of PyTorch's dispatcher in which concrete work is done."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from marid.native import module


def _keys(*names: str) -> torch._C.DispatchKeySet:
    found = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


_ALWAYS = _keys("BackendSelect")
_AUTOCAST = _keys("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")

# Everything above the kernels: a program is below autograd, autocast and every tracing layer by construction. What
# resolves conjugate and negative bits stays on; a dispatch into Python would have switched it off with the rest.
_ABOVE = _AUTOCAST | _keys(
    *("AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther", "AutogradPrivateUse1", "AutogradNestedTensor"),
    *("ADInplaceOrView", "Python", "PythonTLSSnapshot", "PythonDispatcher"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchGradWrapper", "FuncTorchBatched"),
    *("FuncTorchVmapMode", "Functionalize", "PreDispatch"),
)

concretely: Any = module.concretely(_ALWAYS.raw_repr(), _ABOVE.raw_repr())
"""Context manager: inside, ATen calls go straight to the kernels of concrete tensors, as if called outside of any
dispatch: no autograd, autocast, tensor subclass, mode or functional transform sees them."""


def as_called_by_users(inference: bool) -> AbstractContextManager[None]:
    """Inside, calls are dispatched as where no autocast, mode or functional transform is on; as in inference mode with
    tensors of ``inference``."""
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    included = _ALWAYS if inference or torch.is_inference_mode_enabled() else _ALWAYS | views
    return torch._C._ForceDispatchKeyGuard(included, _AUTOCAST)
