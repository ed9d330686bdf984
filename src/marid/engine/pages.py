"""New memory for large tensors. The first touch of a page costs more than copying to it, so pages should be large."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch

__all__ = ["in_large_pages"]

_LARGE = 2 << 20
_WORTH = 4 << 20  # bytes from which it is worth asking


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, new and never written to, in memory of large pages where the system has them."""
    storage = tensor.untyped_storage()
    if _madvise is not None and storage.nbytes() >= _WORTH:
        start = -(-storage.data_ptr() // _LARGE) * _LARGE
        end = (storage.data_ptr() + storage.nbytes()) // _LARGE * _LARGE
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)  # refused where the kernel has none: then pages stay small
    return tensor


def _found() -> Any:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


_madvise = _found()
