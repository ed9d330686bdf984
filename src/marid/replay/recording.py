"""What one run of a function did, in terms of its arguments and its state: two runs can be compared by it.

It holds nothing of the run itself: no node, no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from marid.frontend.observe import Drawn
from marid.graph.node import Spec
from marid.graph.prepared import GUARD
from marid.replay.counters import CounterLog, Expression
from marid.replay.reachable import Reached, is_plain
from marid.replay.state_check import Place, Snapshot, same_number

# Where a value comes from: a tensor (of the arguments, then of the state), the gradient that it had before, an upload,
# or an output of the program.
TENSOR, GRAD, UPLOAD, OUTPUT = "tensor", "grad", "upload", "output"
GIVEN = "given"  # in a backward: a gradient that comes in
# What a leaf of the result can be beside TENSOR and GRAD: a tensor that the run made (``Recording.made``), anything
# that is no tensor, a tensor of the CPU that was an argument, or what comes of reads: (method, where the tensor comes
# from), or (function of ``operator``, one such or a number, another).
MADE, CONSTANT, HOST, READ = "made", "constant", "host", "read"

Ref = tuple[str, int]


@dataclass(frozen=True)
class Made:
    """A tensor that a run makes: its value, the storage it shares, and what autograd knows of it.

    ``storage`` is a tensor whose storage it has, or a number that is equal for those that share a new one; ``base`` a
    tensor that it is a view of for autograd too, known or made as well; ``graph`` is None, ``LEAF``, ``SPENT`` or
    ``LIVE``; ``version`` is how often it was written.
    """

    value: Ref
    spec: Spec
    storage: Ref | int | None
    base: Ref | None
    graph: str | None
    version: int


@dataclass(frozen=True)
class Origin:
    """Where an upload comes from: an argument (``argument``), state (``tensor``), or data that is always the same."""

    argument: int | None
    tensor: torch.Tensor | None
    content: torch.Tensor | None
    spec: Spec
    make: Any

    def is_like(self, other: Origin) -> bool:
        if self.argument != other.argument or self.tensor is not other.tensor or self.spec is not other.spec:
            return False
        if self.content is None or other.content is None:
            return self.content is other.content
        return self.content.shape == other.content.shape and _bytes(self.content) == _bytes(other.content)


class Each(list[Any]):
    """Expressions and numbers that make a tuple of numbers."""


def expressions(computed: list[tuple[int, Any]]) -> set[Expression]:
    """The expressions among numbers that are computed."""
    parts = (part for _, how in computed for part in (how if type(how) is Each else [how]))
    return {part for part in parts if type(part) is tuple}


@dataclass
class Derivative:
    """The backward of what a run returns, for gradients of the outputs ``given`` (positions among the live ones).

    ``wanted`` are the tensors whose gradients it gives, ``results`` those gradients: an output, a gradient that was
    given (``GIVEN``), or none.
    """

    given: tuple[int, ...]
    wanted: list[Ref]
    key: tuple[Any, ...]
    numbers: list[Any]
    inputs: list[Ref]
    outputs: list[tuple[Spec, Ref | None]]
    results: list[Ref | None]
    given_specs: list[Spec]

    def is_like(self, other: Derivative) -> bool:
        mine = (self.given, self.wanted, self.key, self.inputs, self.outputs, self.results, self.given_specs)
        its = (other.given, other.wanted, other.key, other.inputs, other.outputs, other.results, other.given_specs)
        return mine == its and same_number(self.numbers, other.numbers)


@dataclass(frozen=True)
class Assigned:
    """State that a run replaces: the tensor ``position`` of the state, which is in ``place``, by ``ref``."""

    place: Place
    position: int
    ref: Ref


def _shown(drawn: Drawn) -> Any:
    generator = None if drawn.generator is None else drawn.generator._cdata
    return generator, drawn.device, drawn.name, drawn.spec


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Recording:
    """What a run did.

    ``numbers`` are the program's parameters, those of ``draws`` given by position; ``sites`` the line of each.
    ``lines`` are the names of the program's operations, and the line of each. ``outputs`` are specs and roots of the
    program's outputs. ``grads`` says which gradients change to what, ``bumps`` which versions grow by how much,
    ``assigned`` which state is replaced. ``grads_before`` are the specs of the gradients that were there, ``used``
    the tensors that must share memory as they did: ``shared``. ``flags`` are those of the state's tensors of the
    device (``module.tensor_flags``), ``looks`` those of the host (``module.host_looks``), ``same`` says which
    arguments are tensors of the state (``same_as_state``). ``independent`` are the groups of results with a history
    whose histories have nothing in common, by position among such results. ``outcomes`` says how the tests of numbers
    came out that guards repeat, ``schedules`` which schedules are moved on behind it all.
    """

    key: tuple[Any, ...]
    numbers: list[Any]
    sites: list[Any]
    lines: list[tuple[str, Any]]
    inputs: list[Ref]
    outputs: list[tuple[Spec, Ref | None]]
    made: list[Made]
    results: list[tuple[str, Any]]
    structure: Any
    grads: list[tuple[int, Ref | None]]
    bumps: list[tuple[Ref, int]]
    assigned: list[Assigned]
    draws: list[Drawn]
    origins: list[Origin]
    device: int
    used: list[Ref]
    shared: tuple[int, ...]
    snapshot: Snapshot
    reached: Reached
    flags: bytes
    looks: bytes
    same: tuple[int, ...]
    grads_before: list[Spec | None]
    derivatives: list[Derivative]
    independent: list[list[int]]
    counters: CounterLog
    outcomes: tuple[bool, ...]
    schedules: list[LRScheduler]

    def difference(self, other: Recording) -> str | None:
        """How a later run differs from this one, in words; None if it did the same, and numbers that are others were
        computed alike from counters that are others."""
        if not self.counters.has_moved(other.counters):
            return "the counters of an optimizer are what they were, or read in another way"
        return self._difference(other, self._unexplained(other))

    def departure(self, other: Recording, computed: list[tuple[int, Any]]) -> str | None:
        """How a later run differs from what this one would have given then, with the numbers that are ``computed``."""
        numbers = self.numbers_for(computed, other.counters.read, other.counters.rates)
        return self._difference(other, _first_other(numbers, other.numbers))

    def numbers_for(
        self, computed: list[tuple[int, Any]], read: dict[int, float], rates: dict[int, float]
    ) -> list[Any]:
        """The numbers of the program where counters are ``read`` so, with ``rates`` in place of those of now."""
        numbers = list(self.numbers)
        known = {how: self.counters.evaluate(how, read, rates) for how in expressions(computed)}
        for place, how in computed:
            each = type(how) is Each
            numbers[place] = tuple([known.get(part, part) for part in how]) if each else known[how]
        return numbers

    def _unexplained(self, other: Recording) -> tuple[int, Any, Any] | None:
        pairs = enumerate(zip(self.numbers, other.numbers, strict=False))
        others = ((index, a, b) for index, (a, b) in pairs if not same_number(a, b))
        return next((one for one in others if self._computed(one[1], other, one[2]) is None), None)

    def _difference(self, other: Recording, number: tuple[int, Any, Any] | None) -> str | None:
        for index, (mine, its) in enumerate(zip(self.outcomes, other.outcomes, strict=False)):
            if mine is not its:
                site = [site for name, site in self.lines if name == GUARD][index]
                return f"the test at {site} comes out now so, now otherwise"
        if self.key != other.key:
            return f"other operations are recorded ({_first_difference(self, other)})"
        if not self.counters.is_like(other.counters):
            return "the counters of an optimizer are changed or read in another way"
        if number is not None:
            index, a, b = number
            return f"a number changed: {a} -> {b}, {other.sites[index]}"
        names = ("inputs", "outputs", "made", "grads", "bumps", "assigned", "device", "used", "shared")
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return "tensors come from or go to other places"
        if len(self.origins) != len(other.origins) or not all(map(Origin.is_like, self.origins, other.origins)):
            return "other data is uploaded"
        if self.structure != other.structure:
            return "the result has another structure"
        for mine, its in zip(self.results, other.results, strict=True):
            if not _same_result(mine, its):
                return f"the result changed: {mine[1]!r} -> {its[1]!r}"
        if [_shown(drawn) for drawn in self.draws] != [_shown(drawn) for drawn in other.draws]:
            return "other random numbers are drawn"
        if not _same_objects(self.schedules, other.schedules):
            return "other schedules are moved on"
        if len(self.derivatives) != len(other.derivatives):
            return "other derivatives are recorded"
        for derivative, its in zip(self.derivatives, other.derivatives, strict=True):
            if not derivative.is_like(its):
                return "another derivative is recorded"
        if self.grads_before != other.grads_before:
            return "gradients are there that were not"
        return None

    def computed(self, other: Recording) -> list[tuple[int, Any]]:
        """The numbers that are computed from counters, by place: an expression, or a tuple of such and of numbers.

        They may be equal in both runs: ``1 - beta**step`` is the same for several steps once it is nearly 1.
        """
        found = (self._computed(a, other, b) for a, b in zip(self.numbers, other.numbers, strict=True))
        return [(index, how) for index, how in enumerate(found) if how is not None]

    def _computed(self, number: Any, other: Recording, its: Any) -> Any:
        """How a number is computed from counters; None if it is not, or not in the same way."""
        if type(number) is not tuple:
            return self.counters.explains(number, other.counters, its)
        if type(its) is not tuple or len(its) != len(number):
            return None
        parts: list[Any] = []
        for a, b in zip(number, its, strict=True):
            how = self.counters.explains(a, other.counters, b)
            if how is None and not same_number(a, b):
                return None
            parts.append(b if how is None else how)
        return Each(parts) if any(type(part) is tuple for part in parts) else None


def _same_objects(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _same_result(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    (kind, a), (other_kind, b) = one, other
    if kind != other_kind:
        return False
    return a is b or (same_number(a, b) if kind != CONSTANT or is_plain(a) else False)


def _first_difference(one: Recording, other: Recording) -> str:
    for (name, site), (other_name, other_site) in zip(one.lines, other.lines, strict=False):
        if name != other_name or site is not other_site:
            return f"{name} at {site} -> {other_name} at {other_site}"
    if len(one.lines) != len(other.lines):
        longer = max(one.lines, other.lines, key=len)
        name, site = longer[min(len(one.lines), len(other.lines))]
        return f"{len(one.lines)} -> {len(other.lines)} operations, from {name} at {site} on"
    for index, (a, b) in enumerate(zip(one.key, other.key, strict=False)):
        if a is not b and a != b:
            return f"{a} -> {b}, element {index} of the program"
    return f"{len(one.key)} -> {len(other.key)} elements of the program"


def _first_other(numbers: list[Any], others: list[Any]) -> tuple[int, Any, Any] | None:
    pairs = enumerate(zip(numbers, others, strict=False))
    return next(((index, a, b) for index, (a, b) in pairs if not same_number(a, b)), None)
