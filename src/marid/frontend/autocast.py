"""``torch.autocast("remote_accelerator")``: which operators run in lower precision, with the CPU's lists, or with
CUDA's under ``marid run --as-cuda`` (``ops/autocast_lists.py``)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from marid.frontend import handles
from marid.native import module
from marid.ops import autocast_lists as lists
from marid.ops.facts import facts_of

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_libraries: list[torch.library.Library] = []
_registering = threading.RLock()
"""Held while that changes: threads, such as those of ``nn.DataParallel``, may be the first to ask together."""
_listed: set[str] = set()


def supported_dtypes() -> list[torch.dtype]:
    """What autocast casts to on the device, for ``torch.autocast``, which asks for it before anything is cast."""
    _have_lists()
    return [torch.bfloat16, torch.float16]


def listing(switch: Callable[..., None]) -> Callable[..., None]:
    """``torch.set_autocast_enabled``, by which it may be on without that question (``torch.autocast(str(device))``)."""
    if is_on():
        _have_lists()

    @functools.wraps(switch)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        switch(*args, **kwargs)
        if is_on():
            _have_lists()

    return wrapper


def _have_lists() -> None:
    """Register CPU autocast's lists, unless others are: every operator in PyTorch gets a kernel by that, which takes 4
    ms."""
    with _registering:
        if not _libraries:
            try:
                _register(lists.CPU)
            except BaseException:  # Ctrl-C, say: the next use begins anew
                _unregister()
                raise


def use_cuda_lists() -> None:
    """Replace the lists by CUDA autocast's, for scripts written for GPUs."""
    with _registering:
        _register(lists.CUDA)


def without() -> Any:
    """Context manager: inside, autocast is off for the device, whatever the user says."""
    return torch._C._ExcludeDispatchKeyGuard(_KEY)


def _unregister() -> None:
    module.autocasts({})
    while _libraries:
        _libraries.pop()._destroy()


def _register(policies: Mapping[str, Sequence[str]]) -> None:
    _unregister()
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.append(fallthrough)
    exists = torch._C._dispatch_has_kernel
    existing = {policy: [name for name in names if exists(f"aten::{name}")] for policy, names in policies.items()}
    _listed.clear()
    _listed.update(f"aten::{name}" for names in existing.values() for name in names)
    _known.clear()
    module.autocasts(existing)


# --- what is composed of operators on the lists ----------------------------------------------------------------------

_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_known: dict[Any, bool] = {}


def is_on() -> bool:
    """Whether autocast is on where this is called: below the kernels of listed operators it is not."""
    return torch.is_autocast_enabled(handles.DEVICE_TYPE)


def may_call_listed(func: Any) -> bool:
    """Whether the CPU composes this operator of others below autograd, and perhaps of some on the lists."""
    return _composite_key(func) is not None and _known.get(func, True)


def calls_listed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what the operator is composed of is on the lists, so that autocast changes it.

    Tried once for each operator, with tensors that are not empty: for those most do nothing.
    """
    found = _known.get(func)
    if found is None:
        found = _try(func, args, kwargs)
        if found or all(item.numel() for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)):
            _known[func] = found
    return found


def taken_apart(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the operator returns, by the operators that it is composed of."""
    return func._op_dk(_composite_key(func), *args, **kwargs)


def _composite_key(func: Any) -> torch._C.DispatchKey | None:
    """Where the CPU finds the kernel that composes the operator of others; None where it calculates by itself."""
    if facts_of(func).composed_on_cpu:
        return torch._C.DispatchKey.CPU
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    if has_kernel(name, "CPU"):
        return None
    return next((getattr(torch._C.DispatchKey, key) for key in _COMPOSITES if has_kernel(name, key)), None)


class _Watch(TorchDispatchMode):
    """Notes whether operators on the lists are called."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.listed = self.listed or func.name() in _listed
        if self.listed or _composite_key(func) is None:
            return func(*args, **(kwargs or {}))
        with self:
            return taken_apart(func, args, kwargs or {})


def _try(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    def stand_in(thing: Any) -> Any:
        if isinstance(thing, torch.device):
            return torch.device("meta")
        return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device="meta")

    args, kwargs = tree_map_only((torch.Tensor, torch.device), stand_in, (args, dict(kwargs)))
    watch = _Watch()
    try:
        with watch:
            taken_apart(func, args, kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        pass  # wrong arguments, or values are needed: what was called until then tells
    return watch.listed
