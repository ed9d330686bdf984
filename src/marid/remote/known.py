"""Programs as the client knows them: what is sent once and then named by digest, and what a run does to memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from marid.engine.protocol import Geometry
from marid.graph.node import Spec
from marid.graph.operators import shared_slots, written_slots
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task
from marid.optimize.forecast import forecast
from marid.remote.buffers import extent_of, geometry_of_spec
from marid.remote.programs import body_of, digest_of, geometry_of
from marid.report import hooks
from marid.report.builds import builds
from marid.report.stats import counters
from marid.semantics.scopes import current_site
from marid.settings import settings

__all__ = ["Known", "Programs", "Sized"]

_SIZES = 64  # geometries of a program that are remembered


class Known:
    """A program with its body. ``roots`` says for each slot in which slot's memory it lies (its own, for most);
    ``written`` are the roots that are written, of which those of inputs are ``written_inputs``."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.body = body_of(program)
        self.digest = digest_of(self.body)
        self.roots = list(range(program.slot_count))
        written: set[int] = set()
        for instruction in program.instructions:
            for slot, of in shared_slots(instruction).items():
                self.roots[slot] = self.roots[of]
            if instruction.op.mutates:
                written |= {self.roots[slot] for slot in written_slots(instruction)}
        places = {slot: place for place, slot in enumerate(program.input_slots)}
        self.written_inputs = tuple(sorted(places[slot] for slot in written if slot in places))
        self.places = places
        self.sizes: OrderedDict[tuple[Spec | None, ...], Sized] = OrderedDict()


class Sized:
    """A program with the specs of its slots. ``extents`` are the bytes that each root takes at least, by slot;
    ``transient_bytes`` the forecast of what its results take at once."""

    __slots__ = ("_geometries", "digest", "extents", "known", "specs", "transient_bytes")

    def __init__(self, known: Known, specs: tuple[Spec | None, ...], transient_bytes: int) -> None:
        self.known = known
        self.specs = specs
        self.digest = digest_of(self.body)
        self.transient_bytes = transient_bytes
        self._geometries: dict[int, Geometry] = {}
        self.extents: dict[int, int] = {}
        for root, spec in zip(known.roots, specs, strict=True):
            if spec is not None:
                self.extents[root] = max(self.extents.get(root, 0), extent_of(spec))

    def geometry(self, slot: int) -> Geometry | None:
        """That of what is in a slot, if that is a tensor."""
        found = self._geometries.get(slot)
        spec = self.specs[slot]
        if found is None and spec is not None:
            found = self._geometries[slot] = geometry_of_spec(spec)
        return found

    @property
    def body(self) -> bytes:
        """The specs as plain data."""
        return geometry_of(self.specs)


class Programs:
    """Least-recently-used map from a program's key to the program; equality of keys is full, as in this process."""

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[Any, ...], Known] = OrderedDict()
        self._instructions = 0

    def find(self, task: Task | Prepared) -> Sized:
        """The program of ``task`` with its specs, made ready to be sent if it is new."""
        known = self._programs.get(task.key)
        if known is None:
            known = self._add(task)
        else:
            self._programs.move_to_end(task.key)
            counters.programs_reused += 1
        sized = known.sizes.get(task.specs)
        if sized is None:
            nbytes = task.transient_bytes if isinstance(task, Prepared) else forecast(task).nbytes
            sized = known.sizes[task.specs] = Sized(known, task.specs, nbytes)
            if len(known.sizes) > _SIZES:
                known.sizes.popitem(last=False)
        else:
            known.sizes.move_to_end(task.specs)
        return sized

    def _add(self, task: Task | Prepared) -> Known:
        program = task.program if isinstance(task, Prepared) else task.build()
        known = self._programs[task.key] = Known(program)
        counters.programs_built += 1
        builds.note(task, program, current_site())
        self._instructions += len(program.instructions)
        while len(self._programs) > 1 and (
            len(self._programs) > settings.cache_programs or self._instructions > settings.cache_instructions
        ):
            _, oldest = self._programs.popitem(last=False)
            self._instructions -= len(oldest.program.instructions)
        if hooks.built.listeners:
            hooks.tell_built(program, current_site())
        return known
