"""PyTorch storage objects for lazy tensors: identity and size for whoever compares them, never data.

``tensor.untyped_storage()`` gives one ``torch.UntypedStorage`` for all aliases, with a unique made-up address, so that
code which finds tied weights or overlapping tensors by address works. ``set_`` maps such an object back, and
``resize_`` of one resizes the memory that it stands for.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import run_everything
from marid.graph.dispatch_state import concretely
from marid.graph.node import Storage, root_of

# Far above what a process can map, so that a made-up address is never a real one.
_addresses = itertools.count(1 << 56, 1 << 40)
_by_identity: dict[int, tuple[weakref.ref[Storage], Any]] = {}


def untyped_storage(tensor: Any) -> torch.UntypedStorage:
    """The storage object of a lazy tensor; ``nbytes()`` is the size of the memory it lies in."""
    storage = handles.storage_of(tensor)
    root = root_of(tensor._value)
    nbytes = max(_extent(root), _extent(tensor._value))
    if storage.handle is None or storage.handle.nbytes() < nbytes:  # memory may have grown (resize_, out=)
        made = torch._C._construct_storage_from_data_pointer(
            next(_addresses), torch.device(handles.DEVICE_TYPE, tensor._value.spec.device), nbytes
        )
        storage.handle = made
        identity = made._cdata
        _by_identity[identity] = (weakref.ref(storage, lambda _: _by_identity.pop(identity, None)), weakref.ref(root))
    return storage.handle


def resize_memory(identity: int, nbytes: int) -> None:
    """``resize_`` of the storage object at an address, as fully sharded parameters have it to free memory and to take
    it again: for all aliases, after what was recorded. On a worker memory is freed with its tensors alone: it stays as
    it is, and raises ``RuntimeError`` where it would have to grow. Where no tensor lives, there is no memory."""
    _, found = _by_identity.get(identity, (None, None))
    root = None if found is None else found()
    if root is None:
        return
    run_everything(handles.tape(root.spec.device))  # a failure is raised where its value is read
    if root.concrete is not None:
        engine_of(root.spec.device).resize(root.concrete, nbytes)


def _extent(value: Any) -> int:
    spec = value.spec
    if spec is None:
        return 0
    block = None if value.concrete is None else engine_of(spec.device).memory(value.concrete)
    if block is not None and block[0] >= 0:  # else it waits elsewhere
        return block[1]
    return 0 if 0 in spec.shape else (spec.offset + spec.span) * spec.dtype.itemsize


def storage_behind(storage: torch.UntypedStorage, dtype: torch.dtype, device: int) -> Any:
    """A flat lazy tensor over all of ``storage``; raises ``RuntimeError`` for a storage of another device."""
    entry = _by_identity.get(storage._cdata)
    shared = entry[0]() if entry is not None else None
    root = entry[1]() if entry is not None else None
    if shared is None or root is None:
        if storage.device.type != "cpu":
            raise RuntimeError(
                f"set_() got a storage on {storage.device} that belongs to no living tensor; where PyTorch's C++ asks "
                "for the memory of a tensor, as TorchScript does, move the tensor to the CPU first, with .cpu()"
            )
        with concretely():
            buffer = torch.empty(0, dtype=dtype, device="cpu").set_(storage)
        spec = handles.spec_of(buffer, device)
        return handles.wrap(handles.source(engine_of(device).upload(buffer), spec), spec)
    whole = handles.wrap(root, root.spec, shared)
    flat = torch.ops.aten.as_strided.default(whole, (storage.nbytes() // root.spec.dtype.itemsize,), (1,), 0)
    return _numbers_of(flat, dtype)


def _numbers_of(flat: Any, dtype: torch.dtype) -> Any:
    """One-dimensional memory in another dtype, without the bytes behind the last whole number."""
    if flat.dtype == dtype:
        return flat
    whole = flat.numel() - flat.numel() % max(dtype.itemsize // flat.dtype.itemsize, 1)
    if whole != flat.numel():
        flat = flat.as_strided((whole,), (1,), 0)
    return torch.ops.aten.view.dtype(flat, dtype)


_kept: dict[int, Any] = {}


def keep_with(storage: torch.UntypedStorage, base: Any) -> torch.UntypedStorage:
    """Keep ``base`` alive as long as ``storage``, the only way to it (while a file is loaded)."""
    base._storage.handle = None  # the storage must not be kept by what it keeps
    identity = storage._cdata
    _kept[identity] = base
    weakref.finalize(storage, _kept.pop, identity, None)
    return storage


def copy_with_aliases(tensor: Any, memo: dict[Any, Any]) -> Any:
    """A copy with the same strides; tensors that share memory get copies that share memory, by ``memo``."""
    if tensor._value.concrete is not None:
        handles.storage_of(tensor)  # of what ran at once it is not known before whether it shares memory
    if tensor._storage is None:
        return _whole(_restrided(tensor.detach().clone(), tensor))
    key = ("marid storage", id(tensor._storage))
    if key not in memo:
        flat = storage_behind(untyped_storage(tensor), root_of(tensor._value).spec.dtype, tensor.device.index)  # pyright: ignore[reportOptionalMemberAccess]
        memo[key] = (flat.clone(), tensor._storage)
    block = _numbers_of(memo[key][0], tensor.dtype)
    return _whole(block.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))


def _whole(copied: Any) -> Any:
    """The same, as PyTorch leaves what it put a storage into: no view to autograd, and changed once."""
    made = handles.wrap(copied._value, copied._value.spec, handles.storage_of(copied))
    torch.autograd.graph.increment_version(made)
    return made


def _restrided(copied: Any, like: Any) -> Any:
    if copied.stride() == like.stride():
        return copied
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.copy_(copied)
