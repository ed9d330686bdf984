"""CUDA graphs, played by the processor: importing this makes ``cpu`` a device on which work can be captured.

As on CUDA, what is captured are calls on addresses: a replay looks at the memory that is there then, whoever it belongs
to now. Results lie in a pool that all graphs share, in which memory is used again as soon as nobody holds it. Capturing
itself changes nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from marid.engine.accelerated import AcceleratedEngine
from marid.execute import accelerator

__all__ = ["Simulated"]

_POOL_BYTES = 1 << 30
_GARBAGE = 0xA5


class Simulated:
    """The processor, as a device that captures. ``refused`` are operators that cannot be captured."""

    captures = True
    pins = False

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.refused: set[str] = set()
        self.captured = 0
        self._pool = _Pool(seed)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait(self) -> bool:
        return False

    def wait_for_uploads(self) -> None:
        pass

    def is_idle(self) -> bool:
        return True

    def trim(self) -> None:
        pass

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, on the same addresses."""
        recording = _Recording(self._pool, self.refused)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in ("Python", "PythonTLSSnapshot"):
            excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
        try:
            with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), recording:
                launch()
        finally:
            recording.undo()
        self.captured += 1
        calls = recording.calls
        recording.forget()

        def replay() -> None:
            for call in calls:
                call()

        return replay


class Apart(Simulated):
    """With memory of its own: what goes there and comes from there is copied."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @classmethod
    def engine(cls) -> AcceleratedEngine:
        """An engine of this process for such a device."""
        engine = AcceleratedEngine(torch.device("cpu"))
        engine.accelerator = cls(engine.device)
        return engine


class _Pool:
    """Memory that is used again, in no order that could be relied on."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._memory = mmap.mmap(-1, _POOL_BYTES)
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Memory, which comes back when the storage is gone."""
        size = max(64, -(-nbytes // 64) * 64)
        free = self._free.setdefault(size, [])
        if free:
            start = free.pop(self._chance.randrange(len(free)))
        else:
            start, self._end = self._end, self._end + size
            assert self._end <= _POOL_BYTES, "the simulated pool is full"
        block = (ctypes.c_char * nbytes).from_buffer(self._memory, start)
        weakref.finalize(block, free.append, start).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()


class _Recording(TorchDispatchMode):
    def __init__(self, pool: _Pool, refused: set[str]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._pool = pool
        self._refused = refused
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in self._refused:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in self._before.keys() | self._made:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[_place(tensor)] = whole, whole.clone()
        rows = tree_map(lambda one: _Address(one) if isinstance(one, torch.Tensor) else one, (args, kwargs))
        returned = func(*args, **kwargs)
        moved = tree_map(lambda one: self._moved(one, given) if isinstance(one, torch.Tensor) else one, returned)
        self.calls.append(_Call(func, rows, moved, given))
        return moved

    def _moved(self, tensor: torch.Tensor, given: set[int]) -> torch.Tensor:
        """A result in the memory of the pool."""
        if _place(tensor) in given or tensor.numel() == 0:
            return tensor
        storage = self._pool.take(tensor.untyped_storage().nbytes())
        self._made.add(storage.data_ptr())
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore[reportArgumentType]
        _whole(made).copy_(_whole(tensor))
        return made

    def undo(self) -> None:
        """Nothing was executed."""
        for place, (whole, before) in self._before.items():
            if place:
                whole.copy_(before)
        self._before.clear()

    def forget(self) -> None:
        for call in self.calls:
            call.spoil()


class _Address:
    """A tensor as a kernel sees it: an address and a geometry."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._place, self._nbytes = storage.data_ptr(), storage.nbytes()
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype, self._conj, self._neg = tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def spoil(self) -> None:
        ctypes.memset(self._place, _GARBAGE, self._nbytes)

    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        made = torch.empty(0, dtype=self._dtype)
        if self._nbytes == 0:
            return made.as_strided(*self._geometry[1:]) if 0 in self._geometry[1] else made
        block = (ctypes.c_char * self._nbytes).from_address(self._place)
        made.set_(torch.frombuffer(block, dtype=torch.uint8).untyped_storage(), *self._geometry)
        made = torch.conj(made) if self._conj else made
        return torch._neg_view(made) if self._neg else made


class _Call:
    def __init__(self, func: Any, given: Any, returned: Any, places: set[int]) -> None:
        self._func = func
        self._given = given
        leaves, _ = tree_flatten(returned)
        self._made = [
            _Address(one) if isinstance(one, torch.Tensor) and _place(one) not in places and one.numel() else None
            for one in leaves
        ]

    def __call__(self) -> None:
        args, kwargs = tree_map(lambda one: one.tensor() if isinstance(one, _Address) else one, self._given)
        returned, _ = tree_flatten(self._func(*args, **kwargs))
        for address, tensor in zip(self._made, returned, strict=True):
            if address is not None:
                _whole(address.tensor()).copy_(_whole(tensor))

    def spoil(self) -> None:
        """The memory of results holds nothing of use."""
        for address in self._made:
            if address is not None:
                address.spoil()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of its memory: oneDNN's workspaces are one element in front of the rest."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


accelerator._KINDS["cpu"] = Simulated
