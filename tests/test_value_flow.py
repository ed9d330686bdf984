"""Random functions that read values and do something with them: under ``marid.compile`` they return what they return.

What becomes of a value is found in bytecode (``replay/value_flow.py``). A use that is missed meets an object that
stands for the value, and raises or returns something else.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import marid

DEVICE = "remote_accelerator"

_READS = ["x.sum().item()", "(x * 2).mean().item()", "x.tolist()", "x[0].item()", "y.item()", "(x + y).cpu().tolist()"]
_NUMBERS = ["1", "2.5", "-1", "len(x)", "limit"]
_SIGNS = ["+", "-", "*", "/", "//", "**"]
_TESTS = ["<", "<=", ">", ">=", "==", "!="]


class Source:
    """The text of a random function of ``x`` (three numbers), ``y`` (one) and ``limit``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.loops = 0
        for _ in range(self.random.randint(1, 6)):
            self.statement(1)
        self.add(1, f"return {self.result()}")
        self.text = "def function(x, y, limit, box):\n    a = b = 0.0\n    c, d = [], {}\n" + "\n".join(self.lines)

    def add(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def read(self) -> str:
        return self.pick(*_READS)

    def number(self) -> str:
        """Something that is mostly a number."""
        return self.pick(
            *("a", "b", "a", "b"),
            *_NUMBERS,
            "x.sum().item()",
            "y.item()",
            "(x[1] * y).item()",
            "(c[-1] if c else 0)",
            "float(y)",
            "int(y.long())",
            "float(x.sum())",
        )

    def value(self) -> str:
        """Something that may be anything."""
        return self.pick(
            *(self.number(), self.number(), self.read(), self.read()),
            f"{self.number()} {self.pick(*_SIGNS[:4])} {self.number()}",
            f"[{self.number()}, {self.read()}]",
            f"({self.read()}, {self.number()})",
            f"{{'k': {self.read()}}}",
            "[row.item() for row in x.unbind()]",
            "{name: row.item() for name, row in zip('abc', x.unbind())}",
            f"{self.number()} if {self.test()} else {self.number()}",
            f"f'{{{self.number()}}}'",
            f"round({self.number()}, 3)",
            f"abs({self.number()})",
            f"max({self.number()}, {self.number()})",
            f"[*{self.pick('x.tolist()', 'c', '[a, b]')}, {self.number()}]",
            f"-{self.number()}",
            f"float({self.number()})",
            f"{self.pick('int', 'float')}({self.pick(self.number(), 'x.sum()', 'y', 'y.long()', 'y.long().item()')})",
            f"int(y.long().item()) {self.pick(*_SIGNS[:4])} {self.number()}",
            "[float(row) for row in x]",
            f"c[{self.pick('0', '-1', '1:', 'len(c) - 1')}] if c else 0",
            "d.get('one', 0) if not d else d[[*d][0]]",
            f"(lambda: {self.number()})()",
            f"(box := {self.number()})",
            f"sorted([{self.number()}, {self.number()}])",
            f"{self.number()} {self.pick(*_SIGNS)} 2",
            "(not a)",
            "a or b",
            "str(a)",
        )

    def test(self) -> str:
        return self.pick(
            f"{self.number()} {self.pick(*_TESTS)} {self.number()}",
            f"{self.pick('x.sum()', 'y', '(x + 1).sum().item()')} {self.pick(*_TESTS)} {self.number()}",
            f"0 < {self.number()} < 5",
            "(x > limit).any()",
            "y",
            "a",
            "c",
            "len(c) > 1",
            "(c and type(c[-1]) is float and c[-1] > 1)",
            "int(y.long()) == 2",
            f"not ({self.number()})",
            f"{self.number()} is None",
            f"{self.number()} > 0 and {self.number()} < 3",
            f"abs({self.number()} {self.pick(*_SIGNS[:4])} {self.number()}) {self.pick(*_TESTS)} {self.number()}",
            f"-{self.number()} {self.pick(*_TESTS)} abs({self.number()})",
        )

    def statement(self, depth: int) -> None:
        kind = self.random.randrange(18 if depth < 3 else 10)
        if kind < 3:
            self.add(depth, f"{self.pick('a', 'b')} = {self.number()}")
        elif kind == 3:
            self.add(depth, f"a {self.pick('+', '-', '*')}= {self.pick(self.number(), 'y.item()')}")
        elif kind == 4:
            self.add(depth, f"c.append({self.value()})")
        elif kind == 5:
            self.add(depth, f"d[{self.pick(repr('one'), repr('two'), 'len(d)')}] = {self.value()}")
        elif kind == 6:
            self.add(depth, self.pick("x = x * 0.5", "x.add_(1)", "y = y + x[0]", "y.mul_(0.5)", "x = x - y"))
        elif kind == 7:
            self.add(
                depth, self.pick("a, b = b, a", "c = [a, *c]", "del d", "c, d = [], {}", "box.append(a)", "a = len(c)")
            )
            if self.lines[-1].endswith("del d"):
                self.add(depth, "d = {}")
        elif kind == 8:
            self.add(depth, f"b = {self.value()}")
            self.add(
                depth, "b = b if type(b) is float else 1.0" if self.random.random() < 0.5 else "c.append(b); b = 2.0"
            )
        elif kind == 9:
            self.add(depth, f"c.{self.pick('append(a)', 'insert(0, b)', 'extend([a, b])', 'clear()', 'reverse()')}")
        elif kind in (10, 11):
            self.loops += 1
            self.add(depth, f"for i{self.loops} in range({self.pick('2', '3')}):")
            self.block(depth + 1)
            if self.random.random() < 0.3:
                self.add(depth + 1, f"if {self.test()}: {self.pick('break', 'continue')}")
            if self.random.random() < 0.2:
                self.add(depth, "else:")
                self.block(depth + 1)
        elif kind in (12, 13, 14):
            self.add(depth, f"if {self.test()}:")
            self.block(depth + 1)
            if self.random.random() < 0.5:
                self.add(depth, "else:")
                self.block(depth + 1)
        elif kind == 15:
            self.add(depth, "with torch.no_grad():")
            self.block(depth + 1)
        elif kind == 16:
            self.add(depth, "try:")
            self.block(depth + 1)
            self.add(depth, self.pick("except ZeroDivisionError:", "finally:"))
            self.add(depth + 1, self.pick("a = 1.0", "c.append(b)", "d = {}"))
        else:
            self.add(depth, f"if {self.test()}: return {self.result()}")

    def block(self, depth: int) -> None:
        for _ in range(self.random.randint(1, 2)):
            self.statement(depth)

    def result(self) -> str:
        return self.pick(
            "a", "a, b", "[a, b, c]", "c, d", "{'a': a, 'c': c}", "[*c, a]", "x, a", "d", "c", "len(c), a", "(b)"
        )

    def function(self) -> Callable[..., Any]:
        space: dict[str, Any] = {"torch": torch}
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            exec(self.text, space)  # the text is made here
        return space["function"]


def called(function: Callable[..., Any], x: float, y: float, limit: float, device: str) -> Any:
    """What a call returns or raises, and what it leaves in its arguments."""
    tensors = torch.tensor([x, x / 2 + 1, -x]).to(device), torch.tensor(y).to(device)
    box: list[Any] = []
    try:
        found = function(*tensors, limit, box)
    except Exception as error:
        found = type(error).__name__
    return repr(plain([found, box, *tensors]))


def plain(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.tolist()
    if isinstance(thing, dict):
        return {plain(key): plain(value) for key, value in thing.items()}
    return type(thing)(map(plain, thing)) if isinstance(thing, (list, tuple)) else thing


def compare(seed: int) -> int:
    """Whether the function of a seed returns on the device what it returns on the CPU; how many calls were replays."""
    source = Source(seed)
    eager, compiled = source.function(), marid.compile(source.function())
    chosen = random.Random(seed)
    for _ in range(9):
        given = chosen.choice([1.0, 1.0, 1.0, 3.0]), chosen.choice([0.5, 0.5, 2.0]), 1.5
        expected, found = called(eager, *given, "cpu"), called(compiled, *given, DEVICE)
        assert found == expected, f"seed {seed}, {given}: {compiled.stats()}\n{source.text}"
    return compiled.stats().replays


@pytest.mark.parametrize("first", range(0, 300, 75))
def test_random_functions(first: int) -> None:
    assert sum(map(compare, range(first, first + 75))) > 50


@pytest.mark.conformance
@pytest.mark.parametrize("first", range(1000, 21000, 1000))
def test_many_random_functions(first: int) -> None:
    assert sum(map(compare, range(first, first + 1000))) > 700
