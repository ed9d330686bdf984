"""Reads whose values a function only returns: ``return loss.item()``.

A replay runs no Python, so nothing that the Python does with a value can be done again. But where the instructions
behind a read do nothing with the value except return it, alone or in tuples, lists and dicts, nobody sees when it is
read. Arithmetic may come in between: ``return loss.item() / len(x)``. While a function is recorded such a read gives a
``ReturnedRead`` in the place of the value, and the value is read when the function has returned; a replay reads it
behind its program.

Only the function's own code counts, outside of ``try`` and ``with``. Opcodes are those that ``dis`` documents for
Python 3.11 to 3.14; one that is not listed here makes a read what it was: a reason to run as Python.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from marid.frontend.tensor import LazyTensor

METHODS = ("item", "tolist", "cpu", "numpy")

_POPS = {
    "NOP": 0, "KW_NAMES": 0, "PUSH_NULL": 0, "LOAD_CONST": 0, "LOAD_SMALL_INT": 0, "LOAD_DEREF": 0,
    "LOAD_GLOBAL": 0, "LOAD_FAST": 0, "LOAD_FAST_CHECK": 0, "LOAD_FAST_BORROW": 0, "LOAD_ATTR": 1, "LOAD_METHOD": 1,
    "STORE_FAST": 1, "POP_TOP": 1, "UNARY_NEGATIVE": 1, "UNARY_INVERT": 1, "UNARY_NOT": 1, "BINARY_OP": 2,
    "BINARY_SUBSCR": 2, "BINARY_SLICE": 3, "COMPARE_OP": 2, "IS_OP": 2,
}  # fmt: skip
_POPS_BY_COUNT: dict[str, Callable[[int], int]] = {
    "CALL": lambda count: count + 2,
    "CALL_KW": lambda count: count + 3,
    "BUILD_SLICE": lambda count: count,
    "BUILD_TUPLE": lambda count: count,
    "BUILD_LIST": lambda count: count,
    "BUILD_MAP": lambda count: 2 * count,
    "BUILD_CONST_KEY_MAP": lambda count: count + 1,
}
"""How many entries of the stack an instruction takes. What is in neither table makes a read a reason to run as Python:
a branch, a loop, an attribute that is set."""
_CONTAINERS = {"BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"}
_SIGNS = {"+", "-", "*", "/"}
_OTHER, _NUMBER, _VALUE = range(3)  # what an entry of the stack is: another thing, a number that was read, or holds one
_IN_A_CONTEXT = torch.no_grad()(lambda: None).__code__
"""The code of every function that ``torch.no_grad()`` and its kin decorate; it returns what the function returns."""


def _operators(function: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """A function of ``operator`` as the two methods that Python calls for it."""
    return lambda self, other: _computed(function, self, other), lambda self, other: _computed(function, other, self)


class Waiting:
    """A value that is read when the function has returned. Arithmetic with numbers waits too; with anything else the
    value is read at once, which the recording notes."""

    __array_ufunc__ = None  # or arrays of numpy took one for an object to put in them

    value: Any
    """Reads it, or gives what was read. Raises what the method and the arithmetic raise."""

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("truediv")


class ReturnedRead(Waiting):
    """A read: the tensor without its history, and the method to call. The tensor is a copy if the function may still
    write it."""

    def __init__(self, tensor: Any, method: str, copy: bool) -> None:
        self.tensor, self.method = tensor.detach().clone() if copy else tensor.detach(), method

    @functools.cached_property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.tensor, self.method)()


class Computed(Waiting):
    """A number that comes of reads: the name of a function of ``operator``, and what it takes."""

    def __init__(self, function: str, left: Any, right: Any) -> None:
        self.function, self.left, self.right = function, left, right

    @functools.cached_property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(operator, self.function)(values_read(self.left), values_read(self.right))


def _computed(function: str, left: Any, right: Any) -> Any:
    made = Computed(function, left, right)
    return made if all(isinstance(one, Waiting) or type(one) in (int, float) for one in (left, right)) else made.value


def reads_in(thing: Any) -> list[ReturnedRead]:
    """The reads of which a value comes."""
    if isinstance(thing, Computed):
        return [*reads_in(thing.left), *reads_in(thing.right)]
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
    found: list[ReturnedRead]


_here = _Here()
_lock = threading.Lock()
_blocks = 0


@contextmanager
def returned_reads(caller: CodeType | None) -> Iterator[list[ReturnedRead]]:
    """A block in which reads by a function that ``caller`` calls wait where it only returns their values; gives these
    reads. Other threads read as ever. The methods of ``LazyTensor`` are others only in such blocks: at other times a
    read pays nothing for this."""
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for name in METHODS:
                setattr(LazyTensor, name, _waiting(name, getattr(LazyTensor, name)))
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


def _waiting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        behind = None if _here.caller is None or args or kwargs else _behind(self, name, sys._getframe(1))
        if behind is None:
            return method(self, *args, **kwargs)
        _here.found.append(ReturnedRead(self, name, copy=behind == "calls"))
        return _here.found[-1]

    return read


def _behind(tensor: Any, name: str, frame: FrameType) -> str | None:
    """What the function does behind the read that ``frame`` is at, as ``_returns`` says it; None also for a read that
    PyTorch refuses, and for one of another function."""
    if tensor.numel() != 1 if name == "item" else name != "tolist" and tensor.requires_grad:
        return None
    back = frame.f_back
    while back is not None and back.f_code is _IN_A_CONTEXT:
        back = back.f_back
    ours = back is not None and back.f_code is _here.caller
    return _returns(frame.f_code, frame.f_lasti, name == "item") if ours else None


@functools.lru_cache(1024)
def _returns(code: CodeType, offset: int, number: bool) -> str | None:
    """``"only"`` if nothing happens behind the call at ``offset`` but that its value is returned, ``"calls"`` if the
    function does more, but not with that value, else None. Arithmetic is nothing more, if the value is a ``number``.

    The instructions are followed with a stack and local variables of which only is known whether the value is in them,
    or is there as a number.
    """
    instructions = dis.Bytecode(code)
    handled = [range(entry.start, entry.end) for entry in instructions.exception_entries]
    value = _NUMBER if number else _VALUE
    stack, variables, more = [value], dict[str, int](), False
    for instruction in instructions:
        name, count = instruction.opname, instruction.arg or 0
        if instruction.offset <= offset or name in ("CACHE", "EXTENDED_ARG", "PRECALL"):  # within a call, or at its end
            continue
        if any(offset in lines or instruction.offset in lines for lines in handled):
            return None
        if name in ("RETURN_VALUE", "RETURN_CONST"):
            return "calls" if more else "only"
        pops = _POPS_BY_COUNT[name](count) if name in _POPS_BY_COUNT else _POPS.get(name)
        if pops is None:
            return None
        stack = [_OTHER] * (pops - len(stack)) + stack  # what was there before the read
        taken = stack[len(stack) - pops :]
        del stack[len(stack) - pops :]
        made = max(taken, default=_OTHER)
        if name == "STORE_FAST":
            variables[instruction.argval] = made
        elif name.startswith("LOAD_FAST"):
            made = variables.get(instruction.argval, _OTHER)
        elif made and name in _CONTAINERS and not (name == "BUILD_MAP" and any(taken[::2])):
            made = _VALUE
        elif made and not (name == "BINARY_OP" and _VALUE not in taken and instruction.argrepr.rstrip("=") in _SIGNS):
            return None
        more |= not made and name.startswith(("CALL", "BINARY_", "UNARY_", "COMPARE_", "LOAD_ATTR"))
        # Of a call, Python 3.11 counts the arguments at an instruction before it.
        pushes = 1 if name.startswith("CALL") else pops + dis.stack_effect(instruction.opcode, instruction.arg)
        stack += [made] * pushes
    return None
