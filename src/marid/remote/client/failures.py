"""What becomes of a run that has failed on a worker, and the errors that say what has happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from marid.engine.failed import explain, salvage
from marid.errors import MaterializationError, MemoryLimitError, WireError, WorkerLostError
from marid.execute.interrupted import Interrupted
from marid.graph.node import fail
from marid.remote.client.buffers import Block
from marid.remote.client.memory import Memory
from marid.remote.client.steps import ReplayWork, RunWork
from marid.semantics.scopes import current_site

__all__ = ["error_named", "lost_at", "lost_error", "lost_with_it", "stopped"]

_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(RuntimeError, ValueError, TypeError, IndexError, KeyError, NotImplementedError, AttributeError),
        *(ZeroDivisionError, OverflowError, ArithmeticError, AssertionError, MemoryError),
        *(torch.OutOfMemoryError, torch._C._LinAlgError),
    )
} | {"TooLarge": MemoryLimitError, "CollectiveFailed": WorkerLostError, "Unreachable": WorkerLostError}


def error_named(kind: Any, text: Any) -> Exception:
    """The error that an operation raised on a worker; of a type that is none of PyTorch's, a ``RuntimeError``."""
    known = _KINDS.get(kind) if type(kind) is str else None
    return RuntimeError(f"{kind}: {text}") if known is None else known(str(text))


def lost_error(reason: str, block: Block) -> WorkerLostError:
    """Why a tensor cannot be had any more."""
    path = block.scope.module_path if block.scope is not None else None
    module = f" in module {path!r}" if path else ""
    return WorkerLostError(
        f"a {block.root.dtype} tensor of shape {list(block.root.shape)} was lost with its worker: {reason}\n"
        f"  made at {block.site}{module}"
    )


class _LostError(MaterializationError, WorkerLostError):
    """What ran when a worker was lost needs what was lost with it: what of it does not can be asked for again."""

    __module__ = MaterializationError.__module__


def lost_at(text: str) -> WorkerLostError:
    """The error of what has ended its worker again and again."""
    return _LostError(text)


def lost_with_it(block: Block) -> MaterializationError:
    """The error of what was to be done with a tensor that cannot be had any more."""
    return _LostError(str(block.error))


def stopped(step: RunWork, failure: dict[str, Any], error: Exception, memory: Memory) -> BaseException:
    """A run did not come to its end: keep what it made, and let the rest be pending, or fail. What to raise.

    The step counts as answered where it has begun, and is done again as far as it came.
    """
    index, kind = failure.get("index"), failure.get("type")
    count = step.sized.known.program.slot_count
    if any(slot >= count for slot in failure.get("existing", ())):
        raise WireError("a run that failed has slots that its program does not have")
    if isinstance(step, ReplayWork):
        raised: Exception = error
        if index is not None and index < len(step.nodes):
            raised = explain(step.nodes[index], error)
            raised.__cause__ = error
        step.spoil(raised)
        return raised
    task = step.task
    assert task is not None
    buffers = {task.slots[value]: value.concrete for value in task.outputs}  # not dropped: their handles may exist
    step.take_back()
    if index is None:
        memory.forget(step.handles)
        step.forget()
        if isinstance(error, MemoryLimitError):
            return MemoryLimitError(f"{error}\n  read at {current_site()}")
        return KeyboardInterrupt() if kind == "Cancelled" else error
    finished = bool(failure.get("finished"))
    existing = tuple(failure.get("existing", ()))
    memory.forget([buffer.handle for slot, buffer in buffers.items() if slot not in existing])
    memory.add(step.sized, existing, step)
    tensors = {slot: buffers.get(slot) or memory.result(step, slot, task.nodes[0]) for slot in existing}
    step.stopped = index + finished, existing
    step.handles = tuple([step.base + slot for slot in existing])
    stop: BaseException = KeyboardInterrupt() if kind == "Cancelled" else error
    salvage(task, Interrupted(index, finished, tensors, stop))  # pyright: ignore[reportArgumentType]
    step.answered = True
    step.forget()
    if not isinstance(stop, Exception) or index >= len(task.nodes):
        return stop
    raised = explain(task.nodes[index], stop)
    raised.__cause__ = stop
    fail(task.nodes[index], raised)
    return raised
