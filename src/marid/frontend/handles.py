"""Handles: making the tensor objects that users hold, without data, at the lowest cost PyTorch allows.

Specs are interned here, and each keeps a *pattern*: a data-less device tensor of its geometry from which new handles
are copied (``native/handle.cpp``).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from marid.graph.node import Node, Spec, Storage, Value
from marid.graph.tape import Tape
from marid.native import module
from marid.registration import DEVICE_TYPE, device_module, first_use
from marid.semantics.scopes import current_scope, current_site
from marid.settings import settings

if TYPE_CHECKING:
    from marid.frontend.tensor import LazyTensor

device_count = settings.devices
tapes = [Tape(index) for index in range(device_count)]
"""Of each device, by its index."""
_handle_class: Any = None
_specs: weakref.WeakValueDictionary[tuple[Any, ...], Spec] = weakref.WeakValueDictionary()
_specs_lock = threading.Lock()


def bind_handle_class(cls: type) -> None:
    """Name the tensor class that handles are made of; called once, where it is defined."""
    global _handle_class
    _handle_class = cls
    module.make_handles(cls)


def current_device() -> int:
    """The index of the current device of this thread."""
    return module.current_device()


def check_index(device: Any) -> None:
    """Raise PyTorch's kind of error for a device index that does not exist."""
    if device is not None:
        index = torch.device(device).index
        if index is not None and index >= device_count:
            raise RuntimeError(
                f"{DEVICE_TYPE} error: invalid device ordinal: {DEVICE_TYPE}:{index} does not exist, "
                f"{device_count} device(s) are available (MARID_DEVICES sets how many)"
            )


def is_lazy(thing: Any) -> bool:
    """Whether ``thing`` is a lazy tensor."""
    return isinstance(thing, _handle_class)


def tape(index: int) -> Tape:
    """The tape of device ``index``."""
    return tapes[index]


def ops_immediate() -> int:
    """How many operations have run at once since the process began."""
    return module.performed()


def record_again() -> None:
    """Have no operation run at once (``frontend/ahead.py``) from now on."""
    for one in tapes:
        one.immediate = False


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Inside, no operation of this thread runs at once, whatever other threads do."""
    module.record_here(1)
    try:
        yield
    finally:
        module.record_here(-1)


def spec(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: int,
    conj: bool = False,
    neg: bool = False,
) -> Spec:
    """The interned spec."""
    key = (shape, stride, offset, dtype, device, conj, neg)
    found = _specs.get(key)
    if found is None:
        with _specs_lock:
            found = _specs.get(key)
            if found is None:
                found = Spec(*key)
                found.pattern = _pattern(found)
                _specs[key] = found
    return found


def spec_like(of: Spec, device: int) -> Spec:
    """The interned spec with the geometry and dtype of ``of``, on another device."""
    return spec(of.shape, of.stride, of.offset, of.dtype, device, of.conj, of.neg)


def spec_of(tensor: torch.Tensor, device: int) -> Spec:
    """The spec of a strided tensor, as it would be on lazy device ``device``."""
    return spec(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _pattern(of: Spec) -> torch.Tensor:
    with torch.inference_mode(False):  # else every handle like it would be an inference tensor, for good
        pattern = torch._C._acc.create_empty_tensor((0,), of.dtype)
    module.set_geometry(pattern._cdata, of.device, of.shape, of.stride, of.offset)
    _set_bits(pattern, of)
    return pattern


def _set_bits(tensor: torch.Tensor, of: Spec) -> None:
    if of.conj:
        torch._C._set_conj(tensor, True)
    if of.neg:
        torch._C._set_neg(tensor, True)


# A handle copied from a pattern must not share the pattern's version counter: nothing that tracks views may see it.
_BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse1) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)


def below_autograd() -> Any:
    """A context manager: inside, operations on the device are recorded without autograd seeing them."""
    return torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD)


def new_handle(value: Value, of: Spec, storage: Storage | None, alone: bool = False) -> LazyTensor:
    """A tensor for ``value``; only below autograd (inside a dispatch), elsewhere use ``wrap``. To PyTorch's C++ all
    handles of a spec seem to share memory, but for one that is made ``alone``."""
    handle = module.new_handle(of.pattern._cdata, value, alone)
    handle._storage = storage
    return handle


def wrap(value: Value, of: Spec, storage: Storage | None = None, alone: bool = False) -> LazyTensor:
    """A tensor for ``value``, made anywhere; see ``new_handle``."""
    with below_autograd():
        return new_handle(value, of, storage, alone)


def source(buffer: torch.Tensor, of: Spec, root: Value | None = None) -> Node:
    """A value that already is concrete."""
    if not device_module._initialized:
        first_use()
    on = tapes[of.device]
    node = Node(next(on.sequence), None, None, None, of, root, current_site(), current_scope())
    node.concrete = buffer
    on.note_resident([node])
    return node


def user_attributes(handle: torch.Tensor) -> dict[str, Any]:
    """The attributes that a user (or ``nn.Parameter``) has set on a tensor."""
    return dict(handle.__dict__)


def storage_of(handle: LazyTensor) -> Storage:
    """The storage record of a tensor, made when a view, a write or an alias first needs it."""
    found = handle._storage
    if found is None:
        # Reads before this moment were not noted, so any of them may still be pending.
        found = handle._storage = Storage(next(tapes[handle._value.spec.device].sequence))  # pyright: ignore[reportOptionalMemberAccess]
    return found
