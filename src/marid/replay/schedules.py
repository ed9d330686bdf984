"""Schedules of learning rates that a function moves on: a replay calls their ``step()`` as the function does.

What a schedule counts is its own Python state, which changes at each call. It need not be compared, as the rates need
not: code that is followed does not look at it (``Reached.looks_at_rates``), and what it does to rates is followed. That
holds for PyTorch's schedules, and for a ``step()`` without arguments behind the optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from marid.replay.state_check import same_number

_STEPS = {
    kind.step.__code__
    for kind in vars(lr_scheduler).values()
    if isinstance(kind, type) and issubclass(kind, LRScheduler) and not issubclass(kind, ReduceLROnPlateau)
}


def is_followed(schedule: LRScheduler) -> bool:
    """Whether a replay can move this schedule on."""
    return "step" not in schedule.__dict__ and getattr(type(schedule).step, "__code__", None) in _STEPS


def _steps_an_optimizer(frame: FrameType) -> bool:
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer)


class ScheduleLog:
    """The steps of ``schedules`` in one recording, in ``steps``, and whether nothing else has changed the rates of the
    groups of parameters ``rated``. ``refusal`` says why there can be no replay."""

    def __init__(self, schedules: Iterable[LRScheduler], rated: list[dict[str, Any]]) -> None:
        self.steps: list[LRScheduler] = []
        self.refusal: str | None = None
        self._known = [*schedules]
        self._rated = rated
        self._rates = self._now()
        self._inside: list[LRScheduler] = []  # a schedule may be made of others

    def _now(self) -> list[Any]:
        return [group["lr"] for group in self._rated]

    def called(self, frame: FrameType, event: str) -> None:
        """A function of Python is called, or returns."""
        if frame.f_code in _STEPS:
            self._step(frame, event)
        elif self.steps and event == "call" and _steps_an_optimizer(frame):
            self.refusal = self.refusal or "it steps an optimizer behind a schedule"

    def _step(self, frame: FrameType, event: str) -> None:
        if event == "return":
            schedule = self._inside.pop()
            if not self._inside:
                self.steps.append(schedule)
                self._rates = self._now()
            return
        schedule = frame.f_locals["self"]
        self._inside.append(schedule)
        if len(self._inside) == 1:
            known = any(schedule is one for one in self._known) and frame.f_locals.get("epoch") is None
            if not known or self.rate_changed() is not None:
                self.refusal = self.refusal or "it moves on a schedule of learning rates that is not followed"

    def rate_changed(self) -> str | None:
        """A rate that is no more what schedules have made it, in words."""
        for before, now in zip(self._rates, self._now(), strict=True):
            if not same_number(before, now):
                return f"a learning rate: {before!r} -> {now!r}"
        return None
