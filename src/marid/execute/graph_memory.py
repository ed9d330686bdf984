"""Results in the memory of captured graphs.

A graph writes its results to the same addresses whenever it runs. What it needs in between lies in memory that graphs
captured later may have results in, since all graphs of a device share a pool. A result can therefore stay where it is
until its graph, or one that was captured before it, runs again. Who holds it then gets memory of its own. By that time
most results are gone (gradients, saved activations), and nothing is copied.

Results are given away in storages that do not own their memory, and are followed by weak references, as in PyTorch's
CUDA graph trees (``torch/_inductor/cudagraph_trees.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from marid.native import module


class GraphResults:
    """Results of the graphs of one device that others may hold."""

    def __init__(self) -> None:
        # By the storage that was given away: a reference to it, the number of the graph, and what keeps its memory.
        self._given: dict[int, tuple[StorageWeakRef, int, torch.Tensor]] = {}
        self.moved = 0
        """How many were still held when their memory was needed."""

    def give(self, graph: int, result: torch.Tensor) -> torch.Tensor:
        """A result to be held until graph ``graph`` or one captured before it runs again, and beyond: its storage has
        other memory from then on."""
        given = module.borrowed(result)
        reference = StorageWeakRef(given.untyped_storage())
        self._given[reference.cdata] = reference, graph, result
        return given

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the memory of a graph, and so at the same address whenever that has run."""
        return tensor.untyped_storage()._cdata in self._given

    def move(self, graph: int) -> None:
        """Graph ``graph`` is about to run: copy what is still held of those captured at it or behind it."""
        due = [cdata for cdata, (_, number, _) in self._given.items() if number >= graph]
        held = [torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in due]
        blocks = [_as_words(storage) for storage in held if storage is not None and storage.nbytes()]
        for block, copy in zip(blocks, _copied(blocks), strict=True):
            module.exchange_memory(block, copy)
        self.moved += len(blocks)
        for cdata in [*due, *[cdata for cdata, (reference, _, _) in self._given.items() if reference.expired()]]:
            self._given.pop(cdata, None)


def _copied(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, of which many are made by few launches."""
    copies = [torch.empty_like(block) for block in blocks]
    if copies:
        torch.ops.aten._foreach_copy_.default(copies, list(blocks))
    return copies


def _as_words(block: torch.UntypedStorage) -> torch.Tensor:
    """All of a block of memory, in the largest elements that it is a multiple of."""
    nbytes = block.nbytes()
    dtype = next(one for one in (torch.int64, torch.int32, torch.uint8) if nbytes % one.itemsize == 0)
    return torch.empty(0, dtype=dtype, device=block.device).set_(block, 0, (nbytes // dtype.itemsize,), (1,))  # pyright: ignore[reportArgumentType]
