"""What the client keeps of tensors on a worker: handles, and the blocks of memory that they lie in."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Any

import torch

from marid.engine.protocol import Geometry
from marid.graph.node import Spec, without_frames

__all__ = ["Block", "RemoteBuffer", "extent_of", "geometry_of_spec"]

_identities = itertools.count(1 << 62)  # above all addresses, with which they are compared


class Block:
    """Memory on a worker that a base and its views share.

    ``version`` is raised by every write. ``live`` counts the handles that somebody holds. ``error`` is why its
    content is not to be had: a write failed, or the worker is gone. ``root`` is the geometry of the tensor it was
    made for, ``nbytes`` how far it reaches (as far as that tensor, unless more is known), ``site`` and ``scope`` say by
    which line and in which module.
    """

    __slots__ = (
        *("__weakref__", "error", "host", "identity", "live", "nbytes"),
        *("marked", "role", "root", "scope", "site", "told", "version"),
    )

    def __init__(self, root: Geometry, site: Any, nbytes: int | None = None) -> None:
        self.identity = next(_identities)
        self.root = root
        self.nbytes = extent_of(root) if nbytes is None else nbytes
        self.version = 0
        self.live = 0
        self.error: Exception | None = None
        self.site = site
        self.scope: Any = None
        self.role: str | None = None
        self.marked = False  # by the user, who knows better
        self.told: str | None = None
        """The role that the worker knows of."""
        self.host: tuple[int, weakref.ref[torch.UntypedStorage]] | None = None
        """A copy on the host that somebody may still have, and the version it is of."""

    def check(self) -> None:
        """Raise why its content is not to be had, if so: an error of its own for each who asks, since the frames that
        one has passed live as long as it does."""
        if self.error is not None:
            raise without_frames(self.error)


class RemoteBuffer:
    """A tensor on a worker. When nobody holds it, its handle goes to ``dropped``, to be freed with the next message."""

    __slots__ = ("__weakref__", "_dropped", "block", "brought", "geometry", "handle")

    def __init__(self, handle: int, geometry: Geometry, block: Block, dropped: deque[tuple[int, Block]]) -> None:
        self.handle = handle
        self.geometry = geometry
        self.block = block
        self.brought: tuple[int, torch.Tensor] | None = None
        """Its value on the host, on its way to whoever asked for it, and the version of the block it is of."""
        self._dropped = dropped
        block.live += 1

    def __del__(self) -> None:
        self._dropped.append((self.handle, self.block))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.geometry.dtype.itemsize
        for size in self.geometry.shape:
            count *= size
        return count

    def __repr__(self) -> str:
        return f"RemoteBuffer({self.handle}, {list(self.geometry.shape)}, {self.geometry.dtype})"


def geometry_of_spec(spec: Spec) -> Geometry:
    """The same without the device."""
    return Geometry(spec.shape, spec.stride, spec.offset, spec.dtype, spec.conj, spec.neg)


def extent_of(of: Geometry | Spec) -> int:
    """Bytes of memory from its beginning to the last element."""
    if 0 in of.shape:
        return 0
    last = of.offset + sum((size - 1) * step for size, step in zip(of.shape, of.stride, strict=True))
    return (last + 1) * of.dtype.itemsize
