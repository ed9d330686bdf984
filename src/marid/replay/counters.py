"""Step counters that optimizers keep in tensors of the CPU, and the numbers that they compute from them.

Adam and its relatives add one to a counter at each step, and give the device numbers such as
``lr / (1 - beta**step)``. What PyTorch's optimizers do to such counters is noted and done again at a replay. The
numbers read from them remember how they were computed; where two recordings have different numbers that were computed
alike, replays compute them anew.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from marid.replay.snapshot import same_number

__all__ = ["CounterLog", "Expression", "HostNumber", "evaluate", "is_of_an_optimizer"]

Expression = tuple[Any, ...]  # ("item", event), or an operator and two operands: expressions or numbers

_OPTIMIZERS = os.path.dirname(os.path.abspath(torch.optim.__file__)) + os.sep
aten = torch.ops.aten
_FOLLOWED = (aten._foreach_add_.Tensor, aten._foreach_add_.Scalar, aten.add_.Tensor)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "pow": operator.pow,
}


def is_of_an_optimizer(file: str) -> bool:
    """Whether a source file is of PyTorch's optimizers."""
    return file.startswith(_OPTIMIZERS)


@dataclass
class CounterLog:
    """What happened to the counters ``tensors`` in one run.

    ``events`` are reads, ``("item", tensor)``, and writes: an operator, whether it takes a list, the counters that it
    writes, the other arguments, the keywords. ``read`` are the numbers that were read, ``numbers`` all that came of
    them, with how they were computed. ``start`` says which counters were equal before the run.
    """

    tensors: list[torch.Tensor]
    refuse: Callable[[str], None]
    events: list[Any] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    numbers: dict[float, Expression] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        self.start = [_start(tensor) for tensor in self.tensors]

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is such a counter."""
        return id(tensor) in self._positions and tensor.numel() == 1 and tensor.dtype.is_floating_point

    def item(self, tensor: torch.Tensor, value: float) -> HostNumber:
        """A counter is read."""
        self.read.append(value)
        self.events.append(("item", self._positions[id(tensor)]))
        return HostNumber.make(value, ("item", len(self.read) - 1), self)

    def write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_derived: Callable[[Any], bool]
    ) -> bool:
        """An operator is called on counters; whether it is one that can be called again."""
        if func not in _FOLLOWED:
            return False
        targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        if not all(self.follows(target) for target in targets):
            return False
        more = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if any(id(arg) in self._positions or is_derived(arg) or arg.numel() != 1 for arg in more):
            return False
        if any(isinstance(arg, (list, tuple)) for arg in args[1:]):
            return False
        positions = tuple([self._positions[id(target)] for target in targets])
        for position in positions:
            self.written[position] = self.written.get(position, 0) + 1
        several = isinstance(args[0], (list, tuple))
        rest = tuple([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args[1:]])
        self.events.append((func, several, positions, rest, tuple(kwargs.items())))
        return True

    def is_like(self, other: CounterLog) -> bool:
        """Whether the same was done to the same counters."""
        if len(self.events) != len(other.events) or len(self.tensors) != len(other.tensors):
            return False
        if any(a is not b for a, b in zip(self.tensors, other.tensors, strict=True)):
            return False
        return all(_same_event(a, b) for a, b in zip(self.events, other.events, strict=True))

    def has_moved(self, other: CounterLog) -> bool:
        """Whether each counter that was read had changed in between: what was computed from it can be told."""
        return all(a != b for a, b in zip(self.read, other.read, strict=False))

    def explains(self, number: Any, other: CounterLog, its: Any) -> Expression | None:
        """How both numbers, one of either run, were computed, if that was in the same way."""
        if type(number) is not float or type(its) is not float:
            return None
        found = self.numbers.get(number)
        return found if found is not None and found == other.numbers.get(its) else None

    def has_equal_counters(self) -> bool:
        """Whether counters that were equal before the run are equal now: equal numbers were taken for one another."""
        first: dict[Any, Any] = {}
        for before, tensor in zip(self.start, self.tensors, strict=True):
            if before is not None and first.setdefault(before, now := _start(tensor)) != now:
                return False
        return True

    def again(self) -> list[float]:
        """Do it again; the numbers that are read."""
        read: list[float] = []
        for event in self.events:
            if event[0] == "item":
                read.append(self.tensors[event[1]].item())
            else:
                func, several, positions, rest, kwargs = event
                targets = [self.tensors[position] for position in positions]
                func(targets if several else targets[0], *rest, **dict(kwargs))
        return read

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The counters that are written, with what is in them now."""
        return [(self.tensors[position], self.tensors[position].clone()) for position in self.written]


def _start(tensor: torch.Tensor) -> float | None:
    return tensor.item() if tensor.numel() == 1 and tensor.dtype.is_floating_point else None


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


def evaluate(expression: Any, read: list[float]) -> Any:
    """The number that an expression gives for the counters that were read."""
    if type(expression) is not tuple:
        return expression
    if expression[0] == "item":
        return read[expression[1]]
    name, a, b = expression
    return _OPERATORS[name](evaluate(a, read), evaluate(b, read))


class HostNumber(float):
    """A number that came from a counter; arithmetic keeps how. Looking at it in another way makes the run refused."""

    __slots__ = ("expression", "log", "plain")

    expression: Expression
    log: CounterLog
    plain: float

    @classmethod
    def make(cls, value: float, expression: Expression, log: CounterLog) -> HostNumber:
        made = cls(value)
        made.expression, made.log, made.plain = expression, log, value
        log.numbers.setdefault(value, expression)
        return made


def _operator(name: str, reflected: bool) -> Any:
    compute = _OPERATORS[name]

    def method(self: HostNumber, other: Any) -> Any:
        if type(other) not in (int, float, HostNumber):
            return NotImplemented
        plain, how = (other.plain, other.expression) if type(other) is HostNumber else (other, other)
        value = compute(plain, self.plain) if reflected else compute(self.plain, plain)
        if type(value) is not float:
            self.log.refuse("a number from a counter becomes another kind of number")
            return value
        operands = (how, self.expression) if reflected else (self.expression, how)
        return HostNumber.make(value, (name, *operands), self.log)

    return method


for _name in _OPERATORS:
    setattr(HostNumber, f"__{_name}__", _operator(_name, False))
    setattr(HostNumber, f"__r{_name}__", _operator(_name, True))


def _negated(self: HostNumber) -> HostNumber:
    return HostNumber.make(-self.plain, ("mul", self.expression, -1), self.log)


setattr(HostNumber, "__neg__", _negated)  # noqa: B010


def _look(name: str) -> Any:
    original = getattr(float, name)

    def method(self: HostNumber, *args: Any) -> Any:
        self.log.refuse("a number that is read from a tensor of the CPU is looked at")
        return original(self.plain, *[arg.plain if type(arg) is HostNumber else arg for arg in args])

    return method


for _name in (
    *(
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "hash",
        "bool",
        "int",
        "float",
        "trunc",
        "round",
        "floor",
        "ceil",
        "repr",
        "str",
    ),
    *("format", "pos", "abs", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"),
):
    setattr(HostNumber, f"__{_name}__", _look(f"__{_name}__"))
