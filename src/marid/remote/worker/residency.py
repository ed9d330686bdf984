"""What stays in a worker's memory when it does not hold everything: tensors on the device or on the host, and chunks.

What was used least recently of the least precious role is spilled first: activations before what was uploaded, before
gradients, optimizer state, caches, and weights last. A role is a hint of the client; a wrong one makes memory go out
and come back more often, and changes no value. Memory goes as a whole, with all tensors that lie in it: its storage is
emptied in place, so the tensors stay what they are, and must not be used before ``bring``. On the host it is pageable
memory for a device that is none, and a file that nobody can name for the CPU.

A chunk that the worker has is not sent again, by this client or another one of the same owner. Owners do not see each
other's chunks: whether somebody else has sent certain bytes is nobody's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import blake3
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from marid.errors import WireError
from marid.remote.wire.requests import ROLES
from marid.remote.wire.tensors import file_pieces

# --- what stays on the device ----------------------------------------------------------------------------------------


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
    """The memory that sessions hold on one device. ``spill_limit`` are the bytes that may be away; 0 for none."""

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

    def forget(self) -> None:
        """Drop what nobody holds any more."""
        for key in [key for key, block in self._blocks.items() if block.ref.expired()]:
            away = self._blocks.pop(key).away
            self.spilled -= 0 if away is None else away.nbytes

    def bring(self, tensors: Iterable[torch.Tensor], available: int) -> bool:
        """Have the memory of these tensors here, to be used now. ``available`` are the bytes that the device has left,
        less than none if what runs needs more than that; whether there is as much."""
        if not self.spill_limit:
            return available >= 0
        with self._moving:
            return self._bring(tensors, available)

    def _bring(self, tensors: Iterable[torch.Tensor], available: int) -> bool:
        storages = {one._cdata: one for one in [tensor.untyped_storage() for tensor in tensors]}
        for key in storages:
            if key in self._blocks:
                self._blocks.move_to_end(key)
        wanted = [(self._blocks[key], one) for key, one in storages.items() if self._is_away(key)]
        available -= sum(block.away.nbytes for block, _ in wanted if block.away is not None)
        if available < 0:
            available += self._spill(-available, storages.keys())
        if available < 0:
            return False
        for block, storage in wanted:
            self._fetch(block, storage)
        return True

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
            storage = torch.UntypedStorage._new_with_weak_ptr(block.ref.cdata)  # pyright: ignore[reportAttributeAccessIssue]
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


# --- chunks of uploads -----------------------------------------------------------------------------------------------


_LEAST = 64 << 10  # bytes of a piece that is looked for in a file
_ENTRY = 1024  # bytes that a chunk takes beside its own, about


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory of a tensor that was made of chunks, which are kept there as long as nobody writes it."""

    storage: torch.UntypedStorage
    keys: list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where in it a chunk lies."""

    memory: _Memory
    start: int
    size: int

    def read(self, digest: bytes) -> memoryview | None:
        """Its bytes if they are still there."""
        storage = self.memory.storage
        if storage.nbytes() < self.start + self.size:
            return None
        array = (ctypes.c_char * self.size).from_address(storage.data_ptr() + self.start)
        array.storage = storage  # pyright: ignore[reportAttributeAccessIssue]  # which lives as long as the view
        data = memoryview(array).cast("B")
        return data if blake3.blake3(data).digest() == digest else None


class ChunkStore:
    """The chunks that a worker keeps, at most ``limit`` bytes; the least recently used go first. What became a tensor
    of the host stays in its memory, and is not kept twice."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = 0
        self._chunks: OrderedDict[tuple[bytes, bytes], Any] = OrderedDict()

    def capacity_for(self, count: int) -> int:
        """The bytes that so many chunks may have together to be there at once."""
        return self.limit - count * _ENTRY

    def put(self, owner: bytes, digest: bytes, data: Any) -> None:
        """Keep a chunk. Raises ``WireError`` when the digest is that of other bytes."""
        if blake3.blake3(data).digest() != digest:
            raise WireError("a chunk does not have the digest that it was sent with")
        key = (owner, digest)
        size = _size(data) + _ENTRY
        if size > self.limit or self.get(owner, digest) is not None:
            return
        self._chunks[key] = data
        self.nbytes += size
        while self.nbytes > self.limit:
            self._drop(next(iter(self._chunks)))

    def adopt(self, owner: bytes, digests: tuple[bytes, ...], storage: torch.UntypedStorage) -> None:
        """These chunks are all that lies in this memory of the host now, one after the other. They stay there, unless
        some stay elsewhere or twice: memory is kept for what is counted only."""
        memory = _Memory(storage, [(owner, digest) for digest in digests])
        chunks = [self._chunks[key] for key in memory.keys]
        if len(set(digests)) != len(digests) or any(isinstance(chunk, _Slice) for chunk in chunks):
            return
        start = 0
        for key, chunk in zip(memory.keys, chunks, strict=True):
            self._chunks[key] = _Slice(memory, start, _size(chunk))
            start += _size(chunk)

    def get(self, owner: bytes, digest: bytes) -> Any:
        """The bytes of a chunk, or None. To be used before anything else is done with tensors."""
        key = (owner, digest)
        found = self._chunks.get(key)
        if isinstance(found, _Slice):
            found = found.read(digest)
            if found is None:
                self._drop(key)
        if found is not None:
            self._chunks.move_to_end(key)
        return found

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        """Forget a chunk, and those that lie in one memory with it."""
        chunk = self._chunks[key]
        for each in chunk.memory.keys if isinstance(chunk, _Slice) else [key]:
            self.nbytes -= _size(self._chunks.pop(each)) + _ENTRY

    def missing(self, owner: bytes, digests: tuple[bytes, ...]) -> list[int]:
        """The positions of the chunks that are not there; those that are count as used."""
        lacking = [index for index, digest in enumerate(digests) if self.get(owner, digest) is None]
        self.hits += len(digests) - len(lacking)
        return lacking

    def load(self, owner: bytes, path: str, offset: int, nbytes: int, digests: tuple[bytes, ...]) -> list[int]:
        """Take chunks from a file where they are not there; the positions of those that it does not have either.

        What is in the file is told to nobody: only what has a digest that was given is kept. A piece of few bytes is
        not looked for, since its digest can be guessed.
        """
        lacking = self.missing(owner, digests)
        wanted = set(lacking)
        found = set[int]()
        try:
            for place, piece in enumerate(file_pieces(path, offset, nbytes) if lacking else ()):
                if place in wanted and len(piece) >= _LEAST and blake3.blake3(piece).digest() == digests[place]:
                    self.put(owner, digests[place], piece)
                    found.add(place)
        except (OSError, ValueError):  # not a file of this machine, or a path that none can have
            pass
        return [place for place in lacking if place not in found]

    def __len__(self) -> int:
        return len(self._chunks)


def _size(chunk: Any) -> int:
    return chunk.size if isinstance(chunk, _Slice) else memoryview(chunk).nbytes
