"""Step counters and learning rates of PyTorch's optimizers, and the numbers that are computed from them.

Adam and its relatives add one to a counter at each step, in a tensor of the CPU, and give the device numbers such as
``lr / (1 - beta**step)``. What they do to counters is noted and done again at a replay. Which of a program's numbers
came of a counter is found by value: ``_OPTIMIZERS`` has all that these optimizers compute, so the values that a
recording can have had are known. Any other read of a counter makes a recording refused.

A schedule changes rates from step to step. Those of the optimizers here are not compared as other state is: where two
recordings with other rates have shown which numbers come of a rate, a replay computes these anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, Optimizer, RMSprop

from marid.replay.state_check import same_number

Formula = Callable[[float, dict[str, Any]], float]
"""Of a step and a group of parameters."""
# Of what was read at an event, and a group of parameters: (formula, group, event). Without an event, of the group's
# rate alone.
Expression = tuple[Formula, int, int | None]

aten = torch.ops.aten
FOLLOWED = (aten._foreach_add_.Tensor, aten._foreach_add_.Scalar, aten.add_.Tensor)


def _negative_rate(_step: float, group: dict[str, Any]) -> float:
    return -group["lr"]


def _decay(_step: float, group: dict[str, Any]) -> float:
    return 1 - group["lr"] * group["weight_decay"]


def _step_size(step: float, group: dict[str, Any]) -> float:
    return -(_rate(group) / (1 - group["betas"][0] ** step))


def _root_of_correction(step: float, group: dict[str, Any]) -> float:
    return (1 - group["betas"][1] ** step) ** 0.5


def _decayed_rate(step: float, group: dict[str, Any]) -> float:
    return -(_rate(group) / (1 + (step - 1) * group["lr_decay"]))


def _rate(group: dict[str, Any]) -> float:
    rate = group["lr"]
    return rate.item() if isinstance(rate, torch.Tensor) else rate


# What each formula takes of a group: where that is equal in two groups, so is the number, and stays so.
_TAKES: dict[Formula, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    _negative_rate: lambda group: (group["lr"],),
    _decay: lambda group: (group["lr"], group["weight_decay"]),
    _step_size: lambda group: (group["lr"], group["betas"][0]),
    _root_of_correction: lambda group: (group["betas"][1],),
    _decayed_rate: lambda group: (group["lr"], group["lr_decay"]),
}


class _Computed(NamedTuple):
    """What an optimizer's own source computes, operation by operation: from the rate alone, and from a counter."""

    of_rate: tuple[Formula, ...] = ()
    of_counter: tuple[Formula, ...] = ()


_OPTIMIZERS: dict[type[Optimizer], _Computed] = {  # AdamW is an Adam
    SGD: _Computed(of_rate=(_negative_rate,)),
    RMSprop: _Computed(of_rate=(_negative_rate,)),
    Adadelta: _Computed(of_rate=(_negative_rate,)),
    Adam: _Computed(of_rate=(_decay,), of_counter=(_step_size, _root_of_correction)),
    Adamax: _Computed(of_counter=(_step_size,)),
    Adagrad: _Computed(of_counter=(_decayed_rate,)),
}
FORMULAS = {formula.__name__.removeprefix("_"): formula for one in _OPTIMIZERS.values() for formula in one.of_counter}
"""Those of counters by name, as saved programs have them."""
_FILES = {str(sys.modules[kind.__module__].__file__) for kind, one in _OPTIMIZERS.items() if one.of_counter}
_HELPERS = str(sys.modules[Optimizer.__module__].__file__)


def _computed_by(optimizer: Optimizer) -> _Computed:
    return next((found for kind, found in _OPTIMIZERS.items() if isinstance(optimizer, kind)), _Computed())


def _has_followed_rate(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the rate of a group of parameters may be another one at a replay. What a class of the user's own does
    with it is not known."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and isinstance(optimizer, tuple(_OPTIMIZERS)) and type(group.get("lr")) is float


def rated_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The groups of parameters whose rates are followed."""
    return [group for one in optimizers for group in one.param_groups if _has_followed_rate(one, group)]


def is_in_a_formula(frame: FrameType | None) -> bool:
    """Whether what runs in ``frame``, and reads a tensor, computes one of the formulas."""
    if frame is None or frame.f_code.co_filename != _HELPERS or frame.f_back is None:
        return False
    return frame.f_back.f_code.co_filename in _FILES


@dataclass
class CounterLog:
    """What happened to the counters among ``tensors`` in one run, those of ``optimizers`` and others.

    ``events`` are reads, ``("item", tensor)``, and writes: an operator, whether it takes a list, the counters that it
    writes, the other arguments, the keywords. ``read`` are the numbers that were read, by event; ``groups`` the groups
    of parameters of the optimizers; ``start`` the values before the run of the counters that were read. ``rates`` are
    the learning rates, by group, that may be others at a replay; there are none unless ``follows_rates``.
    """

    tensors: list[torch.Tensor]
    optimizers: list[Optimizer]
    events: list[Any] = field(default_factory=list)
    read: dict[int, float] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    start: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    follows_rates: bool = False

    def __post_init__(self) -> None:
        self._numbers: dict[str, tuple[Expression | None, Any]] = {}
        self._of_rates: dict[tuple[int, Formula], str] = {}
        self._positions = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        self._before = {index: tensor.item() for index, tensor in enumerate(self.tensors) if may_count(tensor)}
        self._uses: dict[int, tuple[int, tuple[Formula, ...]]] = {}
        self._rates: set[int] = set()
        for optimizer in self.optimizers:
            of_rate, of_counter = _computed_by(optimizer)
            for group in optimizer.param_groups:
                index = len(self.groups)
                if of_counter and self._is_known(group):
                    counters = [optimizer.state[p].get("step") for p in group["params"] if p in optimizer.state]
                    self._uses |= {id(counter): (index, of_counter) for counter in counters}
                    self.groups.append(group)
                if self.follows_rates and _has_followed_rate(optimizer, group):
                    if index == len(self.groups):
                        self.groups.append(group)
                    self._note_rate(index, group, of_rate)

    def _note_rate(self, index: int, group: dict[str, Any], formulas: tuple[Formula, ...]) -> None:
        self.rates[index] = group["lr"]
        for formula in formulas:
            if formula is _decay and not group["weight_decay"]:
                continue  # 1 is no number of the rate's
            number, basis = formula(0.0, group).hex(), _basis(formula, group)
            self._of_rates[index, formula] = number
            if self._numbers.setdefault(number, ((formula, index, None), basis))[1] != basis:
                self._numbers[number] = None, basis  # whichever it is: it is explained by none

    def _is_known(self, group: dict[str, Any]) -> bool:
        return all(type(beta) is float for beta in group.get("betas", ())) and self._has_known_rate(group)

    def _has_known_rate(self, group: dict[str, Any]) -> bool:
        rate = group["lr"]
        if self._follows(rate):
            self._rates.add(id(rate))
        return not isinstance(rate, torch.Tensor) or self._follows(rate)

    def _follows(self, tensor: Any) -> bool:
        return self._positions.get(id(tensor)) in self._before

    def note_read(self, tensor: torch.Tensor, value: float) -> str | None:
        """An optimizer reads ``tensor``; why what comes of the value is not known, or None."""
        if id(tensor) not in self._uses or not self._follows(tensor):
            return None if id(tensor) in self._rates else "the value of a tensor of the CPU is read"
        position = self._positions[id(tensor)]
        self.start[position] = self._before[position]
        index, formulas = self._uses[id(tensor)]
        self.read[len(self.events)] = value
        for formula in formulas:
            number = formula(value, self.groups[index]).hex()
            basis = (self._before[position], *_basis(formula, self.groups[index]))
            _, other = self._numbers.setdefault(number, ((formula, index, len(self.events)), basis))
            if other != basis:
                return "numbers that come of two counters of an optimizer are equal, and may not stay so"
        self.events.append(("item", position))
        return None

    def write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_derived: Callable[[Any], bool]
    ) -> bool:
        """An operator is called on counters; whether it is one that can be called again."""
        if func not in FOLLOWED:
            return False
        several = isinstance(args[0], (list, tuple))
        targets = args[0] if several else [args[0]]
        if not all(self._follows(target) for target in targets):
            return False
        more = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if any(id(arg) in self._positions or is_derived(arg) or arg.numel() != 1 for arg in more):
            return False
        if any(isinstance(arg, (list, tuple)) for arg in args[1:]):
            return False
        positions = tuple([self._positions[id(target)] for target in targets])
        for position in positions:
            self.written[position] = self.written.get(position, 0) + 1
        rest = tuple([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args[1:]])
        self.events.append((func, several, positions, rest, tuple(kwargs.items())))
        return True

    def is_like(self, other: CounterLog) -> bool:
        """Whether the same was done to the same counters."""
        mine, its = (*self.tensors, *self.groups), (*other.tensors, *other.groups)
        if len(self.events) != len(other.events) or len(mine) != len(its):
            return False
        if any(a is not b for a, b in zip(mine, its, strict=True)):
            return False
        return all(_same_event(a, b) for a, b in zip(self.events, other.events, strict=True))

    def has_moved(self, other: CounterLog) -> bool:
        """Whether each counter that was read had changed in between: what was computed from it can be told."""
        return all(self.read[event] != other.read.get(event) for event in self.read)

    def explains(self, number: Any, other: CounterLog, its: Any) -> Expression | None:
        """How both numbers, one of either run, were computed, if that was in the same way."""
        if type(number) is not float or type(its) is not float:
            return None
        found, its_found = self._numbers.get(number.hex()), other._numbers.get(its.hex())
        return None if found is None or its_found is None or found[0] != its_found[0] else found[0]

    def evaluate(self, expression: Expression, read: dict[int, float], rates: dict[int, float]) -> float:
        """The number that an expression gives for the counters that were read, with the ``rates`` of groups that have
        others by now."""
        formula, index, event = expression
        group = {**self.groups[index], "lr": rates[index]} if index in rates else self.groups[index]
        return formula(0.0 if event is None else read[event], group)

    def moved_rates(self, other: CounterLog) -> set[int]:
        """The groups whose rate is another one in the later run ``other``, with all that comes of the rate alone: what
        did is known to."""
        moved = {index for index, rate in self.rates.items() if other.rates.get(index) != rate}
        return moved - {
            index for (index, formula), n in self._of_rates.items() if other._of_rates.get((index, formula)) == n
        }

    def may_go_on(self, followed: set[int]) -> bool:
        """Whether numbers that were equal, to each other or from one step to the next, still are: counters that were
        equal before the run are equal now, and none has gone back; and so for rates, which are what they were but for
        those of the groups that are ``followed``."""
        rates: dict[float, float] = {}
        for index, before in self.rates.items():
            now = self.groups[index]["lr"]
            if not (same_number(now, before) or (index in followed and type(now) is float)):
                return False
            if not same_number(rates.setdefault(before, now), now):
                return False
        first: dict[float, float] = {}
        for position, before in self.start.items():
            now = self.tensors[position].item()
            if now < before or first.setdefault(before, now) != now:
                return False
        return True

    def again(self, wanted: set[int | None]) -> dict[int, float]:
        """Do it again; the numbers that are read at the events that are ``wanted``."""
        read: dict[int, float] = {}
        for index, event in enumerate(self.events):
            if event[0] != "item":
                func, several, positions, rest, kwargs = event
                targets = [self.tensors[position] for position in positions]
                func(targets if several else targets[0], *rest, **dict(kwargs))
            elif index in wanted:
                read[index] = self.tensors[event[1]].item()
        return read

    def values(self) -> list[tuple[torch.Tensor, float]]:
        """The counters that are written, with what is in them now."""
        counters = [self.tensors[position] for position in self.written]
        return [(counter, counter.item()) for counter in counters]


def _basis(formula: Formula, group: dict[str, Any]) -> tuple[Any, ...]:
    taken = _TAKES[formula](group)
    return formula, *[id(one) if isinstance(one, torch.Tensor) else one for one in taken]


def may_count(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the CPU can be a counter."""
    return tensor.numel() == 1 and tensor.dtype.is_floating_point


def _same_event(one: Any, other: Any) -> bool:
    if one[0] == "item" or other[0] == "item":
        return one == other
    if one[:3] != other[:3] or one[4] != other[4] or len(one[3]) != len(other[3]):
        return False
    for a, b in zip(one[3], other[3], strict=True):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return False
        if not (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else same_number(a, b)):
            return False
    return True
