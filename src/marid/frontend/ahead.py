"""Running ahead: work that will be asked for runs before it is asked for, while the user's thread records the rest.

Lazy means that what nobody reads is never run. But a loop that comes to the same read again and again, and of which
nearly all that it recorded had run by then, will need what it records now as well. From its third turn on it is handed
to the engine in chunks: whenever so much has been recorded as makes a fixed part of a turn, and what is left at the
read itself. The places depend on what is recorded alone, never on time, so the same programs recur.

What an optimizer has been asked to do will be asked for too, whatever comes next: it runs with the first value that is
read behind it, and all else that is pending with it. So a training loop runs whole turns from its first one on, and
its second program is the one that comes again. In a loop that reads only now and then, or never, each step of the
optimizer is such a read, once it has taken a few.

A loop whose operations touch little memory, and that reads what it has made, gains nothing from a program: recording an
operation, and running it later, takes longer than it does. After some such turns its operations run *at once*, as they
are written, on the thread that calls them (``native/immediate.cpp``). So do those of a loop that records many of them
and reads nothing (``limits.py``). They are recorded again when they touch more, or when nothing is read any more.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from marid import policy
from marid.graph.node import Node
from marid.graph.tape import Tape, traffic
from marid.native import module
from marid.semantics.scopes import OPTIMIZER
from marid.settings import settings


def may_go_ahead() -> bool:
    """Whether work may run while more is recorded: where a processor is left for it beside the threads of the kernels.
    Without one, both take longer together than one after the other (``docs/decisions.md``)."""
    return settings.asynchronous and torch.get_num_threads() < _processors()


def has_stepped(tape: Tape) -> bool:
    """A value is read: whether an optimizer's step is pending that was not there at the last read."""
    steps, tape.steps = tape.steps, 0
    if not steps:
        return False
    tape.rarely_reads = steps > policy.UNREAD_STEPS
    # The newest first: a step is mostly what was recorded last.
    return any(node.scope is not None and node.scope.phase == OPTIMIZER for node in reversed(tape.pending()))


def takes_steps_unread(tape: Tape) -> bool:
    """An optimizer has stepped: whether its loop takes many steps without a read, since the last one or before it."""
    if tape.charged != tape.stepped_at:  # and something of that is on this tape
        tape.stepped_at = tape.charged
        tape.steps += 1
    return tape.rarely_reads or tape.steps > policy.UNREAD_STEPS


def touches_little(nodes: list[Node]) -> bool:
    """Whether operations read and write little enough to run at once. Those that read much more than they make read
    weights, as a decoder does for each token."""
    touched, most = traffic(nodes), settings.immediate_bytes * len(nodes)
    return touched <= most // 2 or touched <= min(most, policy.IMMEDIATE_READS * module.allocated(nodes))


def share() -> int:
    """What an operation is charged beside its memory."""
    return settings.max_pending_bytes // settings.max_pending_nodes


@functools.cache
def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _ReadSite:
    """A line that reads: the counts of the tape at its last turn of a loop, and when it last read."""

    __slots__ = ("before", "charged", "charged_at_read", "chunk", "last", "little", "read", "relapses", "turns")

    def __init__(self, tape: Tape) -> None:
        self.read = tape.recorded
        self.last = self.before = tape.recorded, tape.run  # at the last turn, and at the one before it
        self.charged = self.charged_at_read = tape.charged
        self.chunk = self.turns = self.little = self.relapses = 0

    def relapse(self) -> None:
        """Operations do not run at once, or do not any more: it takes twice as many turns until they may."""
        self.relapses = min(self.relapses + 1, policy.IMMEDIATE_RELAPSES)
        self.little = 0

    def wants_immediate(self, tape: Tape) -> bool:
        """The value is read: whether enough turns in a row have made little, each operation."""
        count, charged = tape.recorded - self.read, tape.charged - self.charged_at_read
        if count > 0:
            made = charged - count * share()
            part = policy.IMMEDIATE_RESULTS_AHEAD if may_go_ahead() else policy.IMMEDIATE_RESULTS
            is_little = made <= count * settings.immediate_bytes // part
            self.little = self.little + 1 if is_little else 0
        self.charged_at_read = tape.charged
        return self.little >= settings.immediate_after << self.relapses


class ReadLoop:
    """Notices loops that read from one device at the same lines again and again, and how much they record between."""

    def __init__(self) -> None:
        self._lines: dict[Any, _ReadSite] = {}
        self._began: _ReadSite | None = None  # the line from which operations ran at once, latest
        self._latest: _ReadSite | None = None
        self.wants_immediate = False
        """Whether operations should run at once from the latest read on."""

    def begins_immediate(self) -> None:
        """Operations run at once from now on."""
        self._began = self._latest

    def is_not_immediate(self) -> None:
        """They do not, although they make little."""
        if self._latest is not None:
            self._latest.relapse()

    def chunk(self, site: Any, tape: Tape) -> int:
        """A value is read at ``site``: how much the tape may hold until it is handed over, in units of ``Tape.budget``;
        0 to wait until it is asked for."""
        if self._began is not None:  # they are recorded again
            self._began.relapse()
            self._began = None
        self._latest = line = self._lines.get(site)
        self.wants_immediate = settings.immediate_after == 0
        if line is None:
            if len(self._lines) >= policy.AHEAD_LINES:
                self._lines.clear()
            self._latest = self._lines[site] = _ReadSite(tape)
            return 0
        self.wants_immediate = line.wants_immediate(tape)
        since, line.read = tape.recorded - line.read, tape.recorded
        if since < policy.AHEAD_OPERATIONS:  # the same turn, or a loop too short to be worth it
            return tape.chunk
        # Over two turns: where memory is short, one runs with the optimizer's step and the next with the read.
        recorded, run = tape.recorded - line.before[0], tape.run - line.before[1]
        line.before, line.last = line.last, (tape.recorded, tape.run)
        charged, line.charged = tape.charged - line.charged, tape.charged
        line.turns = line.turns + 1 if run >= policy.AHEAD_SHARE * recorded else 0
        if line.turns < policy.AHEAD_TURNS or charged > since * (share() + policy.AHEAD_BYTES):
            return 0
        chunk = max(charged // policy.AHEAD_CHUNKS, policy.AHEAD_CHUNK * share(), 1)
        if abs(chunk - line.chunk) > line.chunk // 4:  # else the places would move with every small change
            line.chunk = chunk
        return line.chunk
