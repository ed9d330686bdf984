"""Reads that wait: whose values a function only returns (``return loss.item()``) or compares (``if loss.item() < 1``).

A replay runs no Python, so nothing that the Python does with a value can be done again. But where the function does
nothing with it except return it, alone or in containers that it makes, nobody sees when it is read. Arithmetic may come
in between: ``return loss.item() / len(x)``. How a comparison comes out can be part of the recording (``guards.py``). So
while a function is recorded, a read whose value goes nowhere else (``value_flow.py``) gives a ``ReturnedRead`` in the
place of the value. The value is read when the function has returned; a replay reads it behind its program.

Only the function's own code returns such values, outside of ``try`` and ``with``; any code may compare them.
"""

from __future__ import annotations

import builtins
import dis
import functools
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
from marid.replay.opcodes import SKIPPED
from marid.replay.value_flow import BUILTINS, CONVERSIONS, Use, use_of
from marid.replay.waiting import Conversion, ReturnedRead

METHODS = ("item", "tolist", "cpu", "numpy", "__bool__")
_READS = ("item", "tolist", "numpy")

COMPREHENSIONS = ("<listcomp>", "<dictcomp>")
_IN_A_CONTEXT = torch.no_grad()(lambda: None).__code__
"""The code of every function that ``torch.no_grad()`` and its kin decorate; it returns what the function returns."""


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
        frame = sys._getframe(1)
        if name == "cpu" and _here.caller is not None and _is_read_next(frame.f_code, frame.f_lasti):
            return self  # its value is read where the other one is
        made = None if args or kwargs else _read(self, name, frame, name)
        return method(self, *args, **kwargs) if made is None else made

    return read


@functools.lru_cache(1024)
def _is_read_next(code: CodeType, offset: int) -> bool:
    """Whether the call at ``offset`` is that of ``x.cpu().item()``, or of another such read."""
    instructions = [*dis.get_instructions(code)]
    here = max(one.offset for one in instructions if one.offset <= offset)  # Python 3.11 may be at PRECALL
    following = [one for one in instructions if one.offset >= here and one.opname not in SKIPPED][:3]
    before = [one for one in instructions if one.offset < here and one.opname not in SKIPPED][-1:]
    looks = [(one.opname in ("LOAD_ATTR", "LOAD_METHOD"), one.argval) for one in (*before, *following[1:2])]
    calls = [(one.opname, one.arg) for one in following[::2]]
    return calls == [("CALL", 0)] * 2 and looks in [[(True, "cpu"), (True, name)] for name in _READS]


def _read(tensor: Any, method: str, frame: FrameType, called: str) -> ReturnedRead | None:
    """What stands for the value that ``frame`` reads by a call of ``called``, where that can wait."""
    use = None if _here.caller is None else _use(tensor, method, frame, called)
    if use is None:
        return None
    made = ReturnedRead(tensor, method, copy=use.before)
    _here.found.append(weakref.ref(made))
    return made


def _converted(tensor: Any, frame: FrameType, name: str) -> ReturnedRead | None:
    return _read(tensor, "item", frame, CONVERSIONS[name]) if isinstance(tensor, LazyTensor) else None


CONVERTING = {kind: Conversion(kind.__name__, _converted) for kind in (int, float)}
"""What stands for these builtins in a function that is recorded (``conversions.py``)."""


def _builtins(frame: FrameType) -> frozenset[str]:
    found, own = frame.f_builtins, vars(builtins)
    return frozenset(name for name in BUILTINS if name not in frame.f_globals and found.get(name) is own[name])


def _use(tensor: Any, method: str, frame: FrameType, called: str) -> Use | None:
    """What becomes of the value of the read that ``frame`` is at, where that can wait; None also for a read that
    PyTorch refuses."""
    if tensor.numel() != 1 if method == "item" else method != "tolist" and tensor.requires_grad:
        return None
    use = use_of(frame.f_code, frame.f_lasti, called, _builtins(frame))
    before = False
    while use is not None:
        before |= use.before
        back = frame.f_back
        while back is not None and back.f_code is _IN_A_CONTEXT:
            back = back.f_back
        if back is None or not use.returned or back.f_code is _here.caller:
            return Use(use.returned, before)
        if frame.f_code.co_name not in COMPREHENSIONS or frame.f_code not in back.f_code.co_consts:
            return None
        use = use_of(back.f_code, back.f_lasti, frame.f_code.co_name, frozenset())
        frame = back
    return None
