"""``pickle`` and ``torch.save``: lazy tensors are written like tensors of any device, with their storages shared.

The file is an ordinary PyTorch file whose storages have the location ``remote_accelerator:i``: ``weights_only=True``
and ``map_location`` work, and aliases in it stay aliases.
"""

from __future__ import annotations

from collections import OrderedDict
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from marid.errors import UnsupportedOperationError
from marid.execute.kernel_warnings import warn_of
from marid.frontend import handles, storage_objects
from marid.frontend.engines import engine_of
from marid.frontend.materialize import read
from marid.frontend.subclasses import is_parameter, user_class

_LOCATION = "_marid_location"  # see registration.py
_COPIED = (
    f"tensors of {handles.DEVICE_TYPE} are copied for the process that is started: what either of the two writes to "
    "them the other does not see (keep on the CPU what processes share)"
)


def reduce(tensor: Any) -> Any:
    """The pickle reduction of a lazy tensor."""
    buffer = read(tensor, "pickle", whole=True).resolve_conj().resolve_neg()
    storage = buffer.untyped_storage()
    setattr(storage, _LOCATION, str(tensor.device))
    is_new = buffer.dtype in torch.storage._new_dtypes()  # which has no storage class, nor a place in the older call
    typed = _DeviceStorage(storage, torch.uint8 if is_new else buffer.dtype)
    rebuild = torch._utils._rebuild_tensor_v3 if is_new else torch._utils._rebuild_tensor_v2
    hooks: OrderedDict[int, Any] = OrderedDict()
    whole = typed, buffer.storage_offset(), tuple(buffer.shape), buffer.stride()

    def arguments(requires_grad: bool) -> tuple[Any, ...]:
        return (*whole, requires_grad, hooks, *([buffer.dtype] if is_new else []))

    if not is_parameter(tensor):
        attributes, cls = handles.user_attributes(tensor), user_class(tensor)
        if cls is torch.Tensor and attributes and tensor.requires_grad:
            # The rebuilt one is cast to torch.Tensor, which makes a view: a leaf if it needs no gradients till then.
            typed_call = rebuild, cls, arguments(False), {**attributes, "requires_grad": True}
            return torch._tensor._rebuild_from_type_v2, typed_call
        if attributes or cls is not torch.Tensor:
            typed_call = rebuild, cls, arguments(tensor.requires_grad), attributes
            return torch._tensor._rebuild_from_type_v2, typed_call
        return rebuild, arguments(tensor.requires_grad)
    data = _Reduced(rebuild, arguments(False))
    state = {name: value for name, value in handles.user_attributes(tensor).items() if name != "_is_param"}
    if state:
        return torch._utils._rebuild_parameter_with_state, (data, tensor.requires_grad, hooks, state)
    return torch._utils._rebuild_parameter, (data, tensor.requires_grad, hooks)


class _Reduced:
    """An object that pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduction = (function, arguments)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return self._reduction


class _DeviceStorage(torch.TypedStorage):
    """A storage that ``torch.save`` writes with its location, and plain ``pickle`` as a call that moves it there."""

    def __new__(cls, *_args: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype) -> None:
        super().__init__(wrap_storage=untyped, dtype=dtype, _internal=True)

    def __reduce__(self) -> Any:
        untyped = self._untyped_storage
        plain = torch.TypedStorage(wrap_storage=untyped.clone(), dtype=self.dtype, _internal=True)
        child: Any = get_spawning_popen()
        if child is not None:  # it is given the memory itself, by a descriptor, after all arguments are pickled
            if not hasattr(child, "tensors"):
                warn_of([_COPIED])
            child.tensors = [*getattr(child, "tensors", []), plain]
        return _storage_at, (plain, getattr(untyped, _LOCATION))


def _storage_at(storage: torch.TypedStorage, location: str) -> torch.TypedStorage:
    restored = _placed(storage._untyped_storage, location)
    return torch.TypedStorage(wrap_storage=restored, dtype=storage.dtype, _internal=True)


def restore(storage: Any, location: str) -> Any:
    """What ``torch.load``, or with a ``TypedStorage`` ``torch.package``, makes of a storage for the device."""
    if getattr(storage, "_torch_load_uninitialized", False):
        raise UnsupportedOperationError(
            "a file in PyTorch's legacy format cannot be loaded onto remote_accelerator directly; "
            "load it with map_location='cpu' and move the result"
        )
    return _storage_at(storage, location) if isinstance(storage, torch.TypedStorage) else _placed(storage, location)


def _placed(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """A device storage with the bytes of a CPU storage."""
    index = torch.device(location).index
    index = handles.current_device() if index is None else index
    if index >= handles.device_count:
        raise RuntimeError(
            f"Attempting to deserialize object on {handles.DEVICE_TYPE} device {index} but "
            f"torch.{handles.DEVICE_TYPE}.device_count() is {handles.device_count}. Please use torch.load with "
            "map_location to map your storages to an existing device."
        )
    plain = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    buffer, spec = engine_of(index).upload(plain), handles.spec_of(plain, index)
    base = handles.wrap(handles.source(buffer, spec), spec)
    made = storage_objects.untyped_storage(base)
    return storage_objects.keep_with(made, base)
