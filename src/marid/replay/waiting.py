"""Numbers that wait to be read: what stands for a value, and what is computed of such.

``returned_reads.py`` says when a function gets one in the place of a number.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from marid.frontend.observe import observer

_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float}


def calculate(function: str, *values: Any) -> Any:
    """What the function of ``operator`` with this name makes of numbers; ``int`` and ``float`` are Python's."""
    return (_CONVERSIONS.get(function) or getattr(operator, function))(*values)


def _operators(function: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """A function of ``operator`` as the two methods that Python calls for it."""
    return lambda self, other: _computed(function, self, other), lambda self, other: _computed(function, other, self)


def _comparison(test: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._test(test, other)


class Waiting:
    """A value that is read when the function has returned. Arithmetic with numbers waits too; with anything else the
    value is read at once, which the recording notes."""

    __array_ufunc__ = None  # or arrays of numpy took one for an object to put in them

    value: Any
    """Reads it, or gives what was read. Raises what the method and the arithmetic raise."""

    def expression(self) -> Any:
        """How the value comes about: of tensors and numbers, as guards take it."""
        raise NotImplementedError

    def _test(self, test: str, other: Any) -> Any:
        """What the function of ``operator`` named ``test`` says of the value and of ``other``. While the function is
        recorded, how it comes out becomes part of the recording."""
        watching = observer()
        if watching is not None and (isinstance(other, Waiting) or type(other) in (bool, int, float)):
            side = other.expression() if isinstance(other, Waiting) else other
            outcome = watching.outcome(test, self.expression(), side)
            if outcome is not None:
                return outcome
        return calculate(test, self.value, values_read(other))

    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = map(_comparison, ("eq", "ne"))  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__
    __bool__ = lambda self: self._test("ne", 0)  # noqa: E731
    __abs__ = lambda self: Computed("abs", self)  # noqa: E731
    __neg__ = lambda self: Computed("neg", self)  # noqa: E731
    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("truediv")


class ReturnedRead(Waiting):
    """A read: the tensor without its history, and the method to call. The tensor is a copy if the function may still
    write it."""

    def __init__(self, tensor: Any, method: str, copy: bool) -> None:
        self.tensor, self.method = tensor.detach().clone() if copy else tensor.detach(), method

    def expression(self) -> Any:
        return self.tensor

    @functools.cached_property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.tensor, self.method)()


class Computed(Waiting):
    """A number that comes of reads: the name of a function (``calculate``), and what it takes."""

    def __init__(self, function: str, *sides: Any) -> None:
        self.function, self.sides = function, sides

    def expression(self) -> Any:
        return self.function, *[one.expression() if isinstance(one, Waiting) else one for one in self.sides]

    @functools.cached_property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return calculate(self.function, *map(values_read, self.sides))


def _computed(function: str, left: Any, right: Any) -> Any:
    made = Computed(function, left, right)
    waits = _is_operand(left) and _is_operand(right)
    if waits and function == "truediv":
        waits = bool(right != 0)  # or it raises here; of a read, that is a test
    return made if waits else made.value


def _is_operand(one: Any) -> bool:
    """Whether arithmetic with it raises nothing, but by a division."""
    return isinstance(one, Waiting) or type(one) is float or (type(one) is int and abs(one) < 1 << 53)


class Conversion:
    """``int`` or ``float``, for which it stands in the code of a function that is recorded: what waits goes on waiting.
    Python demands a number of ``__int__`` and ``__float__``, so that the call itself has to be another one.

    ``read`` reads a tensor for the frame that calls: something that waits, or None.
    """

    def __init__(self, name: str, read: Callable[[Any, FrameType, str], Any]) -> None:
        self.name, self._read = name, read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(given, torch.Tensor):
            read = self._read(given, sys._getframe(1), self.name) if self._takes(given) else None
            given = given if read is None else read
        if not isinstance(given, Waiting):
            return _CONVERSIONS[self.name](*args, **kwargs)
        made = Computed(self.name, given)
        waits = _is_whole(given) if self.name == "int" else all(self._takes(read.tensor) for read in reads_in(given))
        return made if waits else made.value

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether the number in a tensor can be converted, whatever it is."""
        return not tensor.is_complex() and (self.name == "float" or not tensor.is_floating_point())


def _is_whole(one: Any) -> bool:
    """Whether it is a whole number, whatever is read: ``int`` leaves it as it is."""
    if isinstance(one, Computed):
        return one.function == "int" or (one.function not in ("truediv", "float") and all(map(_is_whole, one.sides)))
    return type(one) is int or (isinstance(one, ReturnedRead) and not one.tensor.is_floating_point())


def reads_in(thing: Any) -> list[ReturnedRead]:
    """The reads of which a value comes."""
    if isinstance(thing, Computed):
        return [read for side in thing.sides for read in reads_in(side)]
    return [thing] if isinstance(thing, ReturnedRead) else []


def values_read(result: Any) -> Any:
    """``result`` with values in the place of reads; what holds none stays the same object."""
    if isinstance(result, Waiting):
        return result.value
    if type(result) in (tuple, list):
        items = [values_read(item) for item in result]
        same = all(one is other for one, other in zip(items, result, strict=True))
        return result if same else type(result)(items)
    if type(result) is dict:
        pairs = [(values_read(key), values_read(value)) for key, value in result.items()]
        same = all(k is key and v is value for (k, v), (key, value) in zip(pairs, result.items(), strict=True))
        return result if same else dict(pairs)
    return result
