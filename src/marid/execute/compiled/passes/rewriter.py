"""A part as an FX graph, and what a pass may know and do about it.

Placeholders are the part's inputs (``input2``) and the numbers that it is given at each run (``number5``). Calls are
ATen operators in program order, views and in-place writes as they were recorded; several results are taken apart by
``getitem``. ``node.meta["val"]`` is a meta tensor with size, strides and type of the run at hand.

Numbers are not facts: one that a pass asks for (``Rewriter.number``) becomes part of the code, which then is for runs
with that number.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from marid.execute.compiled.arguments import dtype_named, plain, plain_constant
from marid.execute.compiled.describe import Description, geometry_of
from marid.execute.compiled.eligibility import is_row_product
from marid.execute.compiled.part_graph import PartGraph
from marid.graph.node import Operation, Spec
from marid.graph.program import operation_of
from marid.ops.facts import facts_of

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Rewriter:
    """The graph of a part with the sizes and numbers of one run, and how passes change it.

    ``numbers`` are what the part is given beside tensors. Nothing is concluded from those at the positions ``varying``,
    which came with other values before. ``relied`` are the positions of those that passes have asked for.
    """

    def __init__(self, description: Description, numbers: list[Any], varying: set[int]) -> None:
        self.relied: set[int] = set()
        self._description = description
        self._numbers = numbers
        self._varying = varying
        self._bases: dict[fx.Node, fx.Node] = {}
        self._described: dict[fx.Node, _Call] = {}  # what calls were when their ``val`` was found out
        self.graph = self._build()
        self.recorded_outputs = [look(node) for node in self.outputs()]
        self.recorded_writes = self.writes()

    # --- what is known ---------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[fx.Node]:
        """The operations in program order; the one at hand, and later ones, may be changed meanwhile."""
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                yield node

    def outputs(self) -> list[fx.Node]:
        """The nodes whose values leave the part."""
        return list(self.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    def writes(self) -> list[Any]:
        """The operators that write, in program order."""
        return [node.target for node in self.calls() if op_of(node).mutates]

    def base_of(self, node: fx.Node) -> fx.Node:
        """The input that another one is a view of; any other node itself."""
        return self._bases.get(node, node)

    def number(self, arg: Any) -> Any:
        """The number behind an argument, which becomes part of the code; None where it is not known.

        Numbers, lists of numbers (as tuples), texts and types that are written in the graph are returned as they are.
        """
        if not isinstance(arg, fx.Node):
            return tuple(arg) if isinstance(arg, (list, tuple)) else arg
        position = arg.meta.get("number")
        if position is None or position in self._varying:
            return None
        self.relied.add(position)
        return self._numbers[position]

    def is_number(self, arg: Any, *values: Any) -> bool:
        """Whether an argument is one of ``values``; only then it becomes part of the code."""
        if isinstance(arg, fx.Node) and "number" not in arg.meta:
            return False
        value = self.peek(arg)
        if isinstance(value, (int, float)) and any(value == v for v in values):
            return not isinstance(value, bool) and self.number(arg) is not None
        return False

    def peek(self, arg: Any) -> Any:
        """The number of this run, of which nothing may be concluded; None for tensors."""
        if isinstance(arg, fx.Node):
            position = arg.meta.get("number")
            return None if position is None else self._numbers[position]
        return arg

    # --- what can be done ------------------------------------------------------------------------------------------

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let every reader of ``node`` read ``by``, which has the same value then, and take ``node`` out."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def rewrite(self, node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> None:
        """Compute the value of ``node`` by another operator."""
        node.target = target
        node.args = args
        node.kwargs = kwargs
        self._look_at(node)

    def insert(self, before: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """A new operation in front of another one, or (with ``operator.getitem``) one of several results."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        self._look_at(node)
        return node

    def complete(self) -> None:
        """Find out what the results are of what was changed with plain FX. Raises ``TypeError`` for what calls no
        operator, and what a meta kernel raises."""
        renewed: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op != "call_function":
                raise TypeError(f"{node} is no call of an operator")
            if self._described.get(node) == _call(node) and renewed.isdisjoint(node.all_input_nodes):
                continue
            if node.target is not operator.getitem:
                op_of(node)
            before = look(node)
            self._look_at(node)
            if before is None or before != look(node):
                renewed.add(node)

    def description(self) -> Description:
        """The part as its graph is now."""
        recorded = self._description
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and "number" not in node.meta]
        slots = {node: slot for slot, node in enumerate(inputs)}
        instructions = []
        for node in self.calls():
            op = op_of(node)
            args = {name: self._value(arg, slots) for name, arg in _named(node, op).items()}
            given = [_spec(arg) for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
            results = []
            for path, item in results_of(node):
                slots[item] = len(slots)
                results.append({"path": path, "slot": slots[item], **geometry_of(self._val(item))})
            instructions.append(
                {
                    "op": facts_of(op.func).marked_name.partition("::")[2],
                    "overload": op.func._overloadname,
                    "args": args,
                    "row": is_row_product(op, [spec for spec in given if spec is not None]),
                    "results": results,
                }
            )
        outputs = [slots[node] for node in self.outputs()]
        return {
            "inputs": recorded["inputs"],
            "numbers": recorded["numbers"],
            "instructions": instructions,
            "outputs": outputs,
        }

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self) -> fx.Graph:
        recorded = self._description
        part = PartGraph(recorded)
        part.add_inputs(range(len(recorded["inputs"])))
        for node, shape in zip(list(part.items.values()), recorded["inputs"], strict=True):
            if shape["base"] >= 0:
                self._bases[node] = part.items[shape["base"]]
        for position, node in enumerate(part.numbers):
            node.meta["number"] = position
        part.add_calls()
        results = [result for instruction in recorded["instructions"] for result in instruction["results"]]
        for slot, shape in [*enumerate(recorded["inputs"]), *[(result["slot"], result) for result in results]]:
            size, stride, dtype = shape["size"], shape["stride"], dtype_named(shape["dtype"])
            part.items[slot].meta["val"] = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        self._described = {node: _call(node) for node in part.graph.nodes if node.op == "call_function"}
        return part.graph

    def _look_at(self, node: fx.Node) -> None:
        """Find out what the result of a call is."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._val)
        node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        self._described[node] = _call(node)

    def _val(self, node: fx.Node) -> Any:
        if "number" in node.meta:
            return self._numbers[node.meta["number"]]
        if "val" not in node.meta:  # several results of a recorded call
            self._look_at(node)
        return node.meta["val"]

    def _value(self, arg: Any, slots: dict[fx.Node, int]) -> dict[str, Any]:
        """An argument as a description has it. Raises ``TypeError``."""
        if isinstance(arg, fx.Node):
            return {"number": arg.meta["number"]} if "number" in arg.meta else {"slot": slots[arg]}
        if isinstance(arg, (list, tuple)):
            nodes = [item for item in arg if isinstance(item, fx.Node)]
            if nodes and all("number" in node.meta for node in nodes):
                return {"numbers": [node.meta["number"] for node in nodes]}
            if nodes:
                return {"list": [None if item is None else self._value(item, slots) for item in arg]}
            return {"baked": [plain(item) for item in arg]}
        return {"baked": plain(arg)} if type(arg) in (int, float) else plain_constant(arg)


def _spec(node: fx.Node) -> Spec | None:
    val = val_of(node)
    return None if val is None else Spec(tuple(val.shape), val.stride(), 0, val.dtype, 0)


def _call(node: fx.Node) -> _Call:
    return node.target, node.args, node.kwargs


def _named(node: fx.Node, op: Operation) -> dict[str, Any]:
    formals = op.func._schema.arguments
    return {**{formal.name: arg for formal, arg in zip(formals, node.args, strict=False)}, **node.kwargs}


def results_of(node: fx.Node) -> list[tuple[list[int], fx.Node]]:
    """The tensors that a call returns, as far as anybody has taken them, with where they are in what it returns."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [([], node)]
    found: list[tuple[list[int], fx.Node]] = []
    for user in node.users:
        if user.target is operator.getitem:
            step: Any = user.args[1]
            found += [([step, *path], item) for path, item in results_of(user)]
    return found


# --- about nodes ---------------------------------------------------------------------------------------------------


def val_of(node: Any) -> torch.Tensor | None:
    """The meta tensor of a node that stands for a tensor; None for anything else."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def look(node: fx.Node) -> tuple[Any, ...] | None:
    """Size, strides and type of a tensor; None for anything else."""
    val = val_of(node)
    return None if val is None else (val.shape, val.stride(), val.dtype)


def op_of(node: fx.Node) -> Operation:
    """The operation that a node calls. Raises ``TypeError`` for what is no overload of an operator."""
    return _operation_of(node.target)


@functools.cache
def _operation_of(func: Any) -> Operation:
    if not isinstance(func, torch._ops.OpOverload):
        raise TypeError(f"{func} is not an operator overload such as torch.ops.aten.mul.Tensor")
    return operation_of(func)


def written_by(node: fx.Node, op: Operation) -> list[Any]:
    """The arguments of a call that the operation writes; all of them where nobody knows which."""
    given = _given(node, op)
    written = [arg for arg, writes in zip(given, facts_of(op.func).written, strict=True) if writes]
    return [arg for arg in written or given if arg is not None]


def shared_with(node: fx.Node, op: Operation, path: list[Any]) -> fx.Node | None:
    """The argument of a call in whose memory a result lies, given the result's place in what the call returns."""
    shared = facts_of(op.func).shared
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
