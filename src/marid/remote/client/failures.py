"""What becomes of steps that fail on a worker, or end it: the errors that say so, and which step is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from marid.engine.failed import explain, salvage
from marid.errors import MaterializationError, MemoryLimitError, WireError, WorkerLostError
from marid.execute.interrupted import Interrupted
from marid.graph.node import fail
from marid.remote.client.calls import CallStep
from marid.remote.client.memory import Block, Memory
from marid.remote.client.runs import ReplayStep, RunStep
from marid.remote.client.steps import Step
from marid.semantics.scopes import current_site

__all__ = ["LOSSES", "PoisonDetector", "error_named", "lost_at", "lost_error", "lost_with_it", "stopped"]

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


def stopped(step: RunStep, failure: dict[str, Any], error: Exception, memory: Memory) -> BaseException:
    """A run did not come to its end: keep what it made, and let the rest be pending, or fail. What to raise.

    The step counts as answered where it has begun, and is done again as far as it came.
    """
    index, kind = failure.get("index"), failure.get("type")
    count = step.specialization.encoded.program.slot_count
    if any(slot >= count for slot in failure.get("existing", ())):
        raise WireError("a run that failed has slots that its program does not have")
    if isinstance(step, ReplayStep):
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
    step.add(existing)
    tensors = {slot: buffers.get(slot) or step.output(memory, slot, task.nodes[0]) for slot in existing}
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


# --- which step ends its worker --------------------------------------------------------------------------------------


LOSSES = 3


class PoisonDetector:
    """Of one device."""

    def __init__(self) -> None:
        self._doubtful: list[Step] = []
        self._losses = 0

    def is_careful(self, waiting: Callable[[], list[Step]]) -> bool:
        """Whether steps are to be sent one by one, given those that ``waiting`` returns: all that are to be done."""
        if self._doubtful:
            left = waiting()
            self._doubtful = [step for step in self._doubtful if step in left]
            if not self._doubtful:
                self._losses = 0
        return bool(self._doubtful)

    def lost(self, waiting: Callable[[], list[Step]], unanswered: Iterable[Step]) -> Step | None:
        """The worker was lost while these were to be done; the step that is to blame, if that is known now."""
        steps = [step for step in unanswered if step.may_crash]
        if not steps:
            return None
        if not self.is_careful(waiting):
            self._doubtful = steps
        self._losses += 1
        return steps[0] if self._losses >= LOSSES else None

    def _settled(self) -> None:
        """A step is not sent again."""
        self._doubtful = []
        self._losses = 0

    def error(self, step: Step, index: int | None) -> WorkerLostError:
        """What to raise for a step, at whose operator ``index`` the worker was lost; who reads it later gets it too."""
        text = f"the worker was lost {LOSSES} times in a row while it did the same, which is not sent again"
        nodes = step.recorded_nodes if isinstance(step, RunStep) else []
        if nodes:
            known = index is not None and index < len(nodes)
            node = nodes[index if known and index is not None else 0]
            what = "" if known or len(nodes) == 1 else f"one of {len(nodes)} operators, the first of which is "
            return lost_at(f"{text}: {what}{node.op}\n  made at {node.site}")
        what = f"{step.operator}\n  called at {step.site}" if isinstance(step, CallStep) else f"for {step.site}"
        return lost_at(f"{text}: {what}")

    def give_up(self, step: Step, index: int | None, error: WorkerLostError) -> None:
        """Let the nodes of a run be pending again, but for the one that cannot be done."""
        self._settled()
        if isinstance(step, RunStep) and step.task is not None:
            nodes = step.take_back()
            if index is not None and index < len(nodes):
                fail(nodes[index], error)
            else:
                for node in nodes:
                    fail(node, error)
            step.forget()
        elif isinstance(step, CallStep):
            step.error, step.answered = error, True
        step.spoil(error)
