"""The code of a function that is recorded, with ``Conversion``s (``waiting.py``) in the place of ``int`` and ``float``.

``losses.append(float(loss))`` and ``int(token)`` are calls of builtins, which nothing can stand for. The code differs
in nothing but the instructions that load these two for a call: it has the same length, lines, names and variables.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from marid.replay.returned_reads import COMPREHENSIONS, CONVERTING

_NULL_FIRST = sys.version_info < (3, 13)  # whether a call has its empty entry of the stack below what is called
_lock = threading.Lock()
_changed: dict[FunctionType, tuple[CodeType, int]] = {}  # what their code was, and how many blocks change it


@contextmanager
def converting(function: Any) -> Iterator[None]:
    """A block in which the code of a function, or of the one that it wraps, calls ``Conversion``s. To what does not
    wait, and so to other threads, these are the builtins."""
    own = inspect.unwrap(getattr(function, "__func__", function))
    if type(own) is not FunctionType:
        yield
        return
    with _lock:
        code, blocks = _changed.get(own, (own.__code__, 0))
        if not blocks:
            own.__code__ = _converting(code, code.co_filename, _replaced(own))
        _changed[own] = code, blocks + 1
    try:
        yield
    finally:
        with _lock:
            code, blocks = _changed.pop(own)
            if blocks == 1:
                own.__code__ = code
            else:
                _changed[own] = code, blocks - 1


def _replaced(function: FunctionType) -> frozenset[type]:
    """Those that the function has by their names."""
    found = function.__builtins__  # pyright: ignore[reportAttributeAccessIssue]
    names = {kind: kind.__name__ for kind in CONVERTING}
    return frozenset(k for k, n in names.items() if n not in function.__globals__ and found.get(n) is vars(builtins)[n])


@functools.lru_cache(1024)
def _converting(code: CodeType, filename: str, kinds: frozenset[type]) -> CodeType:
    """The code; equal ones of two files are two."""
    constants = list(code.co_consts)
    for index, constant in enumerate(constants):
        if type(constant) is CodeType and constant.co_name in COMPREHENSIONS:
            constants[index] = _converting(constant, filename, kinds)
    by_name = {kind.__name__: CONVERTING[kind] for kind in kinds}
    raw = bytearray(code.co_code)
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL" and one.argval in by_name and (one.arg or 0) & 1:
            constants.append(by_name[one.argval])
            _load(raw, one.offset, len(constants) - 1)
    return code.replace(co_code=bytes(raw), co_consts=tuple(constants))


def _load(raw: bytearray, offset: int, constant: int) -> None:
    """Have a call load a constant, in the place of the global that the instruction at ``offset`` loads."""
    begin, end = offset, offset + 2
    while begin >= 2 and raw[begin - 2] == dis.opmap["EXTENDED_ARG"]:
        begin -= 2
    while raw[end] == dis.opmap["CACHE"]:
        end += 2
    null = [(dis.opmap["PUSH_NULL"], 0)]
    load = [(dis.opmap["EXTENDED_ARG"], constant >> 8), (dis.opmap["LOAD_CONST"], constant & 255)]
    made = [*null, *load] if _NULL_FIRST else [*load, *null]
    made += [(dis.opmap["NOP"], 0)] * ((end - begin) // 2 - len(made))
    raw[begin:end] = bytes(byte for instruction in made for byte in instruction)
