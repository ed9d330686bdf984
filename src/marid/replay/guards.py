"""Guards: the tests of numbers that a replay repeats.

A function may decide by a number that it computes: ``if new.sum() < tolerance: break``. A recording goes the way that
the Python went, and a replay is right as long as every test comes out as it did. So each is part of the recorded
program: an operator that raises where it comes out otherwise. The replay is then undone, and the Python runs.

While the function is recorded, its work stays pending, since all of it is to be one program; the number is computed
aside (``preview.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from marid.frontend import handles, random
from marid.frontend.materialize import is_sync_forbidden
from marid.frontend.observe import Drawn
from marid.graph.dispatch_state import concretely
from marid.graph.node import Node, Operation
from marid.graph.program import operation_of
from marid.replay.counters import CounterLog
from marid.replay.host import HostWatch
from marid.replay.impure import ImpureWatch
from marid.replay.places import Refused
from marid.replay.preview import Preview, is_repeatable
from marid.replay.waiting import calculate
from marid.semantics.scopes import current_scope, current_site
from marid.settings import settings

_LARGEST = 1 << 53  # whole numbers below are exact as doubles
_WORDS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "neg": "neg",
    "abs": "abs",
    "int": "",
    "float": "",
}
"""What a guard computes by itself (``waiting.calculate``), by its names in ``native/guard.cpp``, where every number is
a double."""


@functools.cache
def _operation() -> Operation:
    return operation_of(torch.ops.marid.guard.default)


def is_guard(node: Node) -> bool:
    """Whether a node stands for a test."""
    return node.op is _operation()


def outcomes_of(nodes: Iterable[Node]) -> tuple[bool, ...]:
    """How the tests among these came out when they were recorded."""
    return tuple([node.args[3] for node in nodes if is_guard(node) and node.args is not None])


def refuse_unrepeatable(nodes: list[Node]) -> None:
    """Raise ``Refused`` where a replay that is undone at a test could not undo all."""
    for node in nodes[: last_guard(nodes)]:
        if not is_repeatable(node):
            raise Refused(f"it tests a number behind an operator that may do more than it returns ({node.op})")


def last_guard(nodes: list[Node]) -> int:
    """The place of the last test among the operations of a program; 0 where there is none."""
    return max((index for index, node in enumerate(nodes) if is_guard(node)), default=0)


class _Unguarded(Exception):
    """A number that no guard can hold anything to."""


class _Test:
    """A test in postfix notation, with the tensors and the numbers that it takes."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.numbers: list[float] = []
        self.words: list[str] = []


class Guards:
    """The tests of one recording, in which ``host`` and ``impure`` watch what the function does. ``nodes`` stand for
    them among what was recorded."""

    def __init__(self, host: HostWatch, impure: ImpureWatch) -> None:
        self.nodes: list[Node] = []
        self._host, self._impure = host, impure
        self._preview = Preview()
        self._device: int | None = None

    def outcome(self, test: str, left: Any, right: Any) -> bool | None:
        """How a comparison comes out, guarded; None where the values have to be read. ``test`` is a function of
        ``operator``; each side a number, a tensor with one element, or ``(name of a function, one or two sides)``."""
        if is_sync_forbidden() or settings.memory_limit:  # which the preview would not keep to
            return None
        found = _Test()
        try:
            with self._host.paused(), self._impure.paused():
                outcome: bool = calculate(test, *[self._number(side, found) for side in (left, right)])
        except (_Unguarded, ArithmeticError):
            return None
        tensors, words = found.tensors, " ".join([*found.words, test])
        device: int = tensors[0]._value.spec.device
        if any(tensor._value.spec.device != (device if self._device is None else self._device) for tensor in tensors):
            return None
        self._device = device
        args = (tuple([tensor._value for tensor in tensors]), tuple(found.numbers), words, outcome)
        spec = handles.spec((0,), (1,), 0, torch.uint8, device)  # of what the operator returns
        sequence, site, scope = handles.tape(device).sequence, current_site(), current_scope()
        self.nodes.append(Node(next(sequence), _operation(), args, None, spec, None, site, scope))
        return outcome

    def _number(self, side: Any, test: _Test) -> Any:
        """What Python gets for a side of a comparison, which is added to ``test``."""
        if type(side) is tuple:
            function, *sides = side
            if function not in _WORDS:
                raise _Unguarded
            value = calculate(function, *[self._number(one, test) for one in sides])
            test.words += [_WORDS[function]] if _WORDS[function] else []
        elif isinstance(side, torch.Tensor):
            value = self._preview.number(side)
            if value is None:
                raise _Unguarded
            test.tensors.append(side)
            test.words.append("v")
        else:
            value = side
            test.numbers.append(float(side))
            test.words.append("n" if type(side) is float else "w")
        if type(value) is not float and abs(value) >= _LARGEST:
            raise _Unguarded
        return value

    def close(self) -> None:
        """The function has returned: forget what was computed."""
        self._preview = Preview()

    def take(self) -> list[Node]:
        """The nodes, held by nothing here any more: whoever binds them is the only one who has them."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def give_back(self, bound: list[Node]) -> None:
        """They are to be bound again, from what was bound."""
        self.nodes = [node for node in bound if is_guard(node)]


class Undo:
    """What a replay changes before its last guard, as it was: counters of the host, positions of generators, and what
    is in ``memory``."""

    def __init__(self, counters: CounterLog, draws: list[Drawn], memory: Iterable[torch.Tensor]) -> None:
        self._counters = counters.values()
        self._positions: dict[Any, tuple[Drawn, tuple[int, int, int]]] = {}
        for drawn in draws:
            with random.generator_of(drawn.generator, drawn.device) as generator:
                position = generator.seed, generator.offset, generator.spare
            self._positions.setdefault((drawn.device, id(drawn.generator)), (drawn, position))
        whole = {tensor.untyped_storage()._cdata: _bytes(tensor) for tensor in memory}
        with concretely():
            self._memory = [(one, one.clone()) for one in whole.values()]

    def counters(self) -> None:
        """Put the counters back."""
        for counter, value in self._counters:
            counter.fill_(value)

    def everything(self) -> None:
        """Put everything back."""
        self.counters()
        for drawn, position in self._positions.values():
            with random.generator_of(drawn.generator, drawn.device) as generator:
                generator.seed, generator.offset, generator.spare = position
        with concretely():
            for one, before in self._memory:
                one.copy_(before)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
