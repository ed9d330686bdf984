"""What stays in the memory of a device that does not hold everything, and what waits on the host.

What was used least recently of the least precious role is spilled first: activations before what was uploaded, before
gradients, optimizer state, caches, and weights last. A role is a hint; a wrong one makes memory go out and come back
more often, and changes no value. Memory goes as a whole, with all tensors that lie in it: its storage is emptied in
place, so the tensors stay what they are, and must not be used before ``bring``. On the host it is pageable memory for a
device that is none, and a file that nobody can name for the CPU.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ROLES = (
    *("activation", "other", "input", "gradient", "optimizer state"),
    *("recurrent state", "kv cache", "buffer", "weight"),
)
"""What memory is for; what is spilled first comes first."""
_USUAL = ROLES.index("activation")


class _Block:
    """The memory of a storage that is alive. ``away`` are its bytes while it is on the host."""

    __slots__ = ("away", "rank", "ref")

    def __init__(self, storage: torch.UntypedStorage, rank: int) -> None:
        self.ref = StorageWeakRef(storage)
        self.rank = rank
        self.away: _Away | None = None


class _Away:
    """The bytes of a storage on the host. Raises ``OSError`` when there is no room for them."""

    def __init__(self, data: torch.Tensor) -> None:
        self.nbytes = data.numel()
        self._data = data.cpu() if data.device.type != "cpu" else None
        self._file = None
        if self._data is None:
            self._file = tempfile.TemporaryFile(prefix="marid-spill-", buffering=0)  # noqa: SIM115  (closed with this)
            left = data.clone().numpy().data  # memory that numpy has seen cannot be given back
            while left:
                left = left[self._file.write(left) :]

    def put(self, data: torch.Tensor) -> None:
        """Give them back, into memory as large."""
        if self._data is not None:
            data.copy_(self._data)
            return
        assert self._file is not None
        self._file.seek(0)
        kept = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        left = kept.numpy().data
        while left:
            left = left[self._file.readinto(left) :]
        data.copy_(kept)


class Residency:
    """The memory that is held on one device. ``spill_limit`` are the bytes that may be away; 0 for none."""

    def __init__(self, device: torch.device, spill_limit: int = 0) -> None:
        self.device = device
        self.spill_limit = spill_limit
        self.spilled = 0
        """Bytes that are away."""
        self.moved = 0
        """Bytes that went out or came back, ever."""
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by storage, the least recently used first
        self._look_at = 1024
        self._moving = threading.Lock()

    def note(self, tensor: torch.Tensor, rank: int = _USUAL) -> None:
        """A tensor is held from now on."""
        if not self.spill_limit:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = _Block(storage, rank)
        if len(self._blocks) > self._look_at:
            self.forget()
            self._look_at = 2 * len(self._blocks) + 1024

    def hint(self, tensor: torch.Tensor, rank: int) -> None:
        """What the memory of a tensor is for."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None:
            block.rank = rank

    def release(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor here until it is noted again."""
        self._blocks.pop(tensor.untyped_storage()._cdata, None)

    def forget(self) -> None:
        """Drop what nobody holds any more."""
        for key in [key for key, block in self._blocks.items() if block.ref.expired()]:
            away = self._blocks.pop(key).away
            self.spilled -= 0 if away is None else away.nbytes

    def bring(self, tensors: Iterable[torch.Tensor], available: int) -> bool:
        """Have the memory of these tensors here, to be used now. ``available`` are the bytes that the device has left,
        less than none if what runs needs more than that; whether there is as much."""
        if not self.spill_limit and not self.spilled:
            return available >= 0
        with self._moving:
            return self._bring(tensors, available)

    def use(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """The memory of these tensors is used now; their storages."""
        storages = {one._cdata: one for one in [tensor.untyped_storage() for tensor in tensors]}
        for key in storages:
            if key in self._blocks:
                self._blocks.move_to_end(key)
        return storages

    def _bring(self, tensors: Iterable[torch.Tensor], available: int) -> bool:
        storages = self.use(tensors)
        wanted = [(self._blocks[key], one) for key, one in storages.items() if self._is_away(key)]
        available -= sum(block.away.nbytes for block, _ in wanted if block.away is not None)
        if available < 0:
            available += self._spill(-available, storages.keys())
        if available < 0:
            return False
        for block, storage in wanted:
            self._fetch(block, storage)
        return True

    def bring_everything(self) -> None:
        """Have all memory here, whatever room there is."""
        with self._moving:
            self.forget()
            for block in self._blocks.values():
                storage = _storage_of(block)  # None where another thread has just let go of it
                if block.away is not None and storage is not None:
                    self._fetch(block, storage)

    def away(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the memory of these tensors that are away."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(block.away.nbytes for key in keys if (block := self._blocks.get(key)) and block.away is not None)

    def looked_at(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, in a copy of its memory if that is away, where it stays."""
        with self._moving:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is None or block.away is None:
                return tensor
            memory = torch.empty(block.away.nbytes, dtype=torch.uint8, device=self.device)
            block.away.put(memory)
        self.moved += memory.numel()
        at: Any = memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        seen = torch.empty(0, dtype=tensor.dtype, device=self.device).set_(*at)
        seen = torch.conj(seen) if tensor.is_conj() else seen
        return torch.ops.aten._neg_view.default(seen) if tensor.is_neg() else seen

    def make_room(self, nbytes: int, kept: Iterable[torch.Tensor]) -> int:
        """Send so many bytes away, or more, or what may go, but not the memory of ``kept``; how many went."""
        with self._moving:
            return self._spill(nbytes, [tensor.untyped_storage()._cdata for tensor in kept])

    @contextlib.contextmanager
    def here(self, tensor: torch.Tensor) -> Iterator[None]:
        """Have the memory of a tensor here as long as this lasts, whatever room there is; for any thread."""
        with self._moving:
            storage = tensor.untyped_storage()
            if self._is_away(storage._cdata):
                self._fetch(self._blocks[storage._cdata], storage)
            yield

    def _is_away(self, key: int) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.away is not None

    def _spill(self, nbytes: int, kept: Iterable[int]) -> int:
        """Send so many bytes away, or more, or what may go; how many."""
        self.forget()
        keep, gone = set(kept), 0
        order = {key: place for place, key in enumerate(self._blocks)}
        for key in sorted(self._blocks, key=lambda key: (self._blocks[key].rank, order[key])):
            if gone >= nbytes:
                break
            block = self._blocks[key]
            if key in keep or block.away is not None:
                continue
            storage = _storage_of(block)
            if storage is None or not storage.resizable() or storage.nbytes() == 0:
                continue
            size = storage.nbytes()
            if self.spilled + size > self.spill_limit:
                continue
            try:
                block.away = _Away(self._bytes(storage))
            except OSError:
                break  # a disk that is full
            storage.resize_(0)
            self.spilled += size
            self.moved += size
            gone += size
        return gone

    def _fetch(self, block: _Block, storage: torch.UntypedStorage) -> None:
        away = block.away
        assert away is not None
        storage.resize_(away.nbytes)
        away.put(self._bytes(storage))
        block.away = None
        self.spilled -= away.nbytes
        self.moved += away.nbytes

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


def _storage_of(block: _Block) -> Any:
    """The storage itself, None where it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(block.ref.cdata)  # pyright: ignore[reportAttributeAccessIssue]
