"""The steps of one worker that are to be done or were not answered yet, in order; what failures take out of them, the
errors that say so, and which requests go together in a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from marid.engine.failed import explain, salvage
from marid.errors import MaterializationError, MemoryLimitError, UnsupportedOperationError, WireError, WorkerLostError
from marid.execute.interrupted import Interrupted
from marid.graph.node import fail
from marid.remote.client.blocks import Block, Memory
from marid.remote.client.journal import Journal
from marid.remote.client.runs import ReplayStep, RunStep
from marid.remote.client.steps import CallStep, FreeStep, Sent, Step
from marid.remote.client.uploads import UploadProgress, UploadStep
from marid.remote.wire.requests import record_of, write_requests
from marid.semantics.scopes import current_site

# --- errors ----------------------------------------------------------------------------------------------------------


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
    found = _KINDS.get(kind) if type(kind) is str else None
    return RuntimeError(f"{kind}: {text}") if found is None else found(str(text))


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


# --- steps -----------------------------------------------------------------------------------------------------------


FREED = 4000  # handles in one request


class StepQueue:
    """Not thread-safe: the engine uses it under its lock. ``outbox`` are the steps that were not sent, ``asked`` those
    that were and are not answered, with the numbers of their last requests; ``journal`` all that matter still."""

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory = memory
        self.journal = Journal()
        self.progress = UploadProgress(name)
        self.outbox: list[Step] = []
        self.asked: deque[tuple[int, Step]] = deque()
        self.holding = False
        """Whether nothing may be freed now."""

    def do(self, step: Step) -> None:
        """Have a step done with the next message."""
        for block in step.writes:
            block.version += 1
        self.outbox.append(step)
        self.journal.add(step)
        if isinstance(step, UploadStep):
            self.progress.add(step.contents[0].nbytes)

    def steps(self) -> list[Step]:
        """What was not answered yet, in order."""
        return [*[step for _, step in self.asked], *self.outbox]

    def number(self, step: Step) -> int | None:
        """That of a step that was sent and is not answered; looked for from the newest."""
        for seq, asked in reversed(self.asked):
            if asked is step:
                return seq
        return None

    def unsent_bytes(self) -> int:
        return sum(content.nbytes for step in self.outbox for content in step.contents)

    def withdraw(self, step: Step) -> None:
        """Nobody waits for it any more: it is not done, unless it was sent already."""
        if step in self.outbox:
            self.outbox.remove(step)
            self.journal.remove([step])

    def drop(self) -> None:
        """Take note of what nobody holds any more: it is freed before anything else is done."""
        if self.holding:
            return
        self.free(self.memory.dropped())

    def refuse(self, error: WireError | OSError) -> None:
        """Something cannot be written down or read: take back the step that it is in, and raise."""
        self.progress.end()
        for place, step in enumerate(self.outbox):
            try:
                write_requests(step.requests(Sent()))
            except (WireError, OSError) as problem:
                for block in step.makes:
                    block.error = problem
                following = self.outbox[place + 1 :]
                del self.outbox[place:]
                if isinstance(step, RunStep) and not isinstance(step, ReplayStep):
                    following.insert(0, step)
                else:
                    self.journal.remove([step])
                self.outbox += self.take_back(following, problem)
                if isinstance(problem, OSError):
                    raise
                raise UnsupportedOperationError(f"{problem} (needed at {step.site})") from None
        raise error

    def fail(self, following: list[Step], failure: dict[str, Any]) -> None:
        """The first of these steps has failed, or was cancelled: raise that, and take back the others."""
        failed = following.pop(0) if failure.get("type") != "Cancelled" or isinstance(following[0], RunStep) else None
        text = f"{failure.get('text')}"
        if isinstance(failed, UploadStep):  # which whoever waits for something else hears of, too
            text += f"\n  uploaded at {failed.site}"
        error = error_named(failure.get("type"), text)
        raised: BaseException = error
        gone: list[Step] = []
        if isinstance(failed, RunStep):
            raised = stopped(failed, failure, error, self.memory)
        if failed is not None and not failed.answered:
            gone.append(failed)
        self.journal.remove(gone)
        self.outbox = self.take_back(following, raised if isinstance(raised, Exception) else error)
        if failed is None:
            return
        if isinstance(failed, CallStep):
            failed.error, failed.answered = error, True
            return
        for block in failed.makes if not isinstance(failed, RunStep) else ():
            block.error = lost_error(str(error), block) if isinstance(error, WorkerLostError) else error
        raise raised

    def take_back(self, steps: list[Step], error: Exception) -> list[Step]:
        """What was to be done behind a failure: runs are pending again, what else was to be made is lost to ``error``.
        The steps that are to be done all the same."""
        kept: list[Step] = []
        gone: list[Step] = []
        for step in reversed(steps):
            if step.refused():
                kept.insert(0, step)
                continue
            gone.append(step)
            step.spoil(error)
            self.memory.forget(step.handles)
        self.journal.remove(gone)
        return kept

    def drop_lost(self) -> Exception | None:
        """Do not ask for what was lost: whoever reads it gets the error of its block. Neither for what a step that is
        taken back was to make or write, nor for a write to what it reads, which it would read too late. The error where
        operations are pending again, or None."""
        of = {handle: block for handle, (block, _) in self.memory.alive.items()}
        lost = {block: block.error for block in of.values() if block.error is not None}
        read: dict[Block, Exception] = {}
        taken_back: Exception | None = None
        for step in list(self.outbox) if lost else ():
            needed = [*step.reads, *[of[handle] for handle in step.inputs if handle in of]]
            errors = [lost.get(block) or block.error for block in needed] + [read.get(block) for block in step.writes]
            error = next((one for one in errors if one is not None), None)
            if error is None:
                continue
            lost.update(dict.fromkeys((*step.makes, *step.writes), error))
            read.update(dict.fromkeys(needed, error))
            self.outbox.remove(step)
            self.outbox += self.take_back([step], error)
            if isinstance(step, CallStep):
                step.error, step.answered = error, True
            elif isinstance(step, RunStep) and taken_back is None:
                taken_back = error
        return taken_back

    def free(self, handles: list[int]) -> None:
        """Free handles before anything else is done."""
        for start in range(0, len(handles), FREED):
            self.outbox.insert(0, FreeStep(tuple(handles[start : start + FREED])))


# --- messages --------------------------------------------------------------------------------------------------------


_ITEMS = 12_000  # inputs and numbers; a header has a bound
_BYTES = 32 << 20  # in segments
_SEGMENTS = 200


class Batch:
    """Requests that go together, and the steps that end among them, with their places."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.ends: list[tuple[int, Step]] = []
        self._items = self._bytes = self._segments = 0

    def fits(self, request: Any) -> bool:
        """Whether a request fits in too; counts it as if it were added. One fits always."""
        record = record_of(request)
        self._items += 1
        for name, size in record.sizes:
            self._items += size(getattr(request, name))
        for name, buffers in record.buffers:
            for piece in buffers(getattr(request, name)):
                self._segments += 1
                self._bytes += memoryview(piece).nbytes
        fits = self._items <= _ITEMS and self._segments <= _SEGMENTS and self._bytes <= _BYTES
        return fits or not self.requests


def batches_of(requests: Iterable[Any]) -> list[Batch]:
    """As few messages as these fit into."""
    found = [Batch()]
    for request in requests:
        if not found[-1].fits(request):
            found.append(Batch())
            found[-1].fits(request)
        found[-1].requests.append(request)
    return found
