"""Programs as the client knows them: what is sent once and then named by digest, and what a run does to memory."""

from __future__ import annotations

from collections import OrderedDict

from marid.engine.protocol import Geometry
from marid.execute.store import ProgramStore
from marid.graph.analysis import analysis_of, forecast
from marid.graph.node import Spec
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task
from marid.remote.buffers import extent_of, geometry_of_spec
from marid.remote.programs import body_of, digest_of, geometry_of

__all__ = ["Known", "Programs", "Sized"]

_SIZES = 64  # geometries of a program that are remembered


class Known:
    """A program with its body. ``roots`` says for each slot in which slot's memory it lies (its own, for most);
    ``written`` are the roots that are written, of which those of inputs are ``written_inputs``."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.body = body_of(program)
        self.digest = digest_of(self.body)
        analysis = analysis_of(program)
        self.roots = [analysis.roots.get(slot, slot) for slot in range(program.slot_count)]
        written = analysis.written
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
    """The programs of one client, and the specs that they came with."""

    def __init__(self) -> None:
        self._store = ProgramStore(lambda program, _: Known(program))

    def find(self, task: Task | Prepared) -> Sized:
        """The program of ``task`` with its specs, made ready to be sent if it is new."""
        known = self._store.find(task)
        sized = known.sizes.get(task.specs)
        if sized is None:
            nbytes = forecast(known.program, task.specs).nbytes
            sized = known.sizes[task.specs] = Sized(known, task.specs, nbytes)
            if len(known.sizes) > _SIZES:
                known.sizes.popitem(last=False)
        else:
            known.sizes.move_to_end(task.specs)
        return sized
