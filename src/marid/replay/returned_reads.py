"""Reads that wait: whose values a function only returns (``return loss.item()``) or compares (``if loss.item() < 1``).

A replay runs no Python, so nothing that the Python does with a value can be done again. But where the function does
nothing with it except return it, alone or in containers that it makes, nobody sees when it is read. Arithmetic may come
in between: ``return loss.item() / len(x)``. How a comparison comes out can be part of the recording (``guards.py``). So
while a function is recorded, a read whose value goes nowhere else (``value_flow.py``) gives a ``ReturnedRead`` in the
place of the value. The value is read when the function has returned; a replay reads it behind its program.

Only the function's own code returns such values, outside of ``try`` and ``with``; any code may compare them.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from marid.frontend.observe import observer
from marid.frontend.tensor import LazyTensor
from marid.replay.value_flow import Use, use_of

METHODS = ("item", "tolist", "cpu", "numpy", "__bool__")

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>")
_IN_A_CONTEXT = torch.no_grad()(lambda: None).__code__
"""The code of every function that ``torch.no_grad()`` and its kin decorate; it returns what the function returns."""


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
        return getattr(operator, test)(self.value, values_read(other))

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
    """A number that comes of reads: the name of a function of ``operator``, and what it takes."""

    def __init__(self, function: str, *sides: Any) -> None:
        self.function, self.sides = function, sides

    def expression(self) -> Any:
        return self.function, *[one.expression() if isinstance(one, Waiting) else one for one in self.sides]

    @functools.cached_property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(operator, self.function)(*map(values_read, self.sides))


def _computed(function: str, left: Any, right: Any) -> Any:
    made = Computed(function, left, right)
    waits = _is_operand(left) and _is_operand(right)
    if waits and function == "truediv":
        waits = bool(right != 0)  # or it raises here; of a read, that is a test
    return made if waits else made.value


def _is_operand(one: Any) -> bool:
    """Whether arithmetic with it raises nothing, but by a division."""
    return isinstance(one, Waiting) or type(one) is float or (type(one) is int and abs(one) < 1 << 53)


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


class _Here(threading.local):
    caller: CodeType | None = None
    found: list[weakref.ref[ReturnedRead]]


_here = _Here()
_lock = threading.Lock()
_blocks = 0


@contextmanager
def returned_reads(caller: CodeType | None) -> Iterator[list[weakref.ref[ReturnedRead]]]:
    """A block in which reads by a function that ``caller`` calls wait where it only returns their values; gives these
    reads. Other threads read as ever. The methods of ``LazyTensor`` are others only in such blocks: at other times a
    read pays nothing for this."""
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for name in METHODS:
                method = getattr(LazyTensor, name)
                setattr(LazyTensor, name, _deciding(method) if name == "__bool__" else _waiting(name, method))
    _here.caller, _here.found = caller, []
    try:
        yield _here.found
    finally:
        _here.caller = None
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                for name in METHODS:
                    _restore(name)


_own = {name: LazyTensor.__dict__[name] for name in METHODS if name in LazyTensor.__dict__}


def _restore(name: str) -> None:
    if name in _own:
        setattr(LazyTensor, name, _own[name])
    else:
        delattr(LazyTensor, name)


def _deciding(method: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(method)
    def decide(self: Any) -> bool:
        watching = None if _here.caller is None or self.numel() != 1 else observer()
        outcome = None if watching is None else watching.outcome("ne", self, 0)
        return method(self) if outcome is None else outcome

    return decide


def _waiting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        use = None if _here.caller is None or args or kwargs else _use(self, name, sys._getframe(1))
        if use is None:
            return method(self, *args, **kwargs)
        made = ReturnedRead(self, name, copy=use.before)
        _here.found.append(weakref.ref(made))
        return made

    return read


def _use(tensor: Any, name: str, frame: FrameType) -> Use | None:
    """What becomes of the value of the read that ``frame`` is at, where that can wait; None also for a read that
    PyTorch refuses."""
    if tensor.numel() != 1 if name == "item" else name != "tolist" and tensor.requires_grad:
        return None
    knows_abs = "abs" not in frame.f_globals and frame.f_builtins.get("abs") is abs
    use = use_of(frame.f_code, frame.f_lasti, name, knows_abs)
    before = False
    while use is not None:
        before |= use.before
        back = frame.f_back
        while back is not None and back.f_code is _IN_A_CONTEXT:
            back = back.f_back
        if back is None or not use.returned or back.f_code is _here.caller:
            return Use(use.returned, before)
        if frame.f_code.co_name not in _COMPREHENSIONS or frame.f_code not in back.f_code.co_consts:
            return None
        use = use_of(back.f_code, back.f_lasti, frame.f_code.co_name, knows_abs=False)
        frame = back
    return None
