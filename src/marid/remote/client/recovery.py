"""What is done when a worker is lost: its replacement is sent what of the past is still needed. A step that ends one
worker after the other is not sent again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

from marid.errors import WorkerLostError
from marid.graph.node import fail
from marid.remote.client.link import Link
from marid.remote.client.queue import FREED, Batch, StepQueue, batches_of, lost_at, lost_error
from marid.remote.client.runs import RunStep
from marid.remote.client.steps import CallStep, Sent, Step
from marid.remote.client.uploads import Offers, UploadStep
from marid.remote.client.window import RequestFailed
from marid.remote.wire.requests import Free

LOSSES = 3


class Recovery:
    """Has steps of the journal of ``queue`` done again over ``link``. ``reach`` waits until a request there is applied.

    A step may wait for another worker that is lost too, and the replacement of that one for a step of this one: whoever
    waits lets the other ``advance``, so it does what it can without waiting, and can be interrupted anywhere.
    """

    def __init__(self, link: Link, queue: StepQueue, offers: Offers, reach: Callable[[Link, int], None]) -> None:
        self.link = link
        self.sent = Sent()
        self._queue = queue
        self._offers = offers
        self._reach = reach
        self._reason = ""
        self._left: deque[Step] = deque()
        self._dead: dict[int, list[int]] = {}  # by step, the handles that nothing needs behind it
        self._batches: deque[Batch] = deque()  # of the first of them, which are still to be sent
        self._asked: deque[tuple[int, Step]] = deque()  # and not answered yet
        self._newest = 0  # request that was sent
        self._advancing = False

    def restore(self, reason: str) -> int:
        """Do again what is needed and was done before; how many steps that were. What cannot be done is lost. Raises
        ``LinkLost``."""
        queue, journal, alive = self._queue, self._queue.journal, self._queue.memory.alive
        waiting = list(queue.outbox)
        pending = {id(step) for step in waiting}
        done = [step for step in journal.steps if id(step) not in pending]
        handles = {*alive, *[handle for step in waiting for handle in step.inputs]}
        blocks = [block for block, _ in alive.values() if block.error is None]
        blocks += [block for step in waiting for block in (*step.reads, *step.writes)]
        needed = journal.needed(handles, blocks, done)
        last = {handle: step for step in needed for handle in (*step.inputs, *step.handles) if handle not in handles}
        for handle, step in last.items():
            self._dead.setdefault(id(step), []).append(handle)
        self._do_again(needed, reason)
        queue.free(sorted([handle for dead in self._dead.values() for handle in dead]))  # of what could not be done
        return len(needed)

    def _do_again(self, steps: list[Step], reason: str) -> None:
        """Do steps again, in order. What cannot be done is lost, for ``reason``. Raises ``LinkLost``."""
        self._reason = reason
        self._left.extend(steps)
        while self._left or self._asked:
            self.advance()
            seq = self._asked[0 if self._left else -1][0] if self._asked else self._newest
            with contextlib.suppress(RequestFailed):  # seen to by ``advance``
                self._reach(self.link, seq)

    def advance(self) -> None:
        """Send what there is room for, and see to what has failed. Raises ``LinkLost``."""
        if self._advancing:
            return
        self._advancing = True
        try:
            self.link.poll()
            while self._asked and self._asked[0][0] <= self.link.applied:
                self._dead.pop(id(self._asked.popleft()[1]), None)
            while self._left and self._send(self._left[0]):
                self._left.popleft()
        except OSError as error:  # a file with what was uploaded
            self._lose(f"{self._reason}, and what was kept of it cannot be read: {error}")
        except RequestFailed as failed:
            self.link.resume()
            self.sent = Sent(settings=None)
            self._batches.clear()
            self._left.extendleft(reversed([step for last, step in self._asked if last >= failed.seq]))
            self._asked.clear()
            self._newest = 0
            if not self._left[0].retry(failed.failure):
                self._lose(f"{self._reason}, and doing it again failed: {failed}")
        finally:
            self._advancing = False

    def in_flight(self) -> list[Step]:
        """What it was sent, and has not answered."""
        return [step for seq, step in self._asked if seq > self.link.applied]

    def _send(self, step: Step) -> bool:
        """Send a step, or what there is room for; whether it is seen to."""
        if not self._batches:
            if any(block.error is not None for block in (*step.reads, *step.writes)):
                self._forget(step, "what it was made from was lost")
                return True
            self._look_for_file(step)
            dead = self._dead.get(id(step), [])
            frees = [Free(tuple(dead[start : start + FREED])) for start in range(0, len(dead), FREED)]
            self._batches.extend(batches_of([*step.requests(self.sent), *frees]))
        while self._batches:
            requests = self._batches[0].requests
            first = self.link.try_send(requests)
            if first is None:
                return False
            self._batches.popleft()
            self._newest = first + len(requests) - 1
            if not self._batches:
                self._asked.append((self._newest, step))
        return True

    def _look_for_file(self, step: Step) -> None:
        """Let the worker read what it can see in a file."""
        if isinstance(step, UploadStep) and step.contents[0].path is not None:
            step.questions = None
            for question in self._offers.ask([step], self.sent, False):
                last = 0
                for message in batches_of(question.requests(self.sent)):
                    last = self.link.send(message.requests) + len(message.requests) - 1
                self._reach(self.link, last)
                question.done(self.link.take(last))

    def _lose(self, reason: str) -> None:
        self._batches.clear()
        self._forget(self._left.popleft(), reason)

    def _forget(self, step: Step, reason: str) -> None:
        """Let whoever reads what a step made or wrote know that it is lost."""
        self._queue.journal.remove([step])
        for block in (*step.makes, *step.writes):
            block.error = lost_error(reason, block)


# --- steps that end their worker -----------------------------------------------------------------------------------


class PoisonDetector:
    """Which step of one device ends the worker that does it: one that has done so three times is not sent again.

    The first loss may have any reason. After it, what was not answered is sent step by step, and the worker says before
    each operator of a program which one it comes to; so the third loss is known to be of one step, and of one operator.
    """

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
        """The worker was lost while these were to be done; the step that has ended it, if that is certain now."""
        steps = [step for step in unanswered if step.may_crash]
        if not steps:
            return None
        if not self.is_careful(waiting):
            self._doubtful = steps
        self._losses += 1
        return steps[0] if self._losses >= LOSSES else None

    def give_up(self, queue: StepQueue, step: Step, index: int | None) -> None:
        """A step has ended its worker too often, at its operator ``index``: take it back, and raise that. The nodes of
        a run are pending again, but for the one that cannot be done."""
        place = queue.outbox.index(step)
        following = queue.outbox[place + 1 :]
        del queue.outbox[place:]
        error = self._error(step, index)
        queue.journal.remove([step])
        queue.outbox += queue.take_back(following, error)
        queue.memory.forget(step.handles)
        self._doubtful, self._losses = [], 0
        if isinstance(step, RunStep) and step.task is not None:
            nodes = step.take_back()
            for node in nodes[index : index + 1] if index is not None and index < len(nodes) else nodes:
                fail(node, error)
            step.forget()
        elif isinstance(step, CallStep):
            step.error, step.answered = error, True
        step.spoil(error)
        if not isinstance(step, CallStep):
            raise error

    def _error(self, step: Step, index: int | None) -> WorkerLostError:
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
