"""When a program is compiled, and when the compiled variant is used: what the flat tier asks before each run."""

from __future__ import annotations

import functools
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from marid import policy
from marid.built import the_compiler
from marid.execute.compiled.compile_request import CompileRequest, request_for
from marid.execute.compiled.disk import DiskCache, Entry, folder, identity
from marid.execute.compiled.execution import Bound, Checked, CompiledProgram
from marid.execute.compiled.partition import Partition, Specs, choose
from marid.execute.compiled.passes.registry import generation
from marid.execute.compiled.variant import CompiledPartition, Variant
from marid.execute.compiled.workers import Job, compiler
from marid.execute.executable import Executable
from marid.execute.specialisation import Launchable
from marid.graph.prepared import Replay
from marid.graph.program import Task
from marid.recent import Recent
from marid.report.stats import counters
from marid.settings import settings

logger = logging.getLogger("marid")


_said: set[str] = set()


def best(program: Executable, task: Task | Replay, room: int | None) -> Launchable | Checked:
    """How to run ``task``. ``room`` are the bytes that the run may take, or None. To be called below all dispatch."""
    if not settings.compile or program.runs < settings.compile_after:
        return program.specialised(task)
    if program.tier is None or program.tier.generation != generation():
        program.tier = Tier(program)
    return program.tier.best(task, room)


class _Request:
    """Parts that are being compiled for one shapes rule."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.parts: list[tuple[CompileRequest, Entry | Job]] = []

    @property
    def answered(self) -> bool:
        return all(not isinstance(found, Job) or found.answer is not None for _, found in self.parts)


class Tier:
    """What is known about compiling one program."""

    def __init__(self, flat: Executable) -> None:
        self.flat = flat
        self.generation = generation()
        """Of the passes that it compiles with."""
        self.over = False
        """Whether nothing more is to be compiled."""
        self._variants: list[tuple[Variant, CompiledProgram]] = []
        self._requested = 0
        self._request: _Request | None = None
        self._seen: Recent[Specs, list[Any]] = Recent(policy.COMPILE_EXAMPLES)
        self._asked: set[Specs] = set()
        self._first: list[Any] | None = None
        self._spent = 0.0
        self._compiles: bool | None = None
        """Whether there is a compiler, once one is wanted; what is on disk needs none."""
        self._looked = False
        self._asking: Iterator[None] | None = None
        self._times: dict[tuple[Variant | None, Specs], deque[float]] = {}
        flat.ran = None

    def best(self, task: Task | Replay, room: int | None) -> Launchable | Checked:
        """How to run ``task`` now."""
        if (
            not self._variants
            and self._request is None
            and (self.over or self._spent < settings.compile_ms / 1000 / policy.COMPILE_LOOKUP)
        ):
            self.flat.ran = None if self.over else self._spend
            return self.flat.specialised(task)
        self.flat.ran = None
        if self._request is not None:
            self._try(self._look_after)
        specs, params = task.specs, task.params
        for variant, program in self._variants:
            extended = variant.bind(specs, params)
            if extended is None:
                continue
            if not variant.is_checked:
                return self._check(variant, extended, task, room)
            if self._is_flat_turn(variant):
                break
            counters.compiled_runs += 1
            program.executable.ran = functools.partial(self._ran, variant, specs)
            refused = functools.partial(variant.reject, specs, params)
            return Bound(program, program.executable.specialised(task), extended, refused)
        if not self.over:
            self._seen.put(specs, params)
            self._first = self._first or params
            if self._request is None and specs not in self._asked:
                self._try(functools.partial(self._consider, task))
        self.flat.ran = functools.partial(self._ran, None, specs)
        return self.flat.specialised(task)

    def _try(self, function: Callable[[], None]) -> None:
        """What goes wrong in compiling is never the user's: the program runs flat."""
        try:
            function()
        except Exception:
            logger.warning("marid cannot compile a program; it runs all the same", exc_info=True)
            counters.compile_failures += 1
            self.over, self._request, self._asking = True, None, None

    # --- times -----------------------------------------------------------------------------------------------------

    def _spend(self, seconds: float) -> None:
        self._spent += seconds

    def _ran(self, variant: Variant | None, specs: Specs, seconds: float) -> None:
        times = self._times.setdefault((variant, specs), deque(maxlen=policy.COMPILE_SAMPLES + policy.COMPILE_WARM))
        times.append(seconds)
        if len(self._times) > 16 * policy.COMPILE_EXAMPLES:
            del self._times[next(iter(self._times))]
        if variant is None:
            self._spent += seconds
        elif len(times) == policy.COMPILE_SAMPLES + policy.COMPILE_WARM:
            before = self._times.get((None, specs))
            if before is not None and len(before) >= policy.COMPILE_SAMPLES:
                self._compare(variant, list(times)[policy.COMPILE_WARM :], list(before)[-policy.COMPILE_SAMPLES :])

    def _is_flat_turn(self, variant: Variant) -> bool:
        """Whether a run is to be flat: in turns with the first ones of a variant, so that both are timed beside the
        same other work. Before, the compiler's process took a processor from the flat tier."""
        variant.turns += 1
        return variant.turns % 2 == 0 and variant.turns <= 2 * (policy.COMPILE_SAMPLES + policy.COMPILE_WARM)

    def _compare(self, variant: Variant, now: list[float], before: list[float]) -> None:
        """Give a variant up that does not pay."""
        if min(now) > min(before) and _middle(now) > _middle(before):
            self._variants = [one for one in self._variants if one[0] is not variant]
            self.over = True
            counters.compiled_dropped += 1

    # --- compiling -------------------------------------------------------------------------------------------------

    def _consider(self, task: Task | Replay) -> None:
        """Ask for the program to be compiled if its runs took long enough, for the sizes seen so far."""
        wanted = settings.compile_ms / 1000
        if self._asking is None:
            if self._spent >= wanted and self._compiles is None:
                self._compiles = the_compiler() is not None
            if not self._compiles and (self._looked or self._spent < wanted / policy.COMPILE_LOOKUP):
                return
            self._asking = self._ask(_shared(task), only_cached=not self._compiles)
            self._looked = True
        until = time.perf_counter() + self._patience(task.specs)
        while self._asking is not None:
            if next(self._asking, self) is self:
                self._asking = None
            elif time.perf_counter() > until:
                break

    def _patience(self, specs: Specs) -> float:
        """Seconds that may be added to a run, which a user waits for: a small part of what it takes."""
        times = self._times.get((None, specs))
        return max(policy.COMPILE_PATIENCE, _middle(times) / 3) if times else policy.COMPILE_PATIENCE

    def _ask(self, shared: dict[int, int], only_cached: bool) -> Iterator[None]:
        """Look for the parts on disk, or ask for them, one after the other."""
        specs, params = next(reversed(self._seen.items()))
        # One code serves many sizes, but one dtype and number of dimensions.
        examples = [example for example in self._seen.items() if _types(example[0]) == _types(specs)]
        assert self._first is not None
        others = [self._first, *(given for _, given in examples)]
        changing = {
            index
            for index, now in enumerate(params)
            if any(type(o[index]) is not type(now) or o[index] != now for o in others)
        }
        request = _Request(torch.get_num_threads())
        cache = DiskCache(folder(), settings.cache_bytes)
        for part in choose(self.flat.program, specs, params, changing, shared):
            yield
            asks = request_for(part, self.flat.program, examples, changing)
            if asks is None:
                continue
            structure = {
                "part": asks.code, "symbols": asks.symbols, "threads": request.threads, "identity": identity(),
            }  # fmt: skip
            found: Entry | Job | None = cache.find(structure)
            if found is None and only_cached:
                return
            if found is None:
                hints = _hints(asks.values, asks.code)
                found = compiler.submit(
                    {"structure": structure, "hints": hints, "folder": str(folder()), "limit": settings.cache_bytes}
                )
            request.parts.append((asks, found))
        counters.compile_damaged += cache.damaged
        counters.compile_cache_hits += sum(isinstance(found, Entry) for _, found in request.parts)
        if only_cached and not request.parts:
            return
        self._spent = 0.0
        self._compiles: bool | None = None
        """Whether there is a compiler, once one is wanted; what is on disk needs none."""
        self._requested += 1
        any_size = all(asks.for_any_size for asks, _ in request.parts)
        self._asked.update(specs for specs, _ in (examples if any_size else examples[-1:]))
        self.over = not request.parts or self._requested >= policy.COMPILE_RULES
        self._request = request if request.parts else None

    def _look_after(self) -> None:
        """Make a variant of what was compiled, when all of it is there."""
        assert self._request is not None
        compiler.poll()
        if not self._request.answered:
            return
        request, self._request = self._request, None
        loaded = []
        for asks, found in request.parts:
            entry = _entry(found)
            if entry is None:
                counters.compile_failures += 1
                continue
            try:
                loaded.append(CompiledPartition(self.flat.program, asks, entry, request.threads))
            except OSError as error:
                logger.info("a compiled part cannot be loaded: %s", error)
                counters.compile_failures += 1
            if isinstance(found, Job) and found.answer is not None and "unstored" in found.answer:
                shutil.rmtree(entry.path.parent, ignore_errors=True)
        if loaded:
            self._add(Variant(self.flat.program, loaded, request.threads))

    def _add(self, variant: Variant) -> None:
        self._variants.insert(0, (variant, CompiledProgram(self.flat, variant)))
        counters.programs_compiled += 1

    def _check(
        self, variant: Variant, extended: list[Any], task: Task | Replay, room: int | None
    ) -> Launchable | Checked:
        specs = task.specs
        if room is not None:
            extra = max(_copies(specs, part.part) for part in variant.parts)
            if extra > room - self.flat.transient_bytes:
                return self.flat.specialised(task)
        return Checked(self.flat, variant, extended, self._patience(specs), functools.partial(self._judge, variant))

    def _judge(self, variant: Variant, bad: set[int], checked: int) -> None:
        """So many parts of a variant are checked; use those that were right when all of them are."""
        variant.checked = checked
        variant.bad |= bad
        if not variant.is_checked or not variant.bad:
            return
        self._variants = [one for one in self._variants if one[0] is not variant]
        counters.programs_compiled -= 1
        rest = variant.without_bad()
        if rest is not None:
            self._add(rest)


def _middle(times: Collection[float]) -> float:
    """The median, or the longer of two. (The module ``statistics`` takes 7 ms to import.)"""
    return sorted(times)[len(times) // 2]


def _types(specs: Specs) -> list[tuple[torch.dtype, int] | None]:
    return [None if spec is None else (spec.dtype, len(spec.shape)) for spec in specs]


def _shared(task: Task | Replay) -> dict[int, int]:
    """For each input of a run the first input that lies in the same memory."""
    first: dict[int, int] = {}
    return {
        slot: first.setdefault(tensor.untyped_storage()._cdata, slot)
        for slot, tensor in zip(task.input_slots, task.inputs, strict=True)
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided  # others are still in the making
    }


def _entry(found: Entry | Job) -> Entry | None:
    if isinstance(found, Entry):
        return found
    answer = found.answer
    assert answer is not None
    counters.parts_compiled += answer.get("compiled") is True
    if "unstored" in answer:
        counters.compile_unstored += 1
        _say_once(f"marid cannot keep compiled code in {folder()}: {answer['unstored']}")
    if "error" in answer:
        logger.info("a part is not compiled: %s", answer["error"])
        return None
    return Entry(Path(answer["path"]), answer["conditions"])


def _hints(values: tuple[int, ...], general: dict[str, Any]) -> list[int]:
    """Examples of the sizes for the compiler, none of them equal to one that does not change."""
    taken = {leaf for leaf in tree_leaves(general) if type(leaf) is int}
    hints: list[int] = []
    for value in values:
        hint = max(value, 2)
        while hint in taken:
            hint += 1
        taken.add(hint)
        hints.append(hint)
    return hints


def _copies(specs: Specs, part: Partition) -> int:
    """The bytes that checking a part takes: its results, and copies of what it writes."""
    slots = [*part.outputs, *(slot for slot, written in zip(part.inputs, part.written, strict=True) if written)]
    return sum(spec.nbytes for slot in slots if (spec := specs[slot]) is not None)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)
