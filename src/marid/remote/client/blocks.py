"""What the client keeps of tensors on a worker: handles, the blocks of memory that they lie in, and what that is for.

Roles are for accounting, and are hints for what waits on the host; a hint may be wrong, and values never depend on it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from marid.graph.arguments import input_values
from marid.graph.node import Node, Spec, Value, fail, failure_of, root_of, without_frames
from marid.graph.program import Task
from marid.semantics.marks import marks
from marid.semantics.memory_roles import ACTIVATION, INPUT, made_as, written_as

_identities = itertools.count(1 << 62)  # above all addresses, with which they are compared


class Block:
    """Memory on a worker that a base and its views share.

    ``version`` is raised by every write. ``error`` is why its content is not to be had: a write failed, or the worker
    is gone. ``root`` is the geometry of the tensor it was made for, ``nbytes`` how far it reaches (as far as that
    tensor, unless more is known), ``site`` and ``scope`` say by which line and in which module.
    """

    __slots__ = (
        *("__weakref__", "error", "host", "identity", "nbytes"),
        *("marked", "role", "root", "scope", "site", "role_sent", "version"),
    )

    def __init__(self, root: Spec, site: Any, nbytes: int | None = None) -> None:
        self.identity = next(_identities)
        self.root = root
        self.nbytes = extent_of(root) if nbytes is None else nbytes
        self.version = 0
        self.error: Exception | None = None
        self.site = site
        self.scope: Any = None
        self.role: str | None = None
        self.marked = False  # by the user, who knows better
        self.role_sent: str | None = None
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

    def __init__(self, handle: int, geometry: Spec, block: Block, dropped: deque[tuple[int, Block]]) -> None:
        self.handle = handle
        self.geometry = geometry
        self.block = block
        self.brought: tuple[int, torch.Tensor] | None = None
        """Its value on the host, on its way to whoever asked for it, and the version of the block it is of."""
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append((self.handle, self.block))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.geometry.nbytes

    def __repr__(self) -> str:
        return f"RemoteBuffer({self.handle}, {list(self.geometry.shape)}, {self.geometry.dtype})"


def extent_of(of: Spec) -> int:
    """Bytes of memory from its beginning to the last element."""
    return (of.offset + of.span) * of.dtype.itemsize if of.numel else 0


class Memory:
    """Hands out handles and keeps count of them. ``alive`` maps handles to block and geometry."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[Block, Spec]] = {}
        self._dropped: deque[tuple[int, Block]] = deque()
        self._next = 1

    def take(self, count: int) -> int:
        """The first of so many new handles."""
        first, self._next = self._next, self._next + count
        return first

    def made(self, handle: int, geometry: Spec, block: Block, node: Node | None) -> RemoteBuffer:
        """A tensor that is made on the worker, by the operation of ``node`` if there is one."""
        self.alive[handle] = block, geometry
        if node is not None and block.scope is None:
            block.site, block.scope = node.site, node.scope
        return RemoteBuffer(handle, geometry, block, self._dropped)

    def dropped(self) -> list[int]:
        """The handles that nobody holds any more, once."""
        handles: list[int] = []
        while self._dropped:
            handle, _ = self._dropped.popleft()
            handles.append(handle)
            self.alive.pop(handle, None)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """These do not exist, whoever holds them still."""
        for handle in handles:
            self.alive.pop(handle, None)

    def blocks(self) -> dict[int, tuple[Block, list[tuple[int, Spec]]]]:
        """The blocks that are alive, by identity, with the handles that lie in each."""
        found: dict[int, tuple[Block, list[tuple[int, Spec]]]] = {}
        for handle, (block, geometry) in self.alive.items():
            found.setdefault(block.identity, (block, []))[1].append((handle, geometry))
        return found


# --- what memory is for ----------------------------------------------------------------------------------------------


def role_of(block: Block) -> str:
    """The role of a block, "input" for what came from the host and was never written."""
    return block.role or INPUT


def note_roles(task: Task, step: Any) -> None:
    """Learn from a run what the memory is for that it makes or writes (``semantics/memory_roles.py``)."""
    made = {block.identity for block in step.makes}
    for value in task.outputs:
        buffer = value.concrete
        if not isinstance(buffer, RemoteBuffer):
            continue
        marked = marks.get(root_of(value))
        if marked is not None:
            buffer.block.role, buffer.block.marked = marked, True
        elif buffer.block.identity in made and buffer.block.role is None:
            buffer.block.role = made_as(value)
    written = {block.identity for block in step.writes if block.role in (None, ACTIVATION) and not block.marked}
    if not written:
        return
    for node in task.nodes:
        role = written_as(node)
        if role is None:
            continue
        for value in input_values(node):
            root = root_of(value)
            buffer = root.concrete if isinstance(root.concrete, RemoteBuffer) else value.concrete
            if isinstance(buffer, RemoteBuffer) and buffer.block.identity in written:
                buffer.block.role = role


# --- what cannot be had ----------------------------------------------------------------------------------------------


def refuse_spoiled(task: Task) -> None:
    """Fail a node that needs what cannot be had, and raise why."""
    if all(buffer is not None and buffer.block.error is None for buffer in task.inputs):
        return
    for node in task.nodes:
        for value in input_values(node):
            buffer = value.concrete
            error = buffer.block.error if isinstance(buffer, RemoteBuffer) else failure_of(value.node)
            if error is not None:
                fail(node, error)
                raise without_frames(error)


def raise_spoiled(values: Sequence[Value]) -> None:
    """Raise why one of these values cannot be had; whoever asks for it later gets that too."""
    for value in values:
        if isinstance(value.concrete, RemoteBuffer) and value.concrete.block.error is not None:
            error = value.concrete.block.error
            value.concrete = None
            fail(value.node, error)
            raise without_frames(error)
