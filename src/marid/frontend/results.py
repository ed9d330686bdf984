"""What a recorded call returns: handles for its results; and what it must see, and could overtake, of other calls.

``native/results.cpp`` and ``native/order.cpp`` do the same for the usual calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from marid.frontend import handles
from marid.frontend.handles import new_handle, storage_of
from marid.graph.node import Node, Output, Spec, Storage, Value, last_write, root_of


def order(node: Node, tensors: list[Any], writes: Sequence[int]) -> None:
    """Note what the node must see and, for what it writes, who may still have to read."""
    storages = [storage for tensor in tensors if (storage := tensor._storage) is not None]
    if not storages and not writes:
        return
    after = [write for storage in storages if (write := last_write(storage)) is not None]
    overwrites: list[Value] = []
    for index in writes:
        storage = storage_of(tensors[index])
        write = storage.last_write
        if storage.last_read > (write.seq if write is not None else 0):
            overwrites.append(root_of(tensors[index]._value))
        storage.last_write = node
    for tensor in tensors:
        if tensor._storage is not None:
            tensor._storage.last_read = node.seq
    for index in writes:
        tensors[index]._storage.last_read = 0
    node.after = tuple(after) if after else None
    node.overwrites = tuple(overwrites) if overwrites else None


def results_of(node: Node, described: Any, tensors: list[Any], outs: list[ref[Output]]) -> Any:
    """Handles in the shape of the return value; fills ``outs`` for nodes with several results."""
    if described is None:
        return None
    if type(described) is list:
        return [results_of(node, part, tensors, outs) for part in described]
    if described.same_as is not None:
        return tensors[described.same_as]
    spec = described.spec
    root: Value | None = None
    storage: Storage | None = None
    if described.view_of is not None:
        base = tensors[described.view_of]
        root, storage = root_of(base._value), storage_of(base)
    out = Output(node, described.path, spec, root)
    outs.append(ref(out))
    return new_handle(out, spec, storage)


def set_geometry(tensor: Any, spec: Spec) -> None:
    """Let the handle and its value show a new geometry."""
    tensor._value.spec = spec
    retarget(tensor, tensor._value, storage_of(tensor))


def retarget(tensor: Any, value: Value, storage: Storage | None) -> None:
    """Make ``tensor`` a handle of another value: what ``.data =`` and ``set_`` do."""
    assert value.spec is not None
    if tensor.is_conj() != value.spec.conj:
        torch._C._set_conj(tensor, value.spec.conj)
    if tensor.is_neg() != value.spec.neg:
        torch._C._set_neg(tensor, value.spec.neg)
    with handles.below_autograd():
        torch._C.TensorBase.data.__set__(tensor, new_handle(value, value.spec, storage))  # pyright: ignore
    tensor._value = value
    tensor._storage = storage
