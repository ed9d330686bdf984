"""How long the operations of programs take, one by one, where somebody asks (``marid.settings.profile_operators``).

A run reads the clock behind each of its instructions, in the table in C++ and in the loop in Python, and adds to sums
that are kept by program; they become operators, modules and lines when somebody looks. Where an instruction was written
can differ between runs of one program, so that is compared before each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from marid.graph.node import Spec
from marid.graph.program import Instruction, ListOf, Program, Slot
from marid.native import module
from marid.semantics.scopes import Scope, Site, text_of_site
from marid.settings import settings

_PROFILES = 512  # sums that are kept apart; older ones are merged by line


@dataclass(frozen=True)
class OperatorStats:
    """What the operations of one kind at one line and in one module took in all.

    ``operator`` as ``"aten::mm"``; a part of a program that was compiled is one operation, ``"marid::compiled"``, with
    the line and module of its first one. ``count`` runs, ``seconds`` in all, ``bytes`` that they read and wrote at
    least, by the sizes of their tensors; views touch none.
    """

    operator: str
    module_path: str | None
    phase: str
    source: str
    count: int
    seconds: float
    bytes: int


class Owner(Protocol):
    """A program that runs."""

    program: Program
    recorded: Program
    """The same where that is as it was recorded, else what was."""
    origins: list[int] | None
    """For each instruction the recorded one that it stands for, where these are others."""
    profiles: list[Any]


class Timing:
    """Where one run notes what its instructions take: it adds to the sums of ``profile``, and where ``spans`` are
    wanted writes two readings of ``time.perf_counter_ns`` for each, zeros for one that did not run."""

    __slots__ = ("profile", "spans")

    def __init__(self, profile: Profile, with_spans: bool) -> None:
        self.profile = profile
        self.spans = np.zeros(len(profile.sums), np.int64) if with_spans else None

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the sums and of the spans, for the C++ half."""
        return self.profile.address, None if self.spans is None else self.spans.ctypes.data

    def note(self, index: int, began: int, ended: int) -> None:
        """An instruction that ran in Python."""
        self.profile.sums[2 * index] += ended - began
        self.profile.sums[2 * index + 1] += 1
        if self.spans is not None:
            self.spans[2 * index], self.spans[2 * index + 1] = began, ended


class Profile:
    """Sums over the runs of one program, of one set of sizes and written at the same places: for each instruction the
    nanoseconds and the runs, one after the other."""

    __slots__ = ("address", "generation", "origins", "params", "places", "program", "recorded", "specs", "sums")

    def __init__(self, owner: Owner, task: Any, places: tuple[Any, ...], generation: int) -> None:
        specs: tuple[Spec | None, ...] = task.specs
        self.program = owner.program
        self.recorded = owner.recorded
        self.params: list[Any] = list(task.params)
        self.origins = owner.origins
        self.places = places
        self.specs = specs
        self.generation = generation
        self.sums = np.zeros(2 * len(owner.program.instructions), np.int64)
        self.address: int = self.sums.ctypes.data

    def where(self, index: int) -> tuple[Site | None, Scope | None]:
        """Where an instruction was written, and in which module and phase."""
        return where_of(self.places, self.origins, index)

    def place(self, index: int) -> tuple[Site | None, Scope | None]:
        """The same of an instruction of ``recorded``."""
        return where_of(self.places, None, index)

    def rows(self) -> Iterator[OperatorStats]:
        """One for each instruction that ran."""
        for index, instruction in enumerate(self.program.instructions):
            count = int(self.sums[2 * index + 1])
            if not count:
                continue
            site, scope = self.where(index)
            yield OperatorStats(
                instruction.op.name,
                None if scope is None else scope.module_path,
                "forward" if scope is None else scope.phase,
                text_of_site(site),
                count,
                int(self.sums[2 * index]) / 1e9,
                count * bytes_of(instruction, self.specs),
            )


class OperatorTimes:
    """The sums of all runs since the import or ``marid.reset_stats()``; used under the engine's lock.

    ``wanted`` says whether runs are to be timed: it is set by the setting and by ``marid.trace``.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.traced = 0
        self._generation = 0
        self._profiles: list[Profile] = []
        self._merged: dict[tuple[str, str | None, str, str], list[Any]] = {}
        self.look()
        settings.when_changed(self.look)

    def look(self) -> None:
        """Follow the setting."""
        self.wanted = bool(settings.profile_operators or self.traced)

    def timing(self, owner: Owner, task: Any) -> Timing | None:
        """Where a run of ``task`` is to note what it takes; None where nobody wants to know."""
        if not self.wanted:
            return None
        return Timing(self._profile(owner, task, module.places_of(task.nodes)), self.traced > 0)

    def profiles(self) -> list[Profile]:
        """The sums that are kept apart."""
        return list(self._profiles)

    def _profile(self, owner: Owner, task: Any, places: tuple[Any, ...]) -> Profile:
        kept, specs = owner.profiles, task.specs
        for profile in kept:
            if profile.generation == self._generation and profile.specs == specs and profile.places == places:
                return profile
        if len(self._profiles) >= _PROFILES:
            self._merge()
        kept[:] = [profile for profile in kept if profile.generation == self._generation]
        made = Profile(owner, task, places, self._generation)
        kept.append(made)
        self._profiles.append(made)
        return made

    def _merge(self) -> None:
        """Keep the sums so far by operator and line only."""
        for row in self._rows():
            self._add(self._merged, row)
        self._profiles.clear()
        self._generation += 1

    def _rows(self) -> Iterator[OperatorStats]:
        for profile in self._profiles:
            yield from profile.rows()

    @staticmethod
    def _add(into: dict[tuple[str, str | None, str, str], list[Any]], row: OperatorStats) -> None:
        sums = into.setdefault((row.operator, row.module_path, row.phase, row.source), [0, 0.0, 0])
        sums[0] += row.count
        sums[1] += row.seconds
        sums[2] += row.bytes

    def snapshot(self) -> list[OperatorStats]:
        """The sums by operator, module, phase and line, slowest first."""
        sums = {key: list(value) for key, value in self._merged.items()}
        for row in self._rows():
            self._add(sums, row)
        found = [OperatorStats(*key, *value) for key, value in sums.items()]
        return sorted(found, key=lambda row: -row.seconds)

    def reset(self) -> None:
        """Start again from zero."""
        self._profiles.clear()
        self._merged.clear()
        self._generation += 1


operator_times = OperatorTimes()


def where_of(places: tuple[Any, ...], origins: Sequence[int] | None, index: int) -> tuple[Site | None, Scope | None]:
    """Where an instruction was written; ``places`` has site and scope of each recorded operation in turn."""
    at = min(index if origins is None else origins[index], len(places) // 2 - 1)
    return places[2 * at], places[2 * at + 1]


def labels_of(owner: Owner, nodes: list[Any]) -> tuple[str, ...] | None:
    """What an active profiler of PyTorch is to show the instructions of a run under: module, phase and line."""
    if not torch._C._autograd._profiler_enabled():
        return None
    places = module.places_of(nodes)
    found = (where_of(places, owner.origins, index) for index in range(len(owner.program.instructions)))
    return tuple([_label(site, scope) for site, scope in found])


def _label(site: Any, scope: Any) -> str:
    words = ["marid:"]
    if scope is not None:
        words += [scope.phase, scope.module_path] if scope.module_path else [scope.phase]
    if site is not None:
        words.append(f"at {site}")
    return " ".join(words)


def bytes_of(instruction: Instruction, specs: tuple[Spec | None, ...]) -> int:
    """Bytes of the tensors that an instruction reads and makes or writes, each once."""
    if instruction.op.view:
        return 0
    given = [*instruction.args, *(value for _, value in instruction.kwargs)]
    flat = [item for arg in given for item in (arg.items if isinstance(arg, ListOf) else (arg,))]
    slots = {item.index for item in flat if isinstance(item, Slot)}
    slots.update(result.slot for result in instruction.results)
    total = sum(spec.nbytes for slot in slots if slot < len(specs) and (spec := specs[slot]) is not None)
    if instruction.op.mutates and flat and isinstance(flat[0], Slot) and (spec := specs[flat[0].index]) is not None:
        total += spec.nbytes  # read and written
    return total
