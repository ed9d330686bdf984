"""Running what was recorded before a function under ``marid.compile`` is called."""

from __future__ import annotations

from marid.frontend import handles
from marid.frontend.materialize import run_everything, wait_anyway

__all__ = ["run_pending_work"]


def run_pending_work() -> bool:
    """Run all that is pending on all devices; whether nothing failed."""
    fine = True
    for index in range(handles.device_count):
        on = handles.tape(index)
        fine &= not on.entries or run_everything(on) is None
    wait_anyway()
    return fine
