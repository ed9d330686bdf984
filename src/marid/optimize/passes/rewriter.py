"""A program as an FX graph, and what a pass may know and do about it.

Placeholders are the program's inputs (``t3``: the tensor of slot 3), its numbers (``c5``: parameter 5) and constants
that passes have made (``k7``); calls are ATen operators in program order, views and in-place writes as they were
recorded; several results are taken apart by ``getitem``. ``node.meta`` has

* ``slot``: the tensor that a node stands for; new nodes get new slots;
* ``spec``: its geometry and type, and ``val``, a meta tensor, where a registered pass may want it;
* ``index``: the instruction whose place in the program the node takes, never falling from node to node.

One program serves all sizes and numbers. A graph is made for the specs of one run and is kept for runs with the very
same specs, so specs are facts. Numbers are not: a pass that asks for one (``Rewriter.number``, ``Rewriter.same``) makes
the answer a *guard*, and a run where it does not hold takes another way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from marid.graph import operators
from marid.graph.node import Operation, Spec
from marid.graph.program import Constant, ListOf, Param, Program, Slot

if TYPE_CHECKING:
    from marid.optimize.passes.storages import Storages

__all__ = [
    "Guards",
    "Rewriter",
    "is_draw",
    "op_of",
    "operation_of",
    "overloads",
    "pure",
    "shared_with",
    "slot_of",
    "written_by",
]

_operations: dict[Any, Operation] = {}


@dataclass
class Guards:
    """What must hold for the numbers of a run: parameters that have a value, and pairs that are equal."""

    values: dict[int, Any] = field(default_factory=dict)
    pairs: dict[tuple[int, int], None] = field(default_factory=dict)

    def failing(self, params: list[Any]) -> tuple[set[int], set[tuple[int, int]]]:
        """The parameters and pairs for which it does not hold."""
        values = {index for index, value in self.values.items() if not identical(params[index], value)}
        return values, {(a, b) for a, b in self.pairs if not identical(params[a], params[b])}

    def hold(self, params: list[Any]) -> bool:
        for index, value in self.values.items():
            if not identical(params[index], value):
                return False
        return all(identical(params[a], params[b]) for a, b in self.pairs)


def identical(a: Any, b: Any) -> bool:
    """Whether two numbers or lists of numbers are the same in type and bits; any NaN is as good as another."""
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


class Rewriter:
    """The graph of one program with the specs and numbers of one run, and how passes change it.

    ``varying`` are numbers, ``unequal`` pairs of numbers, that are known to change: nothing is concluded from them.
    ``storages`` is about the graph before passes that bring in operations; those that share it keep it up to date.
    """

    storages: Storages

    def __init__(
        self,
        program: Program,
        specs: tuple[Spec | None, ...],
        params: list[Any],
        varying: set[int],
        unequal: set[tuple[int, int]],
        with_val: bool,
    ) -> None:
        self.program = program
        self.params = params
        self.guards = Guards()
        self.aliases: dict[int, int] = {}
        self.graph = fx.Graph()
        self.slot_count = program.slot_count
        self._varying = varying
        self._unequal = unequal
        self._build(specs, with_val)

    # --- what is known ---------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[fx.Node]:
        """The operations in program order; the one at hand, and later ones, may be changed meanwhile."""
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                yield node

    def outputs(self) -> list[fx.Node]:
        """The nodes whose values outlive the program."""
        return list(self.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    def number(self, arg: Any) -> Any:
        """The number, or tuple of numbers, behind an argument, made a guard; None where it is not known.

        Numbers, texts and types that are written in the graph are returned as they are.
        """
        if not isinstance(arg, fx.Node):
            return tuple(arg) if isinstance(arg, (list, tuple)) else arg
        index = arg.meta.get("param")
        if index is None or arg.meta["draw"] or index in self._varying:
            return None
        value = self.params[index]
        self.guards.values[index] = value
        return value

    def is_number(self, arg: Any, *values: Any) -> bool:
        """Whether an argument is one of ``values``; a guard only if it is."""
        if isinstance(arg, fx.Node) and "param" not in arg.meta:
            return False
        value = self.peek(arg)
        if isinstance(value, (int, float)) and any(value == v for v in values):
            return not isinstance(value, bool) and self.number(arg) is not None
        return False

    def peek(self, arg: Any) -> Any:
        """The number of this run, without making it a guard; None for tensors and generators."""
        if isinstance(arg, fx.Node):
            index = arg.meta.get("param")
            return None if index is None or arg.meta["draw"] else self.params[index]
        return arg

    def same(self, a: Any, b: Any) -> bool:
        """Whether two numbers are and stay the same; a guard if they are."""
        if a is b:
            return True
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            value = b if isinstance(a, fx.Node) else a
            return identical(self.peek(a), self.peek(b)) and identical(
                self.number(a if isinstance(a, fx.Node) else b), value
            )
        i, j = sorted((a.meta.get("param", -1), b.meta.get("param", -1)))
        if i < 0 or (i, j) in self._unequal or not identical(self.params[i], self.params[j]):
            return False
        self.guards.pairs[i, j] = None
        return True

    # --- what can be done ------------------------------------------------------------------------------------------

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let every reader of ``node`` read ``by``, which has the same value then, and take ``node`` out."""
        self.aliases[slot_of(node)] = slot_of(by)
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def rewrite(self, node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> None:
        """Compute the value of ``node`` by another operator."""
        node.target = target
        node.args = args
        node.kwargs = kwargs

    def insert(self, before: fx.Node, target: Any, args: tuple[Any, ...], spec: Spec, **kwargs: Any) -> fx.Node:
        """A new operation in the place of ``before``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        self._describe(node, self.new_slot(), spec, before.meta["index"])
        return node

    def constant(self, tensor: torch.Tensor, spec: Spec) -> fx.Node:
        """A tensor that is held with the program and never written."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"k{self.slot_count}")
        node.meta["constant"] = tensor
        self._describe(node, self.new_slot(), spec, -1)
        return node

    def new_slot(self) -> int:
        """A slot that the program does not use yet."""
        self.slot_count += 1
        return self.slot_count - 1

    def complete(self) -> None:
        """Give what was made with plain FX a place and a slot. Raises ``TypeError`` for what calls no operator."""
        index = len(self.program.instructions) - 1
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("placeholder", "output"):
                continue
            if node.op != "call_function":
                raise TypeError(f"{node} is no call of an operator")
            index = node.meta.setdefault("index", index)
            parts = [user for user in node.users if user.target is operator.getitem]
            if "slot" in node.meta or "operation" in node.meta or parts:
                continue
            if node.target is operator.getitem or op_of(node).func._schema.returns:
                node.meta["slot"], node.meta["spec"] = self.new_slot(), None

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self, specs: tuple[Spec | None, ...], with_val: bool) -> None:
        self._with_val = with_val
        items: dict[int, fx.Node] = {}
        numbers: dict[int, fx.Node] = {}
        for slot in self.program.input_slots:
            items[slot] = self.graph.placeholder(f"t{slot}")
            self._describe(items[slot], slot, specs[slot], -1)
        for param in _params(self.program):
            if param.index not in numbers:
                numbers[param.index] = self.graph.placeholder(f"c{param.index}")
                numbers[param.index].meta.update(param=param.index, draw=param.draw, index=-1)

        def convert(arg: Any) -> Any:
            if isinstance(arg, Slot):
                return items[arg.index]
            if isinstance(arg, Param):
                return numbers[arg.index]
            if isinstance(arg, ListOf):
                return [convert(item) for item in arg.items]
            return arg.value

        for index, instruction in enumerate(self.program.instructions):
            whole = [result for result in instruction.results if not result.path]
            name = f"t{whole[0].slot}" if whole else f"call_{index}"
            call = self.graph.create_node("call_function", instruction.op.func, (), {}, name)
            call.args = tuple([convert(arg) for arg in instruction.args])  # set here, they are not searched for SymInts
            if instruction.kwargs:
                call.kwargs = {name: convert(arg) for name, arg in instruction.kwargs}
            call.meta["index"] = index
            call.meta["operation"] = instruction.op
            for result in instruction.results:
                item = call
                for step in result.path:
                    item = self.graph.call_function(operator.getitem, (item, step))
                    item.meta["index"] = index
                self._describe(item, result.slot, specs[result.slot], index)
                items[result.slot] = item
        self.graph.output(tuple(items[slot] for slot in self.program.output_slots))

    def _describe(self, node: fx.Node, slot: int, spec: Spec | None, index: int) -> None:
        meta = node.meta
        meta["slot"], meta["spec"], meta["index"] = slot, spec, index
        if self._with_val and spec is not None:
            meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _params(program: Program) -> Iterator[Param]:
    for instruction in program.instructions:
        for arg in instruction.args:
            if type(arg) is Param:
                yield arg
        for _, arg in instruction.kwargs:
            if type(arg) is Param:
                yield arg


# --- about nodes ---------------------------------------------------------------------------------------------------


def slot_of(node: fx.Node) -> int:
    """The slot of a tensor."""
    return node.meta["slot"]


def is_draw(arg: Any) -> bool:
    """Whether an argument is a position in a random stream."""
    return isinstance(arg, fx.Node) and bool(arg.meta.get("draw"))


def op_of(node: fx.Node) -> Operation:
    """The operation that a node calls."""
    operation = node.meta.get("operation")
    return operation if operation is not None and operation.func is node.target else operation_of(node.target)


def operation_of(func: Any) -> Operation:
    """The operation of an overload that a pass has brought in. Raises ``TypeError`` for anything else."""
    if not isinstance(func, torch._ops.OpOverload):
        raise TypeError(f"{func} is not an operator overload such as torch.ops.aten.mul.Tensor")
    found = _operations.get(func)
    if found is None:
        found = _operations[func] = operators.operation_of(func)
    return found


def pure(node: fx.Node) -> bool:
    """Whether an operation only computes its results from its arguments: no writes, nothing random, nothing checked."""
    op = op_of(node)
    if op.mutates or not op.func._schema.returns or torch.Tag.nondeterministic_seeded in op.func.tags:
        return False
    return not any(is_draw(arg) for arg in (*node.args, *node.kwargs.values()))


def written_by(node: fx.Node, op: Operation) -> list[Any]:
    """The arguments of a call that the operation writes; all of them where nobody knows which."""
    given = _given(node, op)
    written = [arg for arg, writes in zip(given, operators.written_arguments(op.func), strict=True) if writes]
    return [arg for arg in written or given if arg is not None and not isinstance(arg, Constant)]


def shared_with(node: fx.Node, op: Operation, path: list[int]) -> fx.Node | None:
    """The argument of a call in whose memory a result lies, given the result's place in what the call returns."""
    shared = operators.shared_arguments(op.func)
    which, *element = path if len(shared) > 1 else (0, *path)
    position = shared[which] if shared else None
    arg = None if position is None else _given(node, op)[position]
    if isinstance(arg, (list, tuple)) and element:
        arg = arg[element[0]]
    return arg if isinstance(arg, fx.Node) else None


def _given(node: fx.Node, op: Operation) -> list[Any]:
    """The arguments of a call by position in the schema; None for those that are left out."""
    return [
        node.args[i] if i < len(node.args) else node.kwargs.get(formal.name)
        for i, formal in enumerate(op.func._schema.arguments)
    ]


def overloads(*names: str) -> set[Any]:
    """Operators of ATen by name (``"mul.Tensor"``), those that this PyTorch has."""
    found = set()
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is not None and (overload or "default") in packet.overloads():
            found.add(getattr(packet, overload or "default"))
    return found
