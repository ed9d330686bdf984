"""A program: a cut made canonical, so that the same work recorded again is recognised and not rebuilt.

Grammar of a program::

    program     ::= instruction*                        in program order
    instruction ::= operation argument* (name argument)* result*
    argument    ::= slot | parameter | constant | list
    list        ::= argument*                           tensors and Nones; lists of numbers are one parameter
    result      ::= path slot

Slots number the tensors: inputs (concrete before the run) and results, in order of first appearance. Numbers, lists of
numbers and random positions are parameters: they are passed to each run by position, one for every place where one
occurs, so a new learning rate is not a new program and equal values are never confused. What decides which kernel runs
(booleans, dtypes, strings) is a constant and part of the key.

The key is the whole structure, not a digest of it: two programs are the same only when every element is equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from marid.graph.node import Draw, Node, Operation, Output, Spec, Value, failures, finish, raise_failure
from marid.graph.python_operator import PythonOperator
from marid.graph.tape import Tape
from marid.native import module
from marid.ops.facts import facts_of

if TYPE_CHECKING:
    from marid.graph.analysis import Analysis

_LIFTED = (int, float, complex, Draw)


class _Runs(threading.local):
    """Of a thread: how many runs of programs it is in, one inside of another. A kernel in Python may begin one."""

    depth = 0


runs = _Runs()


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor: an input or the result of an earlier instruction."""

    index: int


@dataclass(frozen=True, slots=True)
class Param:
    """A number, a list of numbers or a random position, given anew at each run."""

    index: int
    draw: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is part of the program."""

    value: Any


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list with tensors (or None) in it."""

    items: tuple[Any, ...]


def filled(
    arg: Any,
    tensor: Callable[[int], Any],
    number: Callable[[Param], Any],
    listed: Callable[[list[Any]], Any] = tuple,
    constant: Callable[[Any], Any] | None = None,
) -> Any:
    """An argument of an instruction with what these make of the slots, parameters, lists and constants in it."""
    kind = type(arg)
    if kind is Slot:
        return tensor(arg.index)
    if kind is Param:
        return number(arg)
    if kind is ListOf:
        return listed([filled(item, tensor, number, listed, constant) for item in arg.items])
    return arg.value if constant is None else constant(arg.value)


@dataclass(frozen=True, slots=True)
class Result:
    """A result that is used, and where it is in the operator's return value."""

    path: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call of an operator: positional and named arguments, and the results that are used."""

    op: Operation
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Result, ...]

    def operands(self) -> list[Any]:
        """All arguments, those in lists one by one."""
        given = (*self.args, *[value for _, value in self.kwargs])
        return [item for arg in given for item in (arg.items if isinstance(arg, ListOf) else (arg,))]


@dataclass(frozen=True, slots=True)
class Program:
    """Canonical straight-line work, free of tensor identities."""

    key: tuple[Any, ...]
    instructions: tuple[Instruction, ...]
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    slot_count: int
    analysis: Analysis | None = field(default=None, init=False, repr=False, compare=False)
    """Of what it does to memory, once somebody has asked ``analysis_of``."""


class Task:
    """A cut bound to its program: what to run, on what, and where the results go.

    ``nodes`` in program order; ``inputs`` are buffers, ``params`` the lifted numbers; ``slots`` maps every
    value of the cut to its slot; ``outputs`` are the values that outlive the run, in the program's output order.
    ``specs`` has the spec of every tensor, by slot: with the program, all that decides how much memory a run takes.
    ``timing`` belongs to the executor (``report/operator_times.py``).
    """

    __slots__ = (
        "escaping",
        "input_slots",
        "inputs",
        "key",
        "key_parts",
        "nodes",
        "outputs",
        "params",
        "results",
        "slots",
        "specs",
        "timing",
    )

    between = None
    """Runs of what was recorded in this process are not left for others."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.key: tuple[Any, ...] = ()
        self.key_parts: list[Any] = []
        self.inputs: list[Any] = []
        self.input_slots: list[int] = []
        self.params: list[Any] = []
        self.slots: dict[Value, int] = {}
        self.specs: tuple[Spec | None, ...] = ()
        self.results: list[list[Output] | None] = []
        self.outputs: list[Value] = []
        self.escaping: set[int] = set()
        self.timing: Any = None

    def resolve(self) -> None:
        """Take the inputs again, now that none is in the making any more."""
        if all(isinstance(buffer, torch.Tensor) for buffer in self.inputs):
            return
        values = list(self.slots)
        self.inputs = [values[slot].concrete for slot in self.input_slots]

    def build(self) -> Program:
        """Make the program of this task; done once per key."""
        counter = _Counter()
        instructions = []
        for node, outs in zip(self.nodes, self.results, strict=True):
            assert node.op is not None
            assert node.args is not None
            args = tuple(self._argument(a, counter) for a in node.args)
            kwargs = tuple((name, self._argument(a, counter)) for name, a in node.kwargs or ())
            if outs is None:
                results: tuple[Result, ...] = (Result((), self.slots[node]),)
            else:
                results = tuple(Result(o.path, self.slots[o]) for o in outs)
            instructions.append(Instruction(node.op, args, kwargs, results))
        outputs = tuple(self.slots[value] for value in self.outputs)
        return Program(self.key, tuple(instructions), tuple(self.input_slots), outputs, len(self.slots))

    def _argument(self, arg: Any, counter: _Counter) -> Any:
        kind = type(arg)
        if kind is Node or kind is Output:
            return Slot(self.slots[arg])
        if kind in _LIFTED:
            return Param(counter.take(), kind is Draw)
        if kind is tuple:
            if _is_numbers(arg):
                return Param(counter.take(), False)
            return ListOf(tuple(self._argument(a, counter) for a in arg))
        return Constant(arg)


def deliver(task: Task, results: list[torch.Tensor]) -> None:
    """Give the values of a task their tensors; its nodes have run."""
    for value, tensor in zip(task.outputs, results, strict=True):
        value.concrete = tensor
    for node in task.nodes:
        finish(node)


class _Counter:
    def __init__(self) -> None:
        self.value = 0

    def take(self) -> int:
        self.value += 1
        return self.value - 1


def _is_numbers(items: Sequence[Any]) -> bool:
    for item in items:
        kind = type(item)
        if kind is not int and kind is not float and kind is not bool:
            return False
    return True


def bind(nodes: list[Node]) -> Task:
    """Number the tensors of a cut, compute its key, and find which results outlive it.

    A result outlives the run when something outside of the cut refers to it: a tensor of the user, autograd, or a
    pending node that was not chosen. That is exactly what CPython's reference count says beyond the references that
    the cut itself holds; an unknown extra reference only keeps a result that could have been dropped.
    """
    task = Task(nodes)
    module.bind(task, nodes)
    return task


def operation_of(func: Any, target: Any = None) -> Operation:
    """The operation of an operator overload, which calls ``target`` in its place if there is one; a new one at each
    call."""
    facts = facts_of(func)
    kind = PythonOperator if facts.in_python else Operation
    return kind(func, facts.mutates, facts.view, target)


def differ(a: Any, b: Any) -> bool:
    """Whether two numbers of runs are not the very same: 1 is not 1.0, and 0.0 is not -0.0. Random positions always
    differ."""
    if a is b:
        return False
    kind = type(a)
    if kind is not type(b) or kind is Draw:
        return True
    return a != b if kind is int else repr(a) != repr(b)


module.configure_cuts(Node=Node, Output=Output, Tape=Tape, failures=failures, raise_failure=raise_failure)
module.configure_binding(Task=Task, Draw=Draw)
