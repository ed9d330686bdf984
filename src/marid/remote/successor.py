"""A worker in the place of one that was lost, while it is told what of the past is still needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from marid.remote.failures import lost_error
from marid.remote.journal import Journal
from marid.remote.link import Link, RequestFailed
from marid.remote.messages import messages_of
from marid.remote.offers import Offers
from marid.remote.work import Sent, UploadWork, Work

__all__ = ["Successor"]


class Successor:
    """Has steps of ``journal`` done again over ``link``. ``reach`` waits until a request there is applied."""

    def __init__(self, link: Link, journal: Journal, offers: Offers, reach: Callable[[Link, int], None]) -> None:
        self.link = link
        self.sent = Sent()
        self._journal = journal
        self._offers = offers
        self._reach = reach
        self._asked: deque[tuple[int, Work]] = deque()  # and not answered yet

    def do_again(self, steps: list[Work], reason: str) -> None:
        """Do steps again, in order. What cannot be done is lost, for ``reason``. Raises ``LinkLost``."""
        left, asked = deque(steps), self._asked
        while left or asked:
            try:
                while left:
                    step = left[0]
                    if any(block.error is not None for block in (*step.reads, *step.writes)):
                        self._lose(left.popleft(), "what it was made from was lost")
                        continue
                    self._look_for_file(step)
                    asked.append((self._send(step), step))
                    left.popleft()
                if asked:
                    self._reach(self.link, asked[-1][0])
                asked.clear()
            except OSError as error:  # a file with what was uploaded
                self._lose(left.popleft(), f"{reason}, and what was kept of it cannot be read: {error}")
            except RequestFailed as failed:
                self.link.resume()
                self.sent = Sent(switches=None)
                left.extendleft(reversed([step for last, step in asked if last >= failed.seq]))
                asked.clear()
                if not left[0].retry(failed.failure):
                    self._lose(left.popleft(), f"{reason}, and doing it again failed: {failed}")

    def in_flight(self) -> list[Work]:
        """What it was sent, and has not answered."""
        return [step for seq, step in self._asked if seq > self.link.applied]

    def _look_for_file(self, step: Work) -> None:
        """Let the worker read what it can see in a file."""
        if isinstance(step, UploadWork) and step.contents[0].path is not None:
            step.questions = None
            for question in self._offers.ask([step], self.sent, False):
                last = self._send(question)
                self._reach(self.link, last)
                question.done(self.link.take(last))

    def _send(self, step: Work) -> int:
        last = 0
        for message in messages_of(step.requests(self.sent)):
            last = self.link.send(message.requests) + len(message.requests) - 1
        return last

    def _lose(self, step: Work, reason: str) -> None:
        """Let whoever reads what a step made or wrote know that it is lost."""
        self._journal.remove([step])
        for block in (*step.makes, *step.writes):
            block.error = lost_error(reason, block)
