"""The counters of optimizers in a saved program, and the numbers that come of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from marid.engine.plain import as_int, as_list, as_text, dtype_named
from marid.errors import WireError
from marid.replay.counters import FOLLOWED, FORMULAS, CounterLog
from marid.replay.recording import Each
from marid.saved.json_text import number_from, part_of

_WRITES = {str(func): func for func in FOLLOWED}
_MOST = 1 << 16


@dataclass
class Counting:
    """What a call does to the counters called ``names``, and the numbers of the program that are ``computed`` from
    them, as ``CounterLog`` and ``Recording`` have it. ``groups`` are those of parameters."""

    names: list[str]
    events: list[Any]
    groups: list[dict[str, Any]]
    computed: list[tuple[int, Any]]

    @classmethod
    def read(cls, data: dict[str, Any], computed: list[tuple[int, Any]]) -> Counting:
        """Raises ``WireError``."""
        names = [as_text(name, 512, "a counter") for name in as_list(data.get("names"), _MOST, "its counters")]
        if len(set(names)) != len(names):
            raise WireError("a counter is there twice")
        found = cls(names, [], [], [])
        for event in as_list(data.get("events"), _MOST, "what it does to counters"):
            found.events.append(found._event(event))
        found.computed = [(place, found._how(how)) for place, how in computed]
        return found

    def log(self, tensors: list[torch.Tensor]) -> CounterLog:
        """The log of a call whose counters are ``tensors``."""
        log = CounterLog(tensors, [])
        log.events, log.groups = self.events, self.groups
        for event in self.events:
            if event[0] == "item":
                log.start[event[1]] = tensors[event[1]].item()
            else:
                log.written.update(dict.fromkeys(event[2], 1))
        return log

    def _event(self, data: Any) -> Any:
        last = len(self.names) - 1
        if type(data) is dict and data.keys() == {"read"}:
            return "item", as_int(data["read"], 0, last, "a counter")
        func = _WRITES.get(part_of(data, "write", str))
        if func is None:
            raise WireError("something is done to counters that optimizers do not do")
        several = part_of(data, "list", bool)
        given = as_list(data.get("counters"), _MOST, "counters")
        positions = tuple([as_int(position, 0, last, "a counter") for position in given])
        rest = tuple([_added(arg) for arg in as_list(data.get("args"), 1, "what is added")])
        kwargs = {name: number_from(arg) for name, arg in part_of(data, "kwargs", dict).items()}
        is_list = not str(func).startswith("aten.add_.")
        takes = {False, True} if not is_list else {str(func).endswith(".Tensor")}  # a tensor
        if several is not is_list or not positions or (not several and len(positions) != 1):
            raise WireError("counters are written in a way that is none")
        if len(rest) != 1 or isinstance(rest[0], torch.Tensor) not in takes or not {*kwargs} <= {"alpha"}:
            raise WireError("something is added to counters that is no number")
        if any(type(arg) not in (int, float) for arg in kwargs.values()):
            raise WireError("something is added to counters that is no number")
        return func, several, positions, rest, tuple(kwargs.items())

    def _how(self, how: Any) -> Any:
        if type(how) is list:
            return Each([self._part(part) for part in how])
        return self._part(how)

    def _part(self, data: Any) -> Any:
        if type(data) is not dict or "computed" not in data:
            return number_from(data)
        formula = FORMULAS.get(part_of(data, "computed", str))
        event = as_int(data.get("event"), 0, len(self.events) - 1, "an event")
        if formula is None or self.events[event][0] != "item":
            raise WireError("a number comes of a counter in a way that is none")
        group = {key: _group_number(value) for key, value in part_of(data, "group", dict).items()}
        try:
            formula(1.0, group)
        except (KeyError, TypeError, IndexError, ArithmeticError) as error:
            raise WireError(f"a number cannot be computed from a counter: {error}") from None
        if group not in self.groups:
            self.groups.append(group)
        return formula, self.groups.index(group), event


def _group_number(value: Any) -> Any:
    """A rate; or betas, which are between 0 and 1."""
    if type(value) is list:
        found = tuple([number_from(item) for item in as_list(value, 4, "betas")])
        if all(type(item) in (int, float) and 0 <= item < 1 for item in found):
            return found
    elif type(value) in (int, float) and math.isfinite(value):
        return value
    raise WireError("an optimizer has a number that it cannot have")


def _added(data: Any) -> Any:
    if type(data) is not dict:
        number = number_from(data)
        if type(number) not in (int, float):
            raise WireError("something is added to counters that is no number")
        return number
    number, dtype = number_from(data.get("value")), dtype_named(data.get("tensor"))
    if type(number) not in (int, float) or not dtype.is_floating_point:
        raise WireError("something is added to counters that is no number")
    return torch.tensor(number, dtype=dtype, device="cpu")
