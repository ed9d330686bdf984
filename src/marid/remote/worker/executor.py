"""What a worker runs programs with: one device, the programs that were sent, and the memory that sessions hold.

Used with the state of its ``Background``. Nothing here records: inputs are concrete tensors, and so are results.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch

from marid.engine.protocol import Called
from marid.engine.single_call import perform
from marid.errors import WireError
from marid.execute.accelerator import Host, accelerator_of
from marid.execute.arena import Arena
from marid.execute.captured import CapturedProgram, CapturedPrograms
from marid.execute.compiled.tier import best
from marid.execute.device_operators import operator_on, takes_device
from marid.execute.executable import Executable
from marid.execute.fitted import fitted
from marid.execute.interrupted import Interrupted
from marid.execute.residency import Residency
from marid.execute.specialisation import Frame, Runnable
from marid.execute.store import ProgramStore
from marid.graph.analysis import forecast
from marid.graph.dispatch_state import concretely
from marid.graph.mersenne_twister import MersenneTwisters
from marid.graph.node import Node, Operation, Spec
from marid.graph.prepared import Prepared, Replay
from marid.native import module
from marid.remote.wire.kernel_settings import KernelSettings, apply
from marid.remote.wire.program_records import changed, digest_of, geometry_of
from marid.remote.wire.tensors import matches
from marid.remote.worker.background import Background
from marid.remote.worker.budget import TooLarge, returned_bytes
from marid.remote.worker.program_reader import RemoteProgram, geometry_from

_PROGRAMS = 4096
_PROGRAM_BYTES = 1 << 30  # of programs and geometries, as they are kept
_INSTRUCTION_BYTES, _SLOT_BYTES = 1024, 32  # what an instruction takes, and a slot in a geometry, about
_GEOMETRIES = 256  # of one program
_HELD = 8  # of what a run holds at its fullest, how much is reported when it is too much


class _Kept:
    """A program that was sent, and its geometries."""

    def __init__(self, remote: RemoteProgram, nbytes: int) -> None:
        self.remote = remote
        self.nbytes = nbytes
        self.geometries: OrderedDict[bytes, tuple[Prepared, list[tuple[int, int]]]] = OrderedDict()
        self.nodes = [Node(i, one.op, None, None, None, None, None, None) for i, one in enumerate(self.program)]

    @property
    def program(self) -> Any:
        return self.remote.program.instructions


class _Lane:
    """What a thread runs programs with."""

    def __init__(self) -> None:
        self.twisters = MersenneTwisters()
        self.arena = Arena()


class Executor:
    """One device and what runs on it. ``memory_limit`` are the bytes that all may hold on it together, 0 for no limit;
    ``spill_limit`` those that may wait on the host when it is reached."""

    def __init__(self, device: torch.device, memory_limit: int = 0, spill_limit: int = 0) -> None:
        self.device = device
        self.memory_limit = memory_limit
        self.residency = Residency(device, spill_limit if memory_limit else 0)
        self.accelerator = accelerator_of(device)
        if device.type == "cuda":  # float32 is float32: clients set the precision of products, and of nothing else
            torch.backends.cudnn.allow_tf32 = False
        self.background = Background()
        self._lanes = _Lane(), _Lane()
        self.runs = 0
        self.refused = 0
        """How many requests were malformed, or made no sense."""
        self._cache = ProgramStore(Executable.of)
        self.captured = CapturedPrograms()
        self._programs: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0

    # --- programs ---

    def define(self, digest: bytes, body: Any) -> None:
        """Keep a program. Raises ``WireError`` for a malformed one."""
        if digest in self._programs:
            self._programs.move_to_end(digest)
            return
        remote = RemoteProgram.read(body, self.device)
        nbytes = memoryview(body).nbytes + _INSTRUCTION_BYTES * len(remote.program.instructions)
        self._programs[digest] = _Kept(remote, nbytes)
        self._bytes += nbytes
        self._trim()

    def _trim(self) -> None:
        while len(self._programs) > 1 and (len(self._programs) > _PROGRAMS or self._bytes > _PROGRAM_BYTES):
            _, oldest = self._programs.popitem(last=False)
            self._bytes -= oldest.nbytes

    def describe(self, program: bytes, digest: bytes, body: Any) -> None:
        """Keep a geometry of a program. Raises ``WireError``, and ``LookupError`` where the program is not known."""
        kept = self._programs[program]
        self._programs.move_to_end(program)
        if digest in kept.geometries:
            kept.geometries.move_to_end(digest)
            return
        self._enter(kept, digest, geometry_from(body, kept.remote.program))

    def resize(self, program: bytes, like: bytes, digest: bytes, changes: tuple[tuple[int, Spec], ...]) -> None:
        """Keep a geometry that is one that is known but for some specs. Raises ``WireError``."""
        kept = self._programs[program]
        self._programs.move_to_end(program)
        if digest in kept.geometries:
            kept.geometries.move_to_end(digest)
            return
        before = kept.geometries[like][0].specs
        specs = changed(before, changes)
        if digest_of(geometry_of(specs)) != digest:
            raise WireError("a geometry does not have the digest that it was sent with")
        self._enter(kept, digest, specs)

    def _enter(self, kept: _Kept, digest: bytes, specs: tuple[Spec | None, ...]) -> None:
        expected = forecast(kept.remote.program, specs)
        prepared = Prepared(kept.remote.program, specs, kept.nodes, expected.nbytes)
        kept.geometries[digest] = prepared, [(slot, nbytes) for nbytes, _, slot in expected.held[:_HELD]]
        added = _SLOT_BYTES * len(specs)
        if len(kept.geometries) > _GEOMETRIES:
            kept.geometries.popitem(last=False)
            added = 0
        kept.nbytes += added
        self._bytes += added
        self._trim()

    def has_program(self, digest: bytes) -> bool:
        """Whether that program is known."""
        return digest in self._programs

    def inputs_of(self, digest: bytes) -> tuple[int, ...]:
        """The input slots of a program that is known."""
        return self._programs[digest].remote.program.input_slots

    def knows(self, program: bytes, geometry: bytes) -> bool:
        """Whether a run of that program with that geometry can be asked for."""
        kept = self._programs.get(program)
        return kept is not None and geometry in kept.geometries

    # --- running ---

    def run(
        self,
        program: bytes,
        geometry: bytes,
        inputs: list[torch.Tensor],
        params: list[Any],
        resident: Any,
        at: Callable[[int], None] | None = None,
    ) -> tuple[Prepared, list[torch.Tensor]]:
        """Run a program; its outputs, in the order of ``prepared.program.output_slots``. ``resident`` is asked for the
        bytes that are held when there is a limit; ``at`` is called with each operator before it runs.

        Raises ``WireError``, ``TooLarge`` before anything has run, and ``Interrupted``.
        """
        kept, prepared, held = self._checked(program, geometry, inputs, params)
        replay, fitting = self._replay(prepared, inputs, params), None
        try:
            self.reserve(prepared.transient_bytes, inputs, resident, held)
        except TooLarge:
            fitting = None if at is not None else self._fitting(prepared, replay, resident)
            if fitting is None:
                raise
        ready = self._ready(prepared)
        with concretely():
            try:
                if at is None:
                    results = self._execute(ready, replay, fitting)
                else:
                    results = self._one_by_one(ready, replay, at)
            except Interrupted as stop:
                self.twisters.forget()
                if stop.index < len(kept.program):
                    raise
                results = [stop.tensors[slot] for slot in prepared.program.output_slots]
        self.runs += 1
        return prepared, results

    @property
    def can_share(self) -> bool:
        """Whether programs of two sessions can run at once: not where there is a limit, since one may move what the
        other uses to the host."""
        return not self.memory_limit and isinstance(self.accelerator, Host)

    @property
    def _lane(self) -> _Lane:
        return self._lanes[self.background.is_this_thread]

    @property
    def twisters(self) -> MersenneTwisters:
        """The generators of this thread."""
        return self._lane.twisters

    def _replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> Replay:
        replay = Replay(prepared, inputs, params)
        replay.between = self._between if self.background.is_this_thread else None
        return replay

    @contextlib.contextmanager
    def _kernels(self, program: object) -> Iterator[None]:
        """Around kernels; in the background others may have run with their settings meanwhile."""
        try:
            with self.background.kernels(program):
                yield
        finally:
            if self.background.is_this_thread:
                apply(self.background.settings)

    def _between(self) -> None:
        self.background.between()
        apply(self.background.settings)

    def use_settings(self, settings: KernelSettings) -> None:
        """Let kernels run with these settings as long as the state is held."""
        if self.background.is_this_thread:
            self.background.settings = settings
        elif settings != self.background.settings:
            self.background.be_alone()
        apply(settings)

    def _ready(self, prepared: Prepared) -> Executable | CapturedProgram:
        if prepared.ready is None and isinstance(self.accelerator, Host):
            prepared.ready = self._cache.find(prepared)
        elif prepared.ready is None:  # what plans and compiles programs knows the host only
            # The memory that graphs keep is not counted.
            expected = prepared.transient_bytes
            captured = None if self.memory_limit else self.captured
            prepared.ready = CapturedProgram(prepared.program, expected, self.accelerator, captured)
        return prepared.ready

    def _fitting(self, prepared: Prepared, replay: Replay, resident: Callable[[], int]) -> Runnable | None:
        """How to run in the memory that is left, which is too little for the program as it was sent; None where no way
        is known."""
        ready = self._ready(prepared)
        if isinstance(ready, CapturedProgram):
            return None
        if not self.residency.bring(replay.inputs, self.memory_limit - resident()):
            return None
        with concretely():
            return fitted(ready, replay, self.memory_limit - resident(), prepared.transient_bytes, in_order=True)

    def _execute(
        self, ready: Executable | CapturedProgram, replay: Replay, fitting: Runnable | None
    ) -> list[torch.Tensor]:
        if not isinstance(ready, CapturedProgram):
            runnable = best(ready, replay, None) if fitting is None else fitting
            beside = self.background.is_busy and not self.background.is_this_thread
            with self._lane.arena.run(None if beside else runnable.placement), self._kernels(ready):
                return runnable.run(replay, self.twisters.at)
        return ready.run(replay, self.twisters.at)

    def _one_by_one(
        self,
        ready: Executable | CapturedProgram,
        replay: Replay,
        at: Callable[[int], None],
    ) -> list[torch.Tensor]:
        frame, program = Frame.of(replay, replay.params, self.twisters.at), _executable(ready).program
        with self._kernels(ready):
            for index in range(len(program.instructions)):
                at(index)
                _executable(ready).steps(frame, index, index + 1, frozenset(program.output_slots))
        return [frame.tensors[slot] for slot in program.output_slots]

    def run_until(
        self,
        until: int,
        keep: tuple[int, ...],
        program: bytes,
        geometry: bytes,
        inputs: list[torch.Tensor],
        params: tuple[Any, ...],
        resident: Any,
    ) -> list[torch.Tensor]:
        """Run what is before instruction ``until``; what is in the slots ``keep`` then. Raises as ``run``."""
        given = list(params)
        _, prepared, held = self._checked(program, geometry, inputs, given)
        self.reserve(prepared.transient_bytes, inputs, resident, held)
        ready = self._ready(prepared)
        if until > len(prepared.program.instructions):
            raise WireError("a run is to go on behind its end")
        frame = Frame.of(self._replay(prepared, inputs, given), given, self.twisters.at)
        with concretely(), self._kernels(ready):
            _executable(ready).steps(frame, 0, until, frozenset(keep))
        if any(slot not in frame.tensors for slot in keep):
            raise WireError("a slot that is to be kept does not exist then")
        return [frame.tensors[slot] for slot in keep]

    def reserve(
        self,
        nbytes: int,
        used: Sequence[torch.Tensor],
        resident: Callable[[], int],
        held: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Have ``used`` on the device, and so many bytes free beside it; to be called before anything of a session is
        used. Raises ``TooLarge``."""
        if not self.memory_limit:
            return
        available = self.memory_limit - resident()
        if not self.residency.bring(used, available - nbytes):
            raise TooLarge(nbytes, available, list(held))

    def _checked(
        self, program: bytes, geometry: bytes, inputs: list[torch.Tensor], params: list[Any]
    ) -> tuple[_Kept, Prepared, list[tuple[int, int]]]:
        """What runs, and what it holds at its fullest moment. Raises ``WireError`` unless inputs and numbers fit."""
        kept = self._programs[program]
        self._programs.move_to_end(program)
        prepared, held = kept.geometries[geometry]
        kept.remote.check(params)
        if len(inputs) != len(prepared.input_slots):
            raise WireError(f"a run was given {len(inputs)} inputs, and its program takes {len(prepared.input_slots)}")
        for slot, tensor in zip(prepared.input_slots, inputs, strict=True):
            spec = prepared.specs[slot]
            if spec is None or not matches(tensor, spec):
                raise WireError(f"the input in slot {slot} is not what the geometry says")
        return kept, prepared, held

    def call(
        self,
        op: Operation,
        args: list[Any],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        state: bytes | None,
        resident: Callable[[], int],
    ) -> Called:
        """Run one operator now. Raises what it raises, and ``TooLarge`` before it has run."""
        if self.memory_limit:
            self.reserve(returned_bytes(op, args, kwargs, tensors), tensors, resident)
        drawn = None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if takes_device(op, self.device):
            kwargs = {**kwargs, "device": self.device}
        with concretely():
            return perform(operator_on(self.device, op, drawn is not None), args, kwargs, tensors, drawn)

    def trim(self) -> None:
        """Give back memory that is only kept to be used again."""
        if not self.background.is_busy:
            self._lane.arena.trim()

    @property
    def programs(self) -> int:
        """How many programs are known."""
        return len(self._programs)


def _executable(ready: Executable | CapturedProgram) -> Executable:
    return ready.executable if isinstance(ready, CapturedProgram) else ready


class Warned:
    """Context manager: what kernels warn of inside, as texts."""

    def __enter__(self) -> Self:
        self.texts: list[str] = []
        self._kept = module.warnings_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.texts = module.warnings_end(self._kept)
