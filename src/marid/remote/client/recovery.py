"""A worker in the place of one that was lost, while it is told what of the past is still needed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from marid.remote.client.failures import lost_error
from marid.remote.client.link import Link, RequestFailed
from marid.remote.client.queue import Message, StepQueue, messages_of
from marid.remote.client.steps import Sent, Work
from marid.remote.client.uploads import Offers, UploadWork

__all__ = ["Successor"]


class Successor:
    """Has steps of the journal of ``queue`` done again over ``link``. ``reach`` waits until a request there is applied.

    A step may wait for another worker that is lost too, and that one's successor for a step of this one: whoever waits
    lets the other ``advance``, so it does what it can without waiting, and can be interrupted anywhere.
    """

    def __init__(self, link: Link, queue: StepQueue, offers: Offers, reach: Callable[[Link, int], None]) -> None:
        self.link = link
        self.sent = Sent()
        self._queue = queue
        self._offers = offers
        self._reach = reach
        self._reason = ""
        self._left: deque[Work] = deque()
        self._messages: deque[Message] = deque()  # of the first of them, which are still to be sent
        self._asked: deque[tuple[int, Work]] = deque()  # and not answered yet
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
        self._do_again(needed, reason)
        made = {handle for step in needed for handle in step.handles}
        queue.free(sorted(made - handles))
        return len(needed)

    def _do_again(self, steps: list[Work], reason: str) -> None:
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
                self._asked.popleft()
            while self._left and self._send(self._left[0]):
                self._left.popleft()
        except OSError as error:  # a file with what was uploaded
            self._lose(f"{self._reason}, and what was kept of it cannot be read: {error}")
        except RequestFailed as failed:
            self.link.resume()
            self.sent = Sent(settings=None)
            self._messages.clear()
            self._left.extendleft(reversed([step for last, step in self._asked if last >= failed.seq]))
            self._asked.clear()
            self._newest = 0
            if not self._left[0].retry(failed.failure):
                self._lose(f"{self._reason}, and doing it again failed: {failed}")
        finally:
            self._advancing = False

    def in_flight(self) -> list[Work]:
        """What it was sent, and has not answered."""
        return [step for seq, step in self._asked if seq > self.link.applied]

    def _send(self, step: Work) -> bool:
        """Send a step, or what there is room for; whether it is seen to."""
        if not self._messages:
            if any(block.error is not None for block in (*step.reads, *step.writes)):
                self._forget(step, "what it was made from was lost")
                return True
            self._look_for_file(step)
            self._messages.extend(messages_of(step.requests(self.sent)))
        while self._messages:
            requests = self._messages[0].requests
            first = self.link.try_send(requests)
            if first is None:
                return False
            self._messages.popleft()
            self._newest = first + len(requests) - 1
            if not self._messages:
                self._asked.append((self._newest, step))
        return True

    def _look_for_file(self, step: Work) -> None:
        """Let the worker read what it can see in a file."""
        if isinstance(step, UploadWork) and step.contents[0].path is not None:
            step.questions = None
            for question in self._offers.ask([step], self.sent, False):
                last = 0
                for message in messages_of(question.requests(self.sent)):
                    last = self.link.send(message.requests) + len(message.requests) - 1
                self._reach(self.link, last)
                question.done(self.link.take(last))

    def _lose(self, reason: str) -> None:
        self._messages.clear()
        self._forget(self._left.popleft(), reason)

    def _forget(self, step: Work, reason: str) -> None:
        """Let whoever reads what a step made or wrote know that it is lost."""
        self._queue.journal.remove([step])
        for block in (*step.makes, *step.writes):
            block.error = lost_error(reason, block)
