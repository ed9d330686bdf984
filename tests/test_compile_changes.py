"""``marid.compile``: what Python can change between two calls, however it is named, is seen at the next one."""

from __future__ import annotations

import contextvars
import sys
import threading
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import marid
from tests.helpers import DEVICE

K = 1.0
MODULE: Any = types.ModuleType("marid_tests_changing")
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def values() -> Iterator[None]:
    _set_all(1.0)
    sys.modules[MODULE.__name__] = MODULE
    yield
    _set_all(1.0)
    del sys.modules[MODULE.__name__]


def _set_all(value: float) -> None:
    global K
    K = MODULE.K = LOCAL.K = value
    VARIABLE.set(value)


def _with_import(x: Tensor) -> Tensor:
    import marid_tests_changing  # pyright: ignore[reportMissingImports]

    return x * marid_tests_changing.K


def _with_import_of_a_name(x: Tensor) -> Tensor:
    from marid_tests_changing import K as k  # pyright: ignore[reportMissingImports]

    return x * k


_LOOKING: dict[str, Step] = {
    "import": _with_import,
    "from import": _with_import_of_a_name,
    "getattr": lambda x: x * getattr(MODULE, "K" + ""),
    "vars": lambda x: x * vars(MODULE)["K"],
    "globals": lambda x: x * globals()["K"],
    "eval": lambda x: x * eval("K"),
    "variable of a context": lambda x: x * VARIABLE.get(),
    "variable of a thread": lambda x: x * LOCAL.K,
}


@pytest.mark.parametrize("name", _LOOKING)
def test_names_that_are_looked_up(name: str) -> None:
    compiled, x = marid.compile(_LOOKING[name]), torch.ones(1, device=DEVICE)
    found = []
    for value in (1.0, 5.0):
        _set_all(value)
        found += [compiled(x).item() for _ in range(4)]
    assert found == [1.0] * 4 + [5.0] * 4
    assert compiled.stats().replays >= (0 if "thread" in name else 4)


class _Base:
    k = 2.0

    def factor(self) -> float:
        return self.k


class _Mapping(UserDict[str, float]):
    gain = 1.0


class _Dict(dict[str, float]):
    gain = 1.0


class _List(list[float]):
    gain = 1.0


def _changes() -> dict[str, tuple[Step, Callable[[], None]]]:
    """Functions that give 2, and what has them give 7."""

    class Derived(_Base):
        pass

    class Other(_Base):
        def factor(self) -> float:
            return 7.0

    def defaults(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    def named(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return x * factor

    def code(x: Tensor) -> Tensor:
        return x * 2.0

    def inner(factor: float = 2.0) -> float:
        return factor

    one, other = Derived(), _Base()
    mapping, entries, numbers = _Mapping(w=2.0), _Dict(w=2.0), _List([2.0])
    weight: Any = torch.ones(1, device=DEVICE)
    parameter: Any = Parameter(torch.ones(1, device=DEVICE))
    host: Any = torch.ones(1)
    weight.gain = host.gain = 2.0
    return {
        "defaults": (defaults, lambda: setattr(defaults, "__defaults__", (7.0,))),
        "named defaults": (named, lambda: setattr(named, "__kwdefaults__", {"factor": 7.0})),
        "code": (code, lambda: setattr(code, "__code__", (lambda x: x * 7.0).__code__)),
        "defaults inside": (lambda x: x * inner(), lambda: setattr(inner, "__defaults__", (7.0,))),
        "an attribute of a class": (lambda x: x * Derived.k, lambda: setattr(Derived, "k", 7.0)),
        "a method of a class": (lambda x: x * one.factor(), lambda: setattr(Derived, "factor", lambda _: 7.0)),
        "the class": (lambda x: x * other.factor(), lambda: setattr(other, "__class__", Other)),
        "an attribute of a mapping": (lambda x: x * mapping["w"] * mapping.gain, lambda: setattr(mapping, "gain", 3.5)),
        "an attribute of a dict": (lambda x: x * entries["w"] * entries.gain, lambda: setattr(entries, "gain", 3.5)),
        "an attribute of a list": (lambda x: x * numbers[0] * numbers.gain, lambda: setattr(numbers, "gain", 3.5)),
        "an attribute of a tensor": (lambda x: x * weight * weight.gain, lambda: setattr(weight, "gain", 7.0)),
        "an attribute of a CPU tensor": (lambda x: x * host.to(DEVICE) * host.gain, lambda: setattr(host, "gain", 7.0)),
        "a new attribute of a parameter": (
            lambda x: (x * parameter * getattr(parameter, "gain", 2.0)).detach(),
            lambda: setattr(parameter, "gain", 7.0),
        ),
    }


@pytest.mark.parametrize("name", _changes())
def test_changes(name: str) -> None:
    function, change = _changes()[name]
    compiled, x = marid.compile(function), torch.ones(1, device=DEVICE)
    found = [compiled(x).item() for _ in range(4)]
    change()
    found += [compiled(x).item() for _ in range(4)]
    assert found == [2.0] * 4 + [7.0] * 4
    assert compiled.stats().replays == 4


def test_attributes_of_arguments() -> None:
    def function(x: Any) -> Tensor:
        return (x * getattr(x, "gain", 1.0) * (2.0 if isinstance(x, Parameter) else 1.0)).detach()

    compiled = marid.compile(function)
    found = []
    for gain in (None, 3.0, 4.0):
        for made in (
            lambda: torch.ones(1, device=DEVICE, requires_grad=True),
            lambda: Parameter(torch.ones(1, device=DEVICE)),
        ):
            for _ in range(3):
                x: Any = made()
                if gain is not None:
                    x.gain = gain
                found.append(compiled(x).item())
    assert found == [1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [6.0] * 3 + [4.0] * 3 + [8.0] * 3
    assert compiled.stats().replays == 6


def test_results_that_are_parameters() -> None:
    compiled = marid.compile(lambda x: Parameter(x * 2))
    for _ in range(6):
        found = compiled(torch.ones(2, device=DEVICE))
        assert isinstance(found, Parameter)
        assert found.is_leaf
        assert found.requires_grad
    [reason] = compiled.stats().fallbacks
    assert "Parameter" in reason


def test_a_global_in_place_of_a_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = marid.compile(lambda x: x * max(1.0, 2.0)), torch.ones(1, device=DEVICE)
    assert [compiled(x).item() for _ in range(4)] == [2.0] * 4
    monkeypatch.setitem(globals(), "max", lambda *_: 7.0)
    assert [compiled(x).item() for _ in range(4)] == [7.0] * 4
    assert compiled.stats().replays == 4


def test_empty_ranges_that_are_equal() -> None:
    compiled, x = marid.compile(lambda x, numbers: x * numbers.start), torch.ones(1, device=DEVICE)
    assert [compiled(x, range(start, 0)).item() for start in (0, 0, 0, 5, 5, 5, 0)] == [0, 0, 0, 5, 5, 5, 0]
    assert compiled.stats().replays == 3
