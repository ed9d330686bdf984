"""How much may be recorded before it runs unasked: an operation is charged its bytes and a share of the number."""

from __future__ import annotations

from typing import Any

from marid import policy
from marid.frontend import handles
from marid.frontend.ahead import may_go_ahead, share, takes_steps_unread, touches_little
from marid.frontend.materialize import begin_immediate, is_held_back, may_be_immediate, run_everything
from marid.frontend.observe import observer
from marid.graph.tape import Tape
from marid.report.stats import counters
from marid.semantics.scopes import Site, current_site
from marid.settings import settings


def cost_of(nbytes: int) -> int:
    """What one node that allocates ``nbytes`` is charged: its bytes, and its share of the limit on nodes."""
    return nbytes + share()


def overflow(tape: Tape) -> None:
    """The tape may have grown too long or too large: count exactly, and run all of it when it has.

    Half of the limits is enough to run, at the next node like the one where this happened before; at the limits, which
    no charge exceeds, it happens anyway.
    """
    if observer() is not None:
        tape.set_budget(settings.max_pending_bytes)  # a function under marid.compile is one program
        return
    if tape.chunk and not is_held_back():
        run_everything(tape, wait=False)
        tape.set_budget(tape.chunk)
        return
    newest = tape.entries[-1]()
    here = None if newest is None else (newest.site, newest.scope, newest.op, newest.spec)
    if tape.grace <= 0:
        nodes, nbytes = tape.measure()
        used = max(nbytes / settings.max_pending_bytes, nodes / settings.max_pending_nodes)
        if _are_little(tape, nodes, nbytes):
            _cut_unasked(tape, None if newest is None else newest.site)
            tape.set_budget(settings.max_pending_bytes // policy.IMMEDIATE_UNREAD)
            part = policy.IMMEDIATE_UNREAD_PART if may_go_ahead() else 1
            begin_immediate(tape, settings.immediate_bytes // part)
            return
        # Charges add up bytes and nodes, so half of what is left is safe for both.
        budget = int((1 - used) / 2 * settings.max_pending_bytes)
        few = settings.max_pending_nodes // policy.IMMEDIATE_UNREAD - nodes
        tape.set_budget(min(budget, few * share()) if few > 0 else budget)
        if used < policy.CUT_AT:
            return
        tape.grace = tape.budget if tape.cut_at is not None else 0
    else:
        tape.grace += tape.budget
    if tape.grace > 0 and here != tape.cut_at:
        tape.set_budget(0)  # to be asked again at the next node
        return
    tape.cut_at = here
    _cut_unasked(tape, None if newest is None else newest.site)


def _are_little(tape: Tape, nodes: int, nbytes: int) -> bool:
    """Whether what is pending, of which nothing was read, is many operations that would better run at once."""
    if (
        nodes * policy.IMMEDIATE_UNREAD < settings.max_pending_nodes
        or nbytes * policy.IMMEDIATE_RESULTS_AHEAD > nodes * settings.immediate_bytes
    ):
        return False
    return may_be_immediate(tape) and touches_little(tape.pending())


def optimizer_stepped(*_: Any) -> None:
    """Run what is pending if much is: a loop that reads now and then, or never, repeats best in whole steps."""
    for tape in handles.tapes:
        if not tape.entries or tape.charged == tape.stepped_at:
            continue  # nothing was recorded since the last step
        waits = observer() is not None or bool(is_held_back())
        parts = policy.CUT_SHARE_UNREAD if takes_steps_unread(tape) else policy.CUT_SHARE_AFTER_STEP
        # Measuring takes as long as recording a few operations, so only when so much was added since the last time.
        if waits or tape.chunk or (tape.charged - tape.measured_at) * parts < settings.max_pending_bytes:
            continue
        tape.measured_at = tape.charged
        nodes, nbytes = tape.measure()
        if nodes * parts > settings.max_pending_nodes or nbytes * parts > settings.max_pending_bytes:
            _cut_unasked(tape, current_site())


def _cut_unasked(tape: Tape, site: Site | None) -> None:
    counters.count_automatic_cut(site)
    tape.grace = 0
    run_everything(tape, wait=False)  # a failure is raised where its value is read
    tape.set_budget(settings.max_pending_bytes // 2)
