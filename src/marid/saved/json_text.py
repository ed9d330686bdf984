"""A saved program as JSON: arguments, numbers, structures and nodes, written and read.

A file is a safetensors file. Its tensors are the state; the entry ``marid.program`` of its metadata is this text, and
``marid.program.sha256`` the digest of the text. The text is a map::

    format, version     "marid.program" and ``VERSION``
    name                of the function, for messages
    arguments           structure: what a call is given
    results             structure: what a call returns
    state               list of {name, role, spec}: tensors of the device that the program reads or writes
    more                other tensors of the same modules, by name: {name of the state that it is, or null}
    counters            {names, events}: numbers that optimizers count on the host, and what a call does to them
    draws               list of {operator, spec, args, kwargs}: the random numbers of a call, in order
    specs               list of [dtype, shape, stride, offset] (and two flags: conjugate, negative)
    lines               list of [file, line, function]
    nodes               list of FX's: "placeholder", "call_function" and "output"

A structure is ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, structure], ...]}`` or a leaf: of arguments
``{"tensor": spec, "host": flag}`` and ``{"value": ...}``, of results ``{"output": name}``, ``{"argument": number}``,
``{"state": name}``, ``{"input": name}`` for a constant or a copy of an argument that was on the host, and
``{"value": ...}``.

A node is ``{"op": "placeholder", "name": "%0", "spec": index}`` with ``"argument"``, ``"state"`` or ``"constant"``, or
``{"op": "call_function", "target": "aten.mm.default", "args": [...], "kwargs": {...}, "results": [[name, path, spec],
...], "line": index}``, or ``{"op": "output", "args": [names]}``. Among arguments, tensors are their names, numbers and
lists of numbers themselves, and the rest is tagged: ``{"str": text}``, ``{"dtype": name}``, ``{"layout": "strided"}``,
``{"memory_format": name}``, ``{"float": "nan"}``, ``{"complex": [real, imaginary]}``, ``{"draw": index}``, and
``{"computed": formula, "event": index, "group": {...}}`` for a number that comes of a counter.
"""

from __future__ import annotations

import json
import math
from typing import Any

from marid.engine.plain import as_int, as_list, as_text, constant_to
from marid.errors import WireError
from marid.graph.program import filled

FORMAT, VERSION = "marid.program", 1
ENTRY, DIGEST = "marid.program", "marid.program.sha256"
_TEXTS = 4096  # the longest text in a file
_SLOTS = 1 << 20
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def text_to(program: dict[str, Any]) -> str:
    """The text of a program."""
    return json.dumps(program, separators=(",", ":"), allow_nan=False)


def text_from(text: str) -> dict[str, Any]:
    """The map that a text is of. Raises ``WireError``."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"its text is no JSON: {str(error)[:100]}") from None
    if type(found) is not dict or found.get("format") != FORMAT:
        raise WireError("its text is not that of a program")
    if found.get("version") != VERSION:
        raise WireError(f"it has version {str(found.get('version'))[:20]} of the format, and version {VERSION} is read")
    return found


def part_of(data: Any, name: str, kind: type) -> Any:
    """An entry of a map. Raises ``WireError``."""
    found = data.get(name) if type(data) is dict else None
    if type(found) is not kind:
        raise WireError(f"its entry {name!r} is missing, or no {kind.__name__}")
    return found


def parts_of(data: Any, count: int, what: str) -> list[Any]:
    """A list of so many parts. Raises ``WireError``."""
    if len(as_list(data, count, what)) != count:
        raise WireError(f"{what} has {count} parts")
    return data


def name_of(slot: int) -> str:
    """The name of the tensor in a slot."""
    return f"%{slot}"


def slot_of(name: Any) -> int:
    """The slot that a name is of. Raises ``WireError``."""
    digits = as_text(name, 8, "a tensor's name")[1:]
    if name[:1] != "%" or not digits.isascii() or not digits.isdecimal() or name != name_of(int(digits)):
        raise WireError(f"{name[:40]!r} is no name of a tensor")
    return as_int(int(digits), 0, _SLOTS, "a tensor's number")


# --- numbers ---------------------------------------------------------------------------------------------------------


def number_to(value: Any) -> Any:
    """A number, a text, a boolean or None as JSON. Raises ``TypeError`` for anything else."""
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [number_to(value.real), number_to(value.imag)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__}")


def number_from(data: Any) -> Any:
    """What ``number_to`` was given. Raises ``WireError``."""
    if data is None or type(data) in (bool, float):
        return data
    if type(data) is int:
        return as_int(data, -(1 << 64), 1 << 64, "a number")
    if type(data) is str:
        return as_text(data, _TEXTS, "a text")
    if type(data) is dict and len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "float" and type(value) is str and value in _SPECIAL:
            return _SPECIAL[value]
        if tag == "complex":
            parts = [number_from(part) for part in as_list(value, 2, "a complex number")]
            if len(parts) == 2 and all(type(part) is float for part in parts):
                return complex(*parts)
    raise WireError(f"{str(data)[:40]!r} is no number")


# --- arguments of operators ------------------------------------------------------------------------------------------


def argument_to(arg: Any, number: Any) -> Any:
    """An argument of an instruction as JSON; ``number`` gives the JSON of a parameter."""
    return filled(arg, name_of, lambda param: number(param.index), list, constant_to)


class Numbers:
    """The numbers of a program, taken from the arguments of its nodes while these become those of the wire
    (``remote/wire/program_records.py``).

    ``values`` are the numbers, ("draw", index) for random positions; ``computed`` those that come of counters, by
    place, as they stand in the file: one, or a list of such and of numbers.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.computed: list[tuple[int, Any]] = []

    def wire(self, arg: Any) -> Any:
        """The wire's form of an argument. Raises ``WireError``."""
        if arg is None or type(arg) is bool:
            return arg
        if type(arg) is str:
            return slot_of(arg)
        if type(arg) is list:
            return self._list(arg) if all(map(_is_number, arg)) else [self.wire(item) for item in arg]
        if _is_number(arg):
            return self._one(arg)
        if type(arg) is dict and arg.keys() == {"draw"}:
            self.values.append(("draw", as_int(arg["draw"], 0, _SLOTS, "a draw")))
            return "g"
        return arg  # a constant, which is the same in both

    def _one(self, number: Any) -> str:
        if _is_computed(number):
            self.computed.append((len(self.values), number))
            number = 0.0
        self.values.append(number_from(number))
        return "p"

    def _list(self, items: list[Any]) -> str:
        as_list(items, _TEXTS, "a list of numbers")
        if any(map(_is_computed, items)):
            self.computed.append((len(self.values), items))
        self.values.append(tuple([0.0 if _is_computed(item) else number_from(item) for item in items]))
        return "p"


def _is_computed(item: Any) -> bool:
    return type(item) is dict and "computed" in item


def _is_number(item: Any) -> bool:
    return type(item) in (int, float, bool) or (type(item) is dict and bool({"float", "complex", "computed"} & {*item}))
