"""Which step ends the worker that does it: one that has done so three times is not sent again.

The first loss may have any reason. After it, what was not answered is sent step by step, and the worker says before
each operator of a program which one it comes to; so the third loss is known to be of one step, and of one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from marid.errors import WorkerLostError
from marid.graph.node import fail
from marid.remote.client.failures import lost_at
from marid.remote.client.steps import CallWork, RunWork, Work

__all__ = ["LOSSES", "Blame"]

LOSSES = 3


class Blame:
    """Of one device."""

    def __init__(self) -> None:
        self._doubtful: list[Work] = []
        self._losses = 0

    def is_careful(self, waiting: Callable[[], list[Work]]) -> bool:
        """Whether steps are to be sent one by one, given those that ``waiting`` returns: all that are to be done."""
        if self._doubtful:
            left = waiting()
            self._doubtful = [step for step in self._doubtful if step in left]
            if not self._doubtful:
                self._losses = 0
        return bool(self._doubtful)

    def lost(self, waiting: Callable[[], list[Work]], unanswered: Iterable[Work]) -> Work | None:
        """The worker was lost while these were to be done; the step that is to blame, if that is known now."""
        steps = [step for step in unanswered if step.blamable]
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

    def error(self, step: Work, index: int | None) -> WorkerLostError:
        """What to raise for a step, at whose operator ``index`` the worker was lost; who reads it later gets it too."""
        text = f"the worker was lost {LOSSES} times in a row while it did the same, which is not sent again"
        nodes = step.recorded_nodes if isinstance(step, RunWork) else []
        if nodes:
            known = index is not None and index < len(nodes)
            node = nodes[index if known and index is not None else 0]
            what = "" if known or len(nodes) == 1 else f"one of {len(nodes)} operators, the first of which is "
            return lost_at(f"{text}: {what}{node.op}\n  made at {node.site}")
        what = f"{step.operator}\n  called at {step.site}" if isinstance(step, CallWork) else f"for {step.site}"
        return lost_at(f"{text}: {what}")

    def give_up(self, step: Work, index: int | None, error: WorkerLostError) -> None:
        """Let the nodes of a run be pending again, but for the one that cannot be done."""
        self._settled()
        if isinstance(step, RunWork) and step.task is not None:
            nodes = step.take_back()
            if index is not None and index < len(nodes):
                fail(nodes[index], error)
            else:
                for node in nodes:
                    fail(node, error)
            step.forget()
        elif isinstance(step, CallWork):
            step.error, step.answered = error, True
        step.spoil(error)
