"""What is known before an instruction of a function's bytecode, of the stack and of variables (``value_flow.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What an entry of the stack or a variable may be: what stands for a number or another value, a container that holds
# such, and anything else. A container that the function has made, or the `append` of one, is a pair of ``MADE`` or
# ``APPEND`` and the offset of the instruction that made it; what may be called, a pair of ``CALLEE`` and a name.
OTHER, NUMBER, VALUE, HOLDER = "other", "number", "value", "holder"
MADE, APPEND, CALLEE = "made", "append", "callee"
Kind = frozenset[Any]
NOTHING: Kind = frozenset([OTHER])


@dataclass
class State:
    """What is known before an instruction: the top of the stack, variables that are something, and whether something
    was called since the value was read."""

    stack: list[Kind]
    variables: dict[str, Kind]
    called: bool

    def copy(self) -> State:
        return State([*self.stack], {**self.variables}, self.called)

    def pop(self, count: int) -> list[Kind]:
        self.reach(count)
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def reach(self, count: int) -> None:
        self.stack[:0] = [NOTHING] * (count - len(self.stack))  # what was there before

    def joined(self, other: State) -> State:
        depth = max(len(self.stack), len(other.stack))
        self.reach(depth)
        other.reach(depth)
        stack = [a | b for a, b in zip(self.stack, other.stack, strict=True)]
        names = {*self.variables, *other.variables}
        variables = {n: self.variables.get(n, NOTHING) | other.variables.get(n, NOTHING) for n in names}
        return State(stack, variables, self.called or other.called)
