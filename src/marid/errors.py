"""The exceptions Marid raises of its own accord.

Errors that eager PyTorch would raise (shapes, dtypes, indices) keep PyTorch's own types and messages;
these classes are for what only a lazy device can get wrong.
"""

from __future__ import annotations

import torch

__all__ = [
    "AuthenticationError",
    "BudgetError",
    "LazyTensorError",
    "MaterializationError",
    "MemoryLimitError",
    "SyncForbiddenError",
    "UnsupportedOperationError",
    "WireError",
    "WorkerLostError",
]


class LazyTensorError(RuntimeError):
    """Base of every error that is Marid's own. A ``RuntimeError``, so that code written for PyTorch catches it."""


class MaterializationError(LazyTensorError):
    """A recorded operation failed when it ran.

    Raised where the value was read; the message names the line where the operation was written, and ``__cause__`` is
    the error of the operation itself.
    """


class MemoryLimitError(LazyTensorError, torch.OutOfMemoryError):
    """What would have to run does not fit into ``marid.settings.memory_limit``.

    Raised before anything has run: the values are as pending as they were, and can be read once there is room. Also a
    ``torch.OutOfMemoryError``, for code that handles those.
    """


class UnsupportedOperationError(LazyTensorError, NotImplementedError):
    """The device cannot represent what was asked for (a sparse layout, for example)."""


class SyncForbiddenError(LazyTensorError):
    """A value was read inside ``marid.no_sync()``."""


class BudgetError(LazyTensorError):
    """A block inside of ``marid.budget()`` waited for workers, or moved bytes, more than it may."""


class WorkerLostError(LazyTensorError):
    """A remote worker is gone and what it held cannot be recovered."""


class AuthenticationError(LazyTensorError):
    """A worker and a client do not accept each other's keys."""


class WireError(LazyTensorError):
    """A message from the other side is malformed or speaks another version."""
