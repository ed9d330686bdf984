"""``int`` and ``float`` of values that a function under ``marid.compile`` reads."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable
from typing import Any

import pytest
import torch

import marid
from marid.replay.conversions import converting

DEVICE = "remote_accelerator"


def tokens(x: torch.Tensor) -> list[int]:
    found: list[int] = []
    for step in range(5):
        x = (x * 1.7 + step) % 11
        found.append(int(x.argmax().item()))
        if found[-1] == -1:
            break
    return found


def test_a_decoder_that_looks_for_the_end_of_its_text_is_replayed() -> None:
    compiled = marid.compile(tokens)
    for number in range(12):
        x = torch.arange(6.0) * (number + 1)
        assert compiled(x.to(DEVICE)) == tokens(x)
    assert compiled.stats().replays >= 9  # the first call may import what meta kernels need


@pytest.mark.in_process("tests of numbers are replayed where what runs is in this process")
def test_a_decoder_that_stops_early_runs_again() -> None:
    def until(x: torch.Tensor, end: int = 5) -> list[int]:
        found: list[int] = []
        for _ in range(4):
            x = (x * 3 + 1) % 7
            found.append(int(x))
            if found[-1] == end:
                break
        return found

    compiled = marid.compile(until)
    for number in [1, 1, 1, 4, 1, 4, 0, 1, 4, 4, 0, 2, 2, 1]:
        x = torch.tensor(number)
        assert compiled(x.to(DEVICE)) == until(x)
    stats = compiled.stats()
    assert stats.guard_failures > 0
    assert stats.replays >= 6


def test_numbers_are_of_pythons_types() -> None:
    def each(x: torch.Tensor, flag: torch.Tensor) -> tuple[Any, ...]:
        return int(flag), float(flag), float(x.long()), int(x.long().item()), float(x) + 1, int(x.long()) / 2

    compiled = marid.compile(each)
    for number in range(5):
        given = torch.tensor(number + 0.5), torch.tensor(number % 2 == 0)
        found, expected = compiled(*[one.to(DEVICE) for one in given]), each(*given)
        assert [(type(one), one) for one in found] == [(type(one), one) for one in expected]
    assert compiled.stats().replays == 3


def test_what_cannot_be_converted_raises_where_it_is_written() -> None:
    def whole(x: torch.Tensor) -> int:
        found = int(x)  # of a number that is none
        x.add_(1)
        return found

    compiled = marid.compile(whole)
    for _ in range(4):
        x = torch.tensor(float("nan"), device=DEVICE)
        with pytest.raises(ValueError, match="NaN"):
            compiled(x)
    several = marid.compile(lambda x: float(x))
    with pytest.raises(ValueError, match="only one element tensors"):
        several(torch.ones(3, device=DEVICE))
    assert marid.compile(lambda x: int("11", base=2) + int("3") + x)(torch.ones(1, device=DEVICE)).item() == 7.0


def test_names_that_are_not_pythons_are_left_alone() -> None:
    space: dict[str, Any] = {"int": lambda _: "mine"}
    exec("def function(x):\n    return int(x.sum())", space)
    compiled = marid.compile(space["function"])
    assert [compiled(torch.ones(2, device=DEVICE)) for _ in range(3)] == ["mine"] * 3

    def local(x: torch.Tensor) -> Any:
        float = str
        return float(x.dim())

    assert marid.compile(local)(torch.ones(2, device=DEVICE)) == "1"


def _with_many_names() -> Callable[..., Any]:
    names = "\n".join(f"    x = x + name_{index}" for index in range(300))
    lines = (
        f"def function(x):\n{names}\n    found = [float(x.sum())]\n    return found, float(found[-1]) * {{}}, int(7.5)"
    )
    space: dict[str, Any] = {f"name_{index}": index / 64 for index in range(300)}
    exec(lines.format("+".join(f"{index}.25" for index in range(5))), space)
    return space["function"]


def _in_a_comprehension(x: torch.Tensor) -> Any:
    return [float(one) for one in x], {key: int(one.long()) for key, one in zip("ab", x, strict=False)}


class _Counter:
    def __init__(self) -> None:
        self.scale = 2.0

    def read(self, x: torch.Tensor) -> float:
        return float((x * self.scale).sum())


@pytest.mark.parametrize(
    "function",
    [_with_many_names(), _in_a_comprehension, _Counter().read, torch.no_grad()(tokens)],
    ids=["many names", "a comprehension", "a method", "a decorated function"],
)
def test_functions_of_other_kinds(function: Callable[..., Any]) -> None:
    compiled = marid.compile(function)
    for number in range(4):
        x = torch.arange(4.0) + number
        assert repr(compiled(x.to(DEVICE))) == repr(function(x))
    assert compiled.stats().replays == 2


def test_code_is_what_it_was_after_each_block() -> None:
    def function(fails: bool) -> float:
        if fails:
            raise ValueError
        return float(3)

    code = function.__code__
    with converting(function):
        changed = function.__code__
        assert changed is not code
        assert changed.co_linetable == code.co_linetable
        assert len(changed.co_code) == len(code.co_code)
        assert [one.argval for one in dis.get_instructions(changed) if one.opname == "LOAD_GLOBAL"] == ["ValueError"]
        with converting(function):
            assert function(False) == 3.0
        assert function.__code__ is changed
    assert function.__code__ is code
    with pytest.raises(ValueError), converting(function):
        function(True)
    assert function.__code__ is code
    compiled = marid.compile(function)
    compiled(False)
    assert function.__code__ is code
    with converting(len), converting(None):
        assert builtins.int(2.5) == 2
