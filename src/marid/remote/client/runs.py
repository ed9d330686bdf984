"""Runs of programs on a worker: programs that are sent once and then named by digest, and the steps that run them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from marid.engine.plain import as_int, as_list, spec_from
from marid.engine.protocol import GiveBack
from marid.execute.geometry import Misprediction, report
from marid.execute.store import ProgramStore
from marid.graph.analysis import analysis_of, forecast
from marid.graph.node import Node, Spec, hand_over, land
from marid.graph.prepared import Prepared
from marid.graph.program import Program, Task, differ
from marid.recent import Recent
from marid.remote.client.blocks import Block, Memory, RemoteBuffer, extent_of
from marid.remote.client.steps import Sent, Step, configure
from marid.remote.wire import requests as ask
from marid.remote.wire.kernel_settings import current
from marid.remote.wire.program_records import body_of, changes_between, digest_of, geometry_of, packed
from marid.report.hooks import ran

_SIZES = 64  # geometries of a program that are remembered


class EncodedProgram:
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
        self.sizes: Recent[tuple[Spec | None, ...], Specialization] = Recent(_SIZES)


class Specialization:
    """A program with the specs of its slots. ``extents`` are the bytes that each root takes at least, by slot;
    ``transient_bytes`` the forecast of what its results take at once."""

    __slots__ = ("digest", "encoded", "extents", "specs", "transient_bytes")

    def __init__(self, encoded: EncodedProgram, specs: tuple[Spec | None, ...], transient_bytes: int) -> None:
        self.encoded = encoded
        self.specs = specs
        self.digest = digest_of(self.body)
        self.transient_bytes = transient_bytes
        self.extents: dict[int, int] = {}
        for root, spec in zip(encoded.roots, specs, strict=True):
            if spec is not None:
                self.extents[root] = max(self.extents.get(root, 0), extent_of(spec))

    @property
    def body(self) -> bytes:
        """The specs as plain data."""
        return geometry_of(self.specs)


class EncodedPrograms:
    """The programs of one client, and the specs that they came with."""

    def __init__(self) -> None:
        self._store = ProgramStore(lambda program, _: EncodedProgram(program))

    def find(self, task: Task | Prepared) -> Specialization:
        """The program of ``task`` with its specs, made ready to be sent if it is new."""
        encoded = self._store.find(task)
        specialization = encoded.sizes.used(task.specs)
        if specialization is None:
            nbytes = forecast(encoded.program, task.specs).nbytes
            specialization = Specialization(encoded, task.specs, nbytes)
            encoded.sizes.put(task.specs, specialization)
        return specialization

    def forget(self) -> None:
        """Forget all of them; one that comes again has the same digest, and need not be sent again."""
        self._store.clear()


# --- steps -----------------------------------------------------------------------------------------------------------


class RunStep(Step):
    """A program of recorded operations. Until it is done its nodes count as run, and what they forgot is kept here."""

    may_crash = True

    def __init__(
        self, specialization: Specialization, inputs: list[RemoteBuffer], params: list[Any], base: int, site: Any
    ) -> None:
        encoded = specialization.encoded
        self.specialization = specialization
        self.params = tuple(params)
        self.base = base
        self.site = site
        self.inputs = tuple([buffer.handle for buffer in inputs])
        self.handles = tuple([base + slot for slot in encoded.program.output_slots])
        self.reads = tuple(dict.fromkeys([buffer.block for buffer in inputs]))
        self.writes = tuple(dict.fromkeys([inputs[place].block for place in encoded.written_inputs]))
        self.blocks: dict[int, Block] = {}
        """Of its slots, by root, until it is done."""
        self.stopped: tuple[int, tuple[int, ...]] | None = None
        """Where it has failed, and the slots that existed then."""
        self.task: Task | None = None
        self.queued = time.perf_counter() if ran.listeners else 0.0
        self._settings = current()
        self._give_back: GiveBack | None = None
        self._kept: list[tuple[Any, ...]] = []

    # --- what it makes ---

    def enter(self, inputs: list[RemoteBuffer]) -> None:
        """Note the blocks of its inputs, by root slot, and those that it makes."""
        for slot, buffer in zip(self.specialization.encoded.program.input_slots, inputs, strict=True):
            self.blocks[slot] = buffer.block
            buffer.block.nbytes = max(buffer.block.nbytes, self.specialization.extents.get(slot, 0))
        self.add(self.specialization.encoded.program.output_slots)

    def add(self, slots: Sequence[int]) -> None:
        """Blocks for what it makes in these slots."""
        made: list[Block] = []
        for slot in slots:
            root = self.specialization.encoded.roots[slot]
            geometry = self.specialization.specs[root]
            if root not in self.blocks and geometry is not None:
                self.blocks[root] = block = Block(geometry, self.site, self.specialization.extents[root])
                made.append(block)
        self.makes = (*self.makes, *made)

    def output(self, memory: Memory, slot: int, node: Node) -> RemoteBuffer:
        """The tensor that it makes in a slot, by the operation of ``node``."""
        geometry = self.specialization.specs[slot]
        assert geometry is not None
        return memory.made(self.base + slot, geometry, self.blocks[self.specialization.encoded.roots[slot]], node)

    # --- its nodes ---

    def record(self, task: Task, give_back: GiveBack) -> None:
        """Let the nodes of ``task`` count as run."""
        self.task, self._give_back = task, give_back
        self._kept += [(node, node.args, node.kwargs, node.after, node.overwrites) for node in task.nodes]
        for node in task.nodes:
            hand_over(node)

    def requests(self, sent: Sent) -> list[ask.Request]:
        encoded, found = self.specialization.encoded, configure(self._settings, sent)
        if encoded.digest not in sent.programs:
            sent.programs.add(encoded.digest)
            found.append(ask.Program(encoded.digest, packed(encoded.body)))
        if (encoded.digest, self.specialization.digest) not in sent.geometries:
            sent.geometries.add((encoded.digest, self.specialization.digest))
            found.append(_geometry(self.specialization, sent.last.get(encoded.digest)))
            sent.last[encoded.digest] = self.specialization.digest, self.specialization.specs
        last = sent.runs.get(encoded.digest)
        sent.runs[encoded.digest] = self.inputs, self.params
        if self.stopped is not None or last is None:
            until, keep = self.stopped or (None, ())
            return [
                *found,
                ask.Run(encoded.digest, self.specialization.digest, self.inputs, self.params, self.base, until, keep),
            ]
        inputs = tuple([(i, b) for i, (a, b) in enumerate(zip(last[0], self.inputs, strict=True)) if a != b])
        params = tuple([(i, b) for i, (a, b) in enumerate(zip(last[1], self.params, strict=True)) if differ(a, b)])
        return [*found, ask.Again(encoded.digest, self.specialization.digest, inputs, params, self.base)]

    def done(self, result: Any) -> None:
        super().done(result)
        land(self.recorded_nodes)
        self.forget()

    @property
    def recorded_nodes(self) -> list[Node]:
        """What stands for its instructions; nothing once it was done, also when it is done again on a replacement."""
        return [] if self.task is None else self.task.nodes

    def forget(self) -> None:
        """The nodes are no longer its affair."""
        self.task = self._give_back = None
        self._kept.clear()
        self.blocks = {}

    def take_back(self) -> list[Node]:
        """It was not done, or not to its end: let its nodes be pending again."""
        assert self.task is not None
        assert self._give_back is not None
        nodes = self.task.nodes
        for value in self.task.outputs:
            value.concrete = None
        for node, args, kwargs, after, overwrites in self._kept:
            node.args, node.kwargs, node.after, node.overwrites = args, kwargs, after, overwrites
        self._give_back(nodes)
        return nodes

    def refused(self) -> bool:
        self.take_back()
        self.forget()
        return False

    def spoil(self, error: Exception) -> None:  # noqa: ARG002
        return None  # its nodes are pending again


class ReplayStep(RunStep):
    """A program under ``marid.compile``: there are no nodes that could be pending again, so what it was to write cannot
    be had when something before it has failed. It keeps its inputs until it is done."""

    def __init__(
        self,
        specialization: Specialization,
        inputs: list[RemoteBuffer],
        params: list[Any],
        base: int,
        site: Any,
        nodes: list[Node],
    ) -> None:
        super().__init__(specialization, inputs, params, base, site)
        self.nodes = nodes
        self.buffers = list(inputs)
        """Its inputs and outputs, so that they are not freed before it is done."""

    @property
    def recorded_nodes(self) -> list[Node]:
        return self.nodes

    def forget(self) -> None:
        super().forget()
        self.buffers = []

    def refused(self) -> bool:
        return False

    def spoil(self, error: Exception) -> None:
        """Let whoever reads what it was to make or write get ``error``."""
        for block in (*self.makes, *self.writes):
            block.error = error
        self.forget()


def _geometry(specialization: Specialization, before: tuple[bytes, tuple[Spec | None, ...]] | None) -> ask.Request:
    """The specs of a program, or what of them is not as it was ``before``."""
    program = specialization.encoded.digest
    changes = None if before is None else changes_between(before[1], specialization.specs)
    if before is None or changes is None or 2 * len(changes) > len(specialization.specs):
        return ask.Geometry(program, specialization.digest, packed(specialization.body))
    return ask.Sizes(program, before[0], specialization.digest, changes)


def report_mispredictions(reported: list[Any], seq: int, step: RunStep) -> None:
    """Count the mispredictions of request ``seq`` among those that a worker has ``reported``, and correct the recorder.
    Raises ``WireError`` for data that means nothing."""
    program, specs = step.specialization.encoded.program, step.specialization.specs
    nodes = step.recorded_nodes
    for data in reported if nodes else ():
        parts = as_list(data, 5, "a misprediction")
        if len(parts) != 5 or parts[0] != seq:
            continue
        index = as_int(parts[1], 0, len(program.instructions) - 1, "an instruction")
        path = tuple([as_int(one, 0, 1 << 16, "a path") for one in as_list(parts[2], 2, "a path")])
        seen, instruction = spec_from(parts[3]), program.instructions[index]
        for result in instruction.results:
            recorded = specs[result.slot]
            if result.path == path and recorded is not None:
                shares = parts[4] is True
                params = list(step.params)
                report(Misprediction(nodes[index], instruction, path, recorded, seen, shares, specs, params))
