"""When the Python of a function runs in place of a replay, to be compared with it.

First after a few replays, since what changes unseen mostly does so soon; later whenever all checks together, the next
one included, take no more than the share of the time that is set for them. A check does the work of the call, so all
it costs is the recording.
"""

from __future__ import annotations

from marid import policy
from marid.settings import settings


class Checks:
    """The checks of calls of one kind."""

    __slots__ = ("_last", "_next", "_replays", "_seconds", "_spent")

    def __init__(self) -> None:
        self._replays = 0
        self._next = policy.REPLAY_FIRST_CHECK
        self._seconds = 0.0  # in replays
        self._spent = 0.0  # in checks
        self._last = 0.0  # in the last one

    def replayed(self, seconds: float) -> None:
        """A replay took so long."""
        self._replays += 1
        self._seconds += seconds

    def checked(self, seconds: float) -> None:
        """So did running the Python in place of one."""
        self._replays += 1
        self._next *= 2
        self._spent += seconds
        self._last = seconds

    def is_due(self) -> bool:
        """Whether the next call is one to check."""
        if not settings.compile_verify:
            return False
        if self._next <= policy.REPLAY_LAST_CHECK:
            return self._replays >= self._next
        return 100 * (self._spent + self._last) <= settings.compile_verify * self._seconds
