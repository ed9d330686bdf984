"""Memory that is about to be filled from one end to the other, in pages of 2 MiB where the system has them.

A system hands out memory when it is first touched, in pages of 4 KiB: for a copy of a large tensor that takes several
times as long as the copy. See docs/decisions.md for where this does not help.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_LEAST = 4 << 20  # bytes, of which one page at least is all inside


def in_large_pages(made: torch.Tensor) -> torch.Tensor:
    """The same tensor, dense and new on the CPU, of which nothing has been written yet."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if made.nbytes >= _LEAST and advice is not None and sys.platform == "linux":
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (made.data_ptr() + made.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # Refused by a kernel that has none: pages are small then, as they always were.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
    return made
