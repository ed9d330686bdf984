"""The client's view of a worker's memory: which handles are alive, and the blocks that they lie in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from marid.engine.protocol import Geometry
from marid.graph.node import Node
from marid.remote.client.buffers import Block, RemoteBuffer
from marid.remote.client.programs import Sized
from marid.remote.client.steps import RunWork

__all__ = ["Memory"]


class Memory:
    """Hands out handles and keeps count of them. ``alive`` maps handles to block and geometry."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[Block, Geometry]] = {}
        self._dropped: deque[tuple[int, Block]] = deque()
        self._next = 1

    def take(self, count: int) -> int:
        """The first of so many new handles."""
        first, self._next = self._next, self._next + count
        return first

    def made(self, handle: int, geometry: Geometry, block: Block, node: Node | None) -> RemoteBuffer:
        """A tensor that is made on the worker, by the operation of ``node`` if there is one."""
        self.alive[handle] = block, geometry
        if node is not None and block.scope is None:
            block.site, block.scope = node.site, node.scope
        return RemoteBuffer(handle, geometry, block, self._dropped)

    def dropped(self) -> list[int]:
        """The handles that nobody holds any more, once."""
        handles: list[int] = []
        while self._dropped:
            handle, block = self._dropped.popleft()
            handles.append(handle)
            block.live -= 1
            self.alive.pop(handle, None)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """These do not exist, whoever holds them still."""
        for handle in handles:
            self.alive.pop(handle, None)

    def blocks(self) -> dict[int, tuple[Block, list[tuple[int, Geometry]]]]:
        """The blocks that are alive, by identity, with the handles that lie in each."""
        found: dict[int, tuple[Block, list[tuple[int, Geometry]]]] = {}
        for handle, (block, geometry) in self.alive.items():
            found.setdefault(block.identity, (block, []))[1].append((handle, geometry))
        return found

    # --- runs ---

    def enter(self, sized: Sized, inputs: list[RemoteBuffer], step: RunWork) -> None:
        """Note the blocks of a run in ``step``, by root slot, with those that are new."""
        for slot, buffer in zip(sized.known.program.input_slots, inputs, strict=True):
            step.blocks[slot] = buffer.block
            buffer.block.nbytes = max(buffer.block.nbytes, sized.extents.get(slot, 0))
        self.add(sized, sized.known.program.output_slots, step)

    def add(self, sized: Sized, slots: Sequence[int], step: RunWork) -> None:
        """Blocks for what a run makes in these slots."""
        made: list[Block] = []
        for slot in slots:
            root = sized.known.roots[slot]
            geometry = sized.geometry(root)
            if root not in step.blocks and geometry is not None:
                step.blocks[root] = block = Block(geometry, step.site, sized.extents[root])
                made.append(block)
        step.makes = (*step.makes, *made)

    def result(self, step: RunWork, slot: int, node: Node) -> RemoteBuffer:
        """The tensor that a run makes in a slot."""
        geometry = step.sized.geometry(slot)
        assert geometry is not None
        block = step.blocks[step.sized.known.roots[slot]]
        return self.made(step.base + slot, geometry, block, node)
