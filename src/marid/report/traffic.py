"""What went between this process and its workers: counted at the sockets, and by what it was for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from marid.errors import BudgetError
from marid.report.units import bytes_text
from marid.semantics.scopes import current_site, text_of_site


@dataclass(frozen=True)
class Moved:
    """Bytes that one line sent (``up``) or brought, with the role of the tensors."""

    source: str
    role: str
    up: int
    down: int


@dataclass(kw_only=True)
class SocketCounts:
    """What went over sockets: ``bytes_up`` and ``bytes_down``, in ``messages_up`` and ``messages_down``; ``reconnects``
    of a broken connection, and messages ``resent`` after one."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0
    reconnects: int = 0
    resent: int = 0


@dataclass(kw_only=True)
class Counts(SocketCounts):
    """Counters of remote devices.

    What went over all sockets; ``round_trips`` times somebody waited for a worker; ``deduplicated`` bytes that were not
    sent because the worker had them; ``recoveries`` of a lost worker with the ``replays`` of steps and
    ``recovery_seconds`` that they took; ``checkpoints`` and the ``checkpoint_bytes`` that they brought; ``copies`` from
    worker to worker and the ``copied_bytes`` of these, and copies that were ``relayed`` by this process because the
    workers do not reach each other.
    """

    round_trips: int = 0
    deduplicated: int = 0
    recoveries: int = 0
    replays: int = 0
    recovery_seconds: float = 0.0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    relayed: int = 0


@dataclass(kw_only=True)
class RemoteStats(Counts):
    """``Counts`` since import or ``marid.reset_stats()``, and what can be told of them.

    ``moved`` are the bytes of tensors by line and role, most first; ``workers`` what each says of itself, by device.
    """

    moved: list[Moved]
    workers: dict[int, dict[str, Any]]


@dataclass
class _Budget:
    round_trips: int | None
    bytes_up: int | None
    bytes_down: int | None


@dataclass(kw_only=True)
class Traffic(Counts):
    """The live numbers behind ``RemoteStats``."""

    lines: dict[tuple[Any, str], list[int]] = field(default_factory=dict)
    budgets: list[_Budget] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **more: int) -> None:
        """Count; raises ``BudgetError`` where a block has had more than it may have."""
        with self.lock:
            own = self.__dict__
            for name, count in more.items():
                own[name] += count
        if self.budgets:
            self._check()

    def moved(self, site: Any, role: str | None, up: int = 0, down: int = 0) -> None:
        """Bytes of a tensor were sent or brought for a line."""
        with self.lock:
            entry = self.lines.setdefault((site, role or "other"), [0, 0])
            entry[0] += up
            entry[1] += down

    def recovered(self, steps: int, seconds: float) -> None:
        """A lost worker was made good for."""
        with self.lock:
            self.recoveries += 1
            self.replays += steps
            self.recovery_seconds += seconds

    def snapshot(self, workers: dict[int, dict[str, Any]]) -> RemoteStats:
        """The numbers of this moment."""
        with self.lock:
            merged: dict[tuple[str, str], list[int]] = {}
            for (site, role), (up, down) in self.lines.items():
                entry = merged.setdefault((text_of_site(site), role), [0, 0])
                entry[0] += up
                entry[1] += down
            moved = [Moved(source, role, up, down) for (source, role), (up, down) in merged.items()]
            moved.sort(key=lambda one: -(one.up + one.down))
            own = {one.name: getattr(self, one.name) for one in fields(Counts)}
            return RemoteStats(**own, moved=moved, workers=workers)

    def reset(self) -> None:
        """Start again from zero; budgets of running blocks go on with what they have left."""
        with self.lock:
            for one in self.budgets:
                for name in ("round_trips", "bytes_up", "bytes_down"):
                    limit = getattr(one, name)
                    if limit is not None:
                        setattr(one, name, limit - getattr(self, name))
            self.__init__(budgets=self.budgets, lock=self.lock)

    def _check(self) -> None:
        for one in self.budgets:
            for name, limit in vars(one).items():
                used = getattr(self, name)
                if limit is not None and used > limit:
                    setattr(one, name, None)  # said once
                    over = f"{used - limit}" if name == "round_trips" else bytes_text(used - limit)
                    what = {"round_trips": "round trips", "bytes_up": "bytes up", "bytes_down": "bytes down"}[name]
                    raise BudgetError(
                        f"{current_site()} exceeds marid.budget({name}=...) by {over}: see marid.stats().remote for "
                        f"what the {what} were for"
                    )


traffic = Traffic()


@contextmanager
def budget(
    *, round_trips: int | None = None, bytes_up: int | None = None, bytes_down: int | None = None
) -> Iterator[None]:
    """A block that may wait for workers so often, and send and bring so many bytes, all threads together; None for any.

    Raises ``BudgetError`` at the line that exceeds it, once that has happened: values are not lost. For tests.
    """
    allowed = {"round_trips": round_trips, "bytes_up": bytes_up, "bytes_down": bytes_down}
    limits = {name: None if n is None else getattr(traffic, name) + n for name, n in allowed.items()}
    one = replace(_Budget(None, None, None), **limits)
    traffic.budgets.append(one)
    try:
        yield
    finally:
        traffic.budgets[:] = [other for other in traffic.budgets if other is not one]
