"""Programs on a device that work is launched on: an operation at a time, and what repeats as captured graphs.

Launching a kernel takes the host as long as a small one runs, so a program that came a few times with the same specs is
captured: in *segments*, stretches of instructions that launch the same work on the same addresses in each run. Between
them run, one by one, instructions that draw, that take numbers which change from run to run, or that wait for the
device.

A captured segment reads and writes fixed addresses. An input that lies somewhere else in each run and is only read is
copied into a buffer of the segment; where any other has moved, the segment runs one by one, or is captured again. (A
result of another graph lies where that has put it.) What
it makes lies in memory that later runs overwrite, so what leaves a run and is held until then is moved out of it
(``graph_memory.py``). Capturing executes nothing: where it fails, nothing has happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from marid import policy
from marid.execute.accelerator import Accelerator
from marid.execute.executable import Executable
from marid.execute.graph_memory import GraphResults
from marid.execute.interrupted import Interrupted
from marid.execute.specialisation import Frame, Positioned
from marid.graph.analysis import analysis_of
from marid.graph.prepared import Replay
from marid.graph.program import Instruction, Param, Program, Task, differ
from marid.ops.facts import facts_of
from marid.recent import Recent
from marid.settings import settings

logger = logging.getLogger("marid")


class CapturedProgram:
    """A program with certain specs on ``accelerator``, a ``Runnable``. What repeats is captured, beside the others of
    ``captured`` (None for never). The fallback is its executable, an instruction at a time."""

    compiled = False
    placement = None  # memory comes from PyTorch's allocator for the device

    def __init__(
        self, program: Program, transient_bytes: int, accelerator: Accelerator, captured: CapturedPrograms | None
    ) -> None:
        self.program = program
        self.executable = Executable(program, transient_bytes)
        self.transient_bytes = transient_bytes
        self.runs = 0
        self._accelerator = accelerator
        self._others = captured
        able = captured is not None and accelerator.captures and settings.capture_after > 0
        self._captures = able and not any(facts_of(one.op.func).moves_memory for one in self.program.instructions)
        self._whole = _Segment(0, len(self.program.instructions))
        self._segments = [self._whole]
        self._cuts = 0
        self._varying: set[int] = set()
        self._refused: set[int] = set()
        self._stale = False
        self._params: list[Any] = []

    def run(self, task: Task | Replay, generator: Positioned) -> list[torch.Tensor]:
        """Run on tensors of the device; the results that escape, in order. Raises ``Interrupted``."""
        frame = Frame.of(task, task.params, generator)
        self._cut(task.params)
        if self._others is not None and self.graphs:
            self._others.results.move(min(one.graph.number for one in self._segments if one.graph is not None))
        try:
            for segment in self._segments:
                if not segment.captures or not self._replayed(segment, frame):
                    self.executable.steps(frame, segment.start, segment.stop)
        except Interrupted as stop:
            stop.tensors = dict(zip(stop.tensors, self._given(stop.tensors.values()), strict=True))
            raise
        if self._others is not None and self.graphs:
            self._others.ran(self)
        return self._given([frame.tensors[slot] for slot in self.program.output_slots])

    @property
    def graphs(self) -> int:
        """How many segments are captured now."""
        return sum(segment.graph is not None for segment in self._segments)

    def forget(self) -> None:
        """Give back the memory of what is captured; it may be captured again."""
        for segment in self._segments:
            segment.graph = None

    # --- segments ---

    def _cut(self, params: list[Any]) -> None:
        """Cut the program into segments when it has come often enough, and anew where a number has changed."""
        changed = {index for index, (a, b) in enumerate(zip(self._params, params, strict=False)) if differ(a, b)}
        self._params = list(params)
        self.runs += 1
        if not self._captures or self.runs <= settings.capture_after:
            self._varying |= changed
            return
        new = changed - self._varying
        self._varying |= changed
        renewed = any(new & segment.params for segment in self._segments)
        if self._cuts and not renewed and not self._stale:
            return
        self._cuts += renewed or not self._cuts
        self._stale = False
        given_up = self._cuts > policy.CAPTURE_ATTEMPTS or len(self._refused) > policy.CAPTURE_REFUSALS
        self._segments = [self._whole] if given_up else self._cut_up()

    def _cut_up(self) -> list[_Segment]:
        instructions = self.program.instructions
        able = [_is_capturable(one, self._varying) for one in instructions]
        able = [one and index not in self._refused for index, one in enumerate(able)]
        segments: list[_Segment] = []
        start = 0
        while start < len(able):
            stop = next((i for i in range(start, len(able)) if able[i] is not able[start]), len(able))
            launches = sum(not one.op.view for one in instructions[start:stop])
            captures = able[start] and launches >= policy.CAPTURE_LAUNCHES
            if captures or not segments or segments[-1].captures:
                segments.append(_Segment(start, stop, captures))
            else:
                segments[-1].stop = stop
            start = stop
        for segment in segments:
            if segment.captures:
                segment.describe(self.program)
        return segments

    def _replayed(self, segment: _Segment, frame: Frame) -> bool:
        """Run a segment by its graph, captured now if it is time; False when it has to be run one by one."""
        tensors = frame.tensors
        places = [tensors[slot].data_ptr() for slot in segment.reads]
        before, segment.places = segment.places, places
        assert self._others is not None
        if segment.graph is not None and not segment.graph.is_for(places):
            segment.drop()
        if segment.graph is None:
            if len(before) != len(places):  # nothing to compare with
                return False
            moved = [slot for slot, a, b in zip(segment.reads, before, places, strict=True) if a != b]
            moving = segment.moving | {slot for slot in moved if not self._others.results.has(tensors[slot])}
            segment.moving = {slot for slot in moving - segment.written if _is_all(tensors[slot])}
            if segment.moving != moving:  # others have moved
                segment.drop()
                return False
            if not self._capture(segment, frame):
                segment.drop()
                return False
        assert segment.graph is not None
        segment.graph.run(tensors)
        self._others.replays += 1
        return True

    def _capture(self, segment: _Segment, frame: Frame) -> bool:
        tensors = frame.tensors
        for one in self._segments:
            if one.start > segment.start:  # what these run on may lie where the results of this one will
                one.graph = None
        buffers = {slot: tensors[slot].clone() for slot in segment.reads if slot in segment.moving}
        inside = {**tensors, **buffers}
        captured = replace(frame, tensors=inside)
        try:
            replay = self._accelerator.capture(lambda: self.executable.steps(captured, segment.start, segment.stop))
        except (Interrupted, RuntimeError) as error:
            cause = error.error if isinstance(error, Interrupted) else error
            if not isinstance(cause, Exception):
                raise Interrupted(segment.start, False, tensors, cause) from cause
            logger.info("instructions %d to %d are not captured: %s", segment.start, segment.stop, cause)
            segment.captures = False
            if isinstance(error, Interrupted):  # the rest may be, without this one
                self._refused.add(error.index)
                self._stale = True
            return False
        at = {_memory(tensors[slot]): slot for slot in segment.reads}
        at |= {_memory(buffer): slot for slot, buffer in buffers.items()}
        made = {slot: tensor for slot, tensor in inside.items() if slot not in tensors}
        if any(tensor.is_conj() or tensor.is_neg() for tensor in made.values()):
            segment.captures = False
            return False
        results = {slot: _Made(tensor, at.get(_memory(tensor))) for slot, tensor in made.items()}
        fixed = [None if slot in buffers else place for slot, place in zip(segment.reads, segment.places, strict=True)]
        gone = [slot for slot in tensors if slot not in inside]
        assert self._others is not None
        segment.graph = _Graph(self._others.next_number(), replay, fixed, buffers, results, gone)
        return True

    # --- results ---

    def _given(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """These tensors, for others to hold: what lies in memory of graphs is followed. What shared memory still
        does."""
        graphs = [segment.graph for segment in self._segments if segment.graph is not None]
        held = {memory: graph.number for graph in graphs for memory in graph.held}
        given: dict[int, torch.Tensor] = {}
        found: list[torch.Tensor] = []
        for tensor in tensors:
            memory = _memory(tensor)
            if memory not in held:
                found.append(tensor)
            elif memory not in given:
                assert self._others is not None
                given[memory] = self._others.results.give(held[memory], tensor)
                found.append(given[memory])
            else:
                geometry = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
                seen = _seen_in(given[memory].untyped_storage(), *geometry)
                seen = torch.conj(seen) if tensor.is_conj() else seen
                found.append(torch.ops.aten._neg_view.default(seen) if tensor.is_neg() else seen)
        return found


class CapturedPrograms:
    """Programs with graphs, each of which has memory of its own: those that ran last keep theirs."""

    def __init__(self) -> None:
        self.replays = 0
        """How many times a captured segment was run."""
        self.results = GraphResults()
        self._captures = 0
        self._programs: Recent[CapturedProgram, None] = Recent(policy.CAPTURED_PROGRAMS)

    def next_number(self) -> int:
        """The number of a graph that is captured now: graphs are numbered in the order in which they were."""
        self._captures += 1
        return self._captures

    def ran(self, program: CapturedProgram) -> None:
        """One of them ran."""
        left = self._programs.put(program, None)
        if left is not None:
            left[0].forget()

    def clear(self) -> None:
        """Forget all graphs, and give back their memory."""
        self.results.move(0)
        for program in self._programs:
            program.forget()
        self._programs.clear()


@dataclass
class _Segment:
    """Instructions ``start`` to before ``stop``.

    ``reads`` are the slots that it takes from before, ``params`` the numbers it takes, ``places`` where the reads were
    the last time; ``written`` are those of the reads that it writes, ``moving`` those that were somewhere else before.
    """

    start: int
    stop: int
    captures: bool = False
    reads: list[int] = field(default_factory=list)
    params: set[int] = field(default_factory=set)
    places: list[int] = field(default_factory=list)
    moving: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    drops: int = 0
    graph: _Graph | None = None

    def drop(self) -> None:
        """Its graph is of no use, or there is none: try again a few times."""
        self.graph = None
        self.drops += 1
        self.captures = self.captures and self.drops < policy.CAPTURE_ATTEMPTS

    def describe(self, program: Program) -> None:
        """Find out what it reads, and which of that it writes, itself or through a view."""
        analysis, inside = analysis_of(program), range(self.start, self.stop)
        read = [slot for index in inside for slot in analysis.reads[index]]
        self.reads = [slot for slot in dict.fromkeys(read) if analysis.made_by.get(slot, -1) < self.start]
        written = {analysis.roots[slot] for index in inside for slot in analysis.writes[index]}
        self.written = {slot for slot in self.reads if analysis.roots[slot] in written}
        given = [arg for one in program.instructions[self.start : self.stop] for arg in one.operands()]
        self.params = {arg.index for arg in given if isinstance(arg, Param)}


class _Made:
    """A result of a graph: ``tensor`` in its own memory, or a view of the memory of what is in slot ``of`` at each
    run."""

    def __init__(self, tensor: torch.Tensor, of: int | None) -> None:
        self.of = of
        self.tensor = tensor if of is None else None
        self._geometry = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def get(self, tensors: dict[int, Any]) -> torch.Tensor:
        """A new tensor of it."""
        if self.tensor is not None:
            return self.tensor.detach()
        assert self.of is not None
        return _seen_in(tensors[self.of].untyped_storage(), *self._geometry)


@dataclass
class _Graph:
    """A captured segment, the ``number``-th graph of its device. ``fixed`` are the addresses of what it reads, None for
    what is copied into ``buffers``; ``results`` are what it makes, by slot, and ``gone`` the slots that are not needed
    behind it. ``held`` is the memory that belongs to it."""

    number: int
    replay: Callable[[], None]
    fixed: list[int | None]
    buffers: dict[int, torch.Tensor]
    results: dict[int, _Made]
    gone: list[int]
    held: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.held = {_memory(result.tensor) for result in self.results.values() if result.tensor is not None}

    def is_for(self, places: list[int]) -> bool:
        """Whether it can run on what lies there."""
        return all(a is None or a == b for a, b in zip(self.fixed, places, strict=True))

    def run(self, tensors: dict[int, Any]) -> None:
        """Launch it; ``tensors`` are what exists, before and then after it."""
        for slot, buffer in self.buffers.items():
            buffer.copy_(tensors[slot])
        self.replay()
        made = {slot: result.get(tensors) for slot, result in self.results.items()}
        for slot in self.gone:
            del tensors[slot]
        tensors.update(made)


# --- tensors and their memory ----------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> int:
    """Which storage it lies in, as long as that lives: empty ones have no address."""
    return tensor.untyped_storage()._cdata


def _is_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, each element once, so that a copy can stand for it."""
    if tensor.is_conj() or tensor.is_neg() or tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
        return False
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _seen_in(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype, device=storage.device)
    return made.set_(storage, offset, shape, stride)  # pyright: ignore[reportArgumentType]


# --- instructions ----------------------------------------------------------------------------------------------------


def _is_capturable(instruction: Instruction, varying: set[int]) -> bool:
    """Whether each run launches the same for it, without waiting for the device."""
    op = instruction.op
    if op.waits or facts_of(op.func).dynamic:
        return False
    return not any(isinstance(a, Param) and (a.draw or a.index in varying) for a in instruction.operands())
