"""The text of a saved program, read: nothing of it is taken for granted.

Operators are those of the list that workers have (``remote/worker/admitted.py``), behind the same checks of their
arguments; slots, shapes, numbers, names and random draws are in range, and what a call returns is made by the program.
Nothing is imported, evaluated or allocated for what the text says.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from marid.engine.plain import as_int, as_list, as_text, spec_from
from marid.errors import WireError
from marid.frontend import handles, random
from marid.frontend.observe import Drawn
from marid.graph.analysis import Analysis, analysis_of, forecast
from marid.graph.node import Draw, Node, Spec
from marid.graph.prepared import Prepared
from marid.graph.program import Program
from marid.remote.worker.instructions import check_numbers, read_program
from marid.replay.places import is_draw
from marid.saved.counting import Counting
from marid.saved.json_text import Numbers, part_of, parts_of, slot_of, text_from
from marid.saved.sizes import check_sizes, is_dense
from marid.saved.structure import rebuilt, value_from
from marid.semantics.scopes import Site, current_scope

_NODES = 1 << 19
_MOST = 1 << 20  # entries of a list
_NAME = 512  # the longest name of a tensor of the state


@dataclass(frozen=True)
class Argument:
    """A leaf of the arguments: a tensor with its number, which the function was given ``on_host`` or on the device, or
    a value."""

    number: int | None
    spec: Spec | None = None
    on_host: bool = False
    value: Any = None


@dataclass(frozen=True)
class Result:
    """A leaf of the results: an "output" or an "input" of the program in a slot, an "argument" by its number, a tensor
    of the "state" by its position, or a "value"."""

    kind: str
    of: Any


@dataclass(frozen=True)
class Entry:
    """A tensor that the program works on."""

    name: str
    role: str
    spec: Spec


@dataclass
class Plan:
    """A program that was read, for a device.

    ``inputs`` say where the tensor in each input slot comes from: ("argument", number), ("state", position) or
    ("constant", name). ``arguments`` and ``results`` are structures of ``Argument`` and ``Result``; ``more`` are other
    names of the state, with the name that each stands for, or None for a tensor of its own. ``numbers`` are the
    parameters, ("draw", index) among them.
    """

    name: str
    arguments: Any
    results: Any
    state: list[Entry]
    more: dict[str, str | None]
    counting: Counting
    draws: list[Drawn]
    inputs: list[tuple[str, Any]]
    numbers: list[Any]
    prepared: Prepared
    analysis: Analysis

    @classmethod
    def read(cls, text: str, device: int) -> Plan:
        """The plan of a text. Raises ``WireError``."""
        data = text_from(text)
        specs = [handles.spec_like(spec_from(one), device) for one in as_list(data.get("specs"), _MOST, "specs")]
        arguments: list[Argument] = []
        leaves = rebuilt(data.get("arguments"), lambda leaf: _argument(leaf, arguments))
        if type(leaves) is not tuple:
            raise WireError("its arguments are no tuple")
        state = [_entry(one, specs) for one in as_list(data.get("state"), _MOST, "its state")]
        names = {entry.name: index for index, entry in enumerate(state)}
        if len(names) != len(state):
            raise WireError("a name of its state is there twice")
        nodes = _Nodes(data, specs, arguments, names, state)
        results = rebuilt(data.get("results"), lambda leaf: _result(leaf, len(arguments), names))
        draws = [_drawn(one, specs, device) for one in as_list(data.get("draws"), _MOST, "its draws")]
        nodes.check_returned([leaf.of for leaf in tree_leaves(results) if leaf.kind == "input"])
        program, numbers, computed = nodes.program(text, results, len(draws))
        counting = Counting.read(part_of(data, "counters", dict), computed)
        slots = nodes.specs(program)
        check_sizes(program, slots, numbers, device)
        prepared = Prepared(program, slots, nodes.stamps(program), forecast(program, slots).nbytes)
        return cls(
            as_text(data.get("name"), _NAME, "its name"),
            leaves,
            results,
            state,
            _more(part_of(data, "more", dict), names),
            counting,
            draws,
            [nodes.sources[slot] for slot in program.input_slots],
            numbers,
            prepared,
            analysis_of(program),
        )


class _Nodes:
    """The nodes of a file as a program."""

    def __init__(
        self,
        data: dict[str, Any],
        specs: list[Spec],
        arguments: list[Argument],
        names: dict[str, int],
        state: list[Entry],
    ) -> None:
        self._arguments, self._names, self._state = arguments, names, state
        self._unique = specs
        self._by_slot: dict[int, int] = {}
        self._numbers = Numbers()
        self.sources: dict[int, tuple[str, Any]] = {}
        self._instructions: list[Any] = []
        self._targets: dict[str, int] = {}
        self._calls: list[Any] = []
        self._outputs: list[int] = []
        self._lines = [_line(one) for one in as_list(data.get("lines"), _MOST, "its lines")]
        for node in as_list(data.get("nodes"), _NODES, "its nodes"):
            kind = part_of(node, "op", str)
            if kind == "placeholder" and not self._calls:
                self._placeholder(node)
            elif kind == "call_function":
                self._call(node)
            elif kind != "output" or node is not data["nodes"][-1]:
                raise WireError(f"a node {kind[:40]!r} is none, or in a place where it cannot be")
            else:
                self._outputs = [slot_of(one) for one in as_list(node.get("args"), _MOST, "its outputs")]
        states = [source for source in self.sources.values() if source[0] == "state"]
        if len(set(states)) != len(states):  # inputs are taken to be apart
            raise WireError("a tensor of its state is an input twice")

    def _placeholder(self, node: Any) -> None:
        slot = slot_of(node.get("name"))
        spec = self._unique[self._note(slot, node.get("spec"), 0)]
        if not is_dense(spec):  # memory is made for it
            raise WireError("an input does not lie side by side in memory")
        if "argument" in node:
            number = as_int(node["argument"], 0, len(self._arguments) - 1, "an argument")
            given = self._arguments[number]
            assert given.spec is not None
            if spec.shape != given.spec.shape or (spec.dtype is not given.spec.dtype and not given.on_host):
                raise WireError("an argument is another tensor where the program takes it")
            self.sources[slot] = "argument", number
        elif "constant" in node:
            self.sources[slot] = "constant", as_text(node["constant"], _NAME, "a constant")
        else:
            position = self._names.get(as_text(node.get("state"), _NAME, "a name of the state"))
            if position is None or self._state[position].spec is not spec:
                raise WireError(f"{str(node.get('state'))[:40]!r} is not in its state, or is another tensor there")
            self.sources[slot] = "state", position

    def _call(self, node: Any) -> None:
        target = self._targets.setdefault(as_text(node.get("target"), 256, "an operator"), len(self._targets))
        args = [self._numbers.wire(arg) for arg in as_list(node.get("args"), 64, "arguments of an operator")]
        named: list[Any] = []
        for name, arg in part_of(node, "kwargs", dict).items():
            named += [name, self._numbers.wire(arg)]
        results: list[Any] = []
        for result in as_list(node.get("results"), 1 << 13, "results"):
            name, path, spec = parts_of(result, 3, "a result")
            slot = slot_of(name)
            self._note(slot, spec, -1)
            results += [slot, path]
        self._instructions.append([target, args, named, results])
        self._calls.append(as_int(node.get("line"), 0, len(self._lines) - 1, "a line"))

    def _note(self, slot: int, spec: Any, least: int) -> int:
        if slot in self._by_slot:
            raise WireError(f"the tensor %{slot} is made twice")
        self._by_slot[slot] = as_int(spec, least, len(self._unique) - 1, "a spec")
        return self._by_slot[slot]

    def program(self, text: str, results: Any, draws: int) -> tuple[Program, list[Any], list[tuple[int, Any]]]:
        """The program, its numbers, and those of them that are computed."""
        wanted = list(dict.fromkeys(one.of for one in tree_leaves(results) if one.kind == "output"))
        if wanted != self._outputs:
            raise WireError("its outputs are not those of its results")
        parts = [list(self._targets), list(self.sources), wanted, self._instructions]
        program, kinds = read_program(parts, ("saved", text))
        numbers = self._numbers.values
        for number in numbers:
            if type(number) is tuple and number[:1] == ("draw",) and number[1] >= draws:
                raise WireError("it draws random numbers that it does not say")
        check_numbers(kinds, [_NO_DRAW if is_draw(number) else number for number in numbers])
        analysis = analysis_of(program)
        if any(slot not in analysis.made_by for slot in wanted):
            raise WireError("a result is not made by it")
        roots = [analysis.roots[slot] for slot in wanted]
        whole = tuple(dict.fromkeys([*wanted, *[root for root in roots if root in analysis.made_by]]))
        return dataclasses.replace(program, output_slots=whole), numbers, self._numbers.computed

    def check_returned(self, slots: list[int]) -> None:
        """Raise ``WireError`` unless calls have tensors of their own in these slots."""
        for slot in slots:
            kind, of = self.sources.get(slot, ("nothing", None))
            if kind != "constant" and (kind != "argument" or not self._arguments[of].on_host):
                raise WireError("a result is an input that calls share")

    def specs(self, program: Program) -> tuple[Spec | None, ...]:
        """The spec of every slot."""
        indices = [self._by_slot[slot] for slot in range(program.slot_count)]
        found = tuple([None if index < 0 else self._unique[index] for index in indices])
        if any(found[slot] is None for slot in program.output_slots):
            raise WireError("it says nothing of a result")
        return found

    def stamps(self, program: Program) -> list[Node]:
        """What stands for the instructions in messages."""
        scope = current_scope()
        pairs = zip(program.instructions, self._calls, strict=True)
        return [Node(i, one.op, None, None, None, None, self._lines[at], scope) for i, (one, at) in enumerate(pairs)]


_NO_DRAW = Draw(0, 0, -1, 0, -1)


def _entry(data: Any, specs: list[Spec]) -> Entry:
    name = as_text(part_of(data, "name", str), _NAME, "a name")
    spec = specs[as_int(data.get("spec"), 0, len(specs) - 1, "a spec")]
    if not is_dense(spec):
        raise WireError(f"its state {name!r} does not lie side by side in memory")
    return Entry(name, as_text(part_of(data, "role", str), 64, "a role"), spec)


def _more(data: dict[str, Any], names: dict[str, int]) -> dict[str, str | None]:
    for name, of in data.items():
        if name in names or len(name) > _NAME or (of is not None and (type(of) is not str or of not in names)):
            raise WireError(f"{name[:40]!r} is in its state twice, or stands for nothing")
    return data


def _argument(data: dict[str, Any], tensors: list[Argument]) -> Argument:
    """A leaf of the arguments; one that is a tensor is added to ``tensors``."""
    if "tensor" not in data:
        return Argument(None, value=value_from(data))
    tensors.append(Argument(len(tensors), spec_from(data["tensor"]), part_of(data, "host", bool)))
    return tensors[-1]


def _result(data: dict[str, Any], arguments: int, names: dict[str, int]) -> Result:
    for kind in ("output", "input"):
        if len(data) == 1 and kind in data:
            return Result(kind, slot_of(data[kind]))
    if len(data) == 1 and "argument" in data:
        return Result("argument", as_int(data["argument"], 0, arguments - 1, "an argument"))
    if len(data) == 1 and "state" in data:
        position = names.get(as_text(data["state"], _NAME, "a name of the state"))
        if position is None:
            raise WireError("a result is not in its state")
        return Result("state", position)
    return Result("value", value_from(data))


def _drawn(data: Any, specs: list[Spec], device: int) -> Drawn:
    """A draw, tried on a generator that nobody has."""
    name = as_text(part_of(data, "operator", str), 256, "an operator")

    def argument(arg: Any) -> Any:
        if type(arg) is dict:
            of = specs[as_int(arg.get("spec"), 0, len(specs) - 1, "a spec")]
            return Node(0, None, None, None, of, None, None, None)
        if arg is not None and type(arg) not in (bool, int, float):
            raise WireError("a draw has an argument that it cannot have")
        return arg

    spec = specs[as_int(data.get("spec"), 0, len(specs) - 1, "a spec")]
    args = tuple([argument(arg) for arg in as_list(data.get("args"), 64, "arguments of a draw")])
    kwargs = {key: argument(arg) for key, arg in part_of(data, "kwargs", dict).items()}
    try:
        tried = random.draw(name, random.Generator(device, 0), spec, args, kwargs)
    except (AttributeError, IndexError, TypeError) as error:
        raise WireError(f"a draw of {name!r} is malformed: {error}") from None
    if tried is None:
        raise WireError(f"{name[:40]!r} draws no numbers")
    return Drawn(None, device, name, spec, args, kwargs, tried)


def _line(data: Any) -> Site | None:
    """A line of the source, which need not be there."""
    file, line, function = parts_of(data, 3, "a line")
    file, function = as_text(file, 4096, "a file"), as_text(function, 4096, "a function")
    line = as_int(line, 0, 1 << 30, "a line")
    if not file:
        return None
    code = _line.__code__.replace(co_filename=file, co_firstlineno=max(line, 1), co_qualname=function or "?")
    return Site(code, -1)  # no instruction of it: its line is the first one
