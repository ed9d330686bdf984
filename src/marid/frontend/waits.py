"""What a read would wait for, and waiting without holding up an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from marid.errors import MaterializationError
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import hold_back, is_held_back, is_sync_forbidden, materialize, pending_nodes
from marid.frontend.observe import observer
from marid.graph.node import Node
from marid.native import module
from marid.report.units import bytes_text
from marid.semantics.scopes import current_site, working_for
from marid.semantics.tracebacks import fold


def awaited(tensor: Any) -> Generator[Any, None, Any]:
    """For ``__await__``: wait for the value of ``tensor`` as a read does, on a thread of the running asyncio loop, and
    return the tensor. From a worker the value is brought too, for the next read.

    Waits on the calling thread where no asyncio loop runs, in ``no_sync`` (which is about this thread), and while
    ``marid.compile`` records. A task that is cancelled meanwhile ends at once; the value is made all the same.
    """
    import asyncio  # PyTorch does not need it, and neither does who awaits nothing

    site, held = current_site(), is_held_back()

    def wait() -> None:
        with working_for(site), hold_back() if held else contextlib.nullcontext():
            materialize((tensor,), "await", "value")

    try:
        if asyncio._get_running_loop() is None or is_sync_forbidden() or observer() is not None or _is_there(tensor):
            wait()
        else:
            yield from asyncio.to_thread(wait).__await__()
        return tensor
    except BaseException as error:
        fold(error)
        raise


def _is_there(tensor: Any) -> bool:
    return not pending_nodes(tensor) and engine_of(tensor._value.spec.device).has(tensor._value)


@dataclass(frozen=True)
class Wait:
    """What reading a tensor would wait for now; false where that is nothing. ``str`` says it in words.

    ``operations`` have to run first, whose results take ``nbytes`` bytes; the newest of them was written at ``source``.
    ``running`` says that something runs already which has to end before. ``worker`` names the worker that would have to
    be asked, if any. ``failure`` is what reading would raise in place of waiting.
    """

    operations: int = 0
    nbytes: int = 0
    source: str | None = None
    running: bool = False
    worker: str | None = None
    failure: str | None = None

    def __bool__(self) -> bool:
        return self.failure is None and (self.operations > 0 or self.running or self.worker is not None)

    def __str__(self) -> str:
        if self.failure is not None:
            return f"nothing: reading raises {self.failure}"
        parts = []
        if self.operations:
            many = "operation" if self.operations == 1 else "operations"
            where = f", the last one of {self.source}" if self.source is not None else ""
            parts.append(f"{self.operations:,} recorded {many} ({bytes_text(self.nbytes)}{where})")
        if self.running:
            parts.append("what is running already")
        if self.worker is not None:
            parts.append(f"an answer of {self.worker}")
        return " and ".join(parts) or "nothing: the value is there"


def would_sync(tensor: Any) -> Wait:
    """What reading ``tensor`` would wait for: a ``Wait``, false where that is nothing. Runs nothing, waits for nothing.

    Answers for this moment: what other threads run or record may change it. ``marid.no_sync()`` forbids to read what
    has operations to run, but for a few on single numbers of the host. Raises ``TypeError`` for anything that is not a
    lazy tensor.
    """
    if not handles.is_lazy(tensor):
        raise TypeError(f"marid.would_sync() takes a lazy tensor, but got {type(tensor).__name__}")
    value = tensor._value
    assert value.spec is not None
    tape, engine = handles.tape(value.spec.device), engine_of(value.spec.device)
    asked = pending_nodes(tensor)
    try:
        tape.fail_dependents()
        nodes: list[Node] = tape.cut(asked) if asked else []
    except MaterializationError as error:
        return Wait(failure=f"{type(error).__name__}: {error}")
    has = engine.has(value)
    return Wait(
        operations=len(nodes),
        nbytes=module.allocated(nodes),
        source=str(asked[-1].site) if asked and asked[-1].site is not None else None,
        running=not has and engine.local,
        worker=engine.name if not engine.local and not has else None,
    )
