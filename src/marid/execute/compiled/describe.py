"""A part as plain data: what a worker is sent, what the cache on disk is keyed by, and what a run must fit.

A description names everything that was compiled in: operators, types, sizes, strides, numbers that are no inputs. Every
integer that came with different values is an *expression* ``{"e": [k, [symbols], c]}``, k times the product of the
symbols plus c. A run fits a compiled part when its own description is the same but for integers in the place of
expressions, and these agree on what the symbols are.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from marid.execute.compiled.arguments import name_of, plain, plain_constant
from marid.execute.compiled.eligibility import is_row_product
from marid.execute.compiled.partition import Partition, Specs, arguments_of
from marid.graph.node import Spec
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot
from marid.ops.facts import facts_of

Description = dict[str, Any]


def describe(part: Partition, program: Program, specs: Specs, params: list[Any]) -> Description:
    """``part`` with these shapes and parameters. Slots are numbered anew: equal parts of two programs are equal."""
    slots = {slot: index for index, slot in enumerate(part.inputs)}
    numbers = {(number.param, number.element): index for index, number in enumerate(part.numbers)}

    def value_of(value: Any) -> Any:
        if isinstance(value, Slot):
            return {"slot": slots[value.index]}
        if isinstance(value, ListOf):
            return {"list": [None if isinstance(i, Constant) else {"slot": slots[i.index]} for i in value.items]}
        if isinstance(value, Param):
            given = params[value.index]
            if (value.index, None) in numbers:
                return {"number": numbers[value.index, None]}
            if (value.index, 0) in numbers:
                return {"numbers": [numbers[value.index, element] for element in range(len(given))]}
            return {"baked": [plain(n) for n in given] if isinstance(given, tuple) else plain(given)}
        return plain_constant(value.value)

    instructions = []
    for instruction in program.instructions[part.start : part.stop]:
        operation = instruction.op.func
        described = {
            "op": facts_of(operation).marked_name.partition("::")[2],
            "overload": operation._overloadname,
            "args": {name: value_of(value) for name, value in arguments_of(instruction)},
            "row": is_row_product(instruction.op, _tensors(instruction, specs)),
        }
        results = []
        for result in instruction.results:
            slots[result.slot] = len(slots)
            results.append({"path": list(result.path), "slot": slots[result.slot], **_geometry(specs[result.slot])})
        instructions.append({**described, "results": results})
    return {
        "inputs": [
            {**_geometry(specs[slot]), "written": written, "base": base, "offset": _offset(part, specs, position)}
            for position, (slot, written, base) in enumerate(zip(part.inputs, part.written, part.bases, strict=True))
        ],
        "numbers": [name_of(number.dtype) for number in part.numbers],
        "instructions": instructions,
        "outputs": [slots[slot] for slot in part.outputs],
    }


def _tensors(instruction: Instruction, specs: Specs) -> list[Spec]:
    """The specs of the tensors that are arguments of their own."""
    given = [specs[value.index] for _, value in arguments_of(instruction) if isinstance(value, Slot)]
    return [spec for spec in given if spec is not None]


def _geometry(spec: Spec | None) -> dict[str, Any]:
    assert spec is not None
    return {"size": list(spec.shape), "stride": list(spec.stride), "dtype": name_of(spec.dtype)}


def geometry_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What a description says of a result: data, in which sizes may become expressions, without what is the same for
    all that can be compiled."""
    return {"size": list(tensor.shape), "stride": list(tensor.stride()), "dtype": name_of(tensor.dtype)}


def _offset(part: Partition, specs: Specs, position: int) -> int:
    """Where in its base an input begins."""
    own, base = specs[part.inputs[position]], specs[part.inputs[part.bases[position]]]
    assert own is not None
    assert base is not None
    return own.offset - base.offset if part.bases[position] >= 0 else 0


# --- symbols -------------------------------------------------------------------------------------------------------


def generalize(descriptions: list[Description]) -> tuple[Description, int] | None:
    """One description for several of the same part, and how many symbols it has; None where more than integers differ.

    A symbol stands for a size; what is a multiple of one, or of a product of some, is an expression of them.
    """
    vectors: set[tuple[int, ...]] = set()
    if not _collect(descriptions, vectors):
        return None
    symbols: list[tuple[int, ...]] = []
    for vector in sorted(vectors):
        if _fit(vector, symbols) is None:
            symbols.append(vector)
    return _merge(descriptions, symbols), len(symbols)


def solve(general: Description, concrete: Description, count: int) -> tuple[int, ...] | None:
    """What the symbols of ``general`` are in ``concrete``; None when that is something else."""
    found: dict[int, int] = {}
    pending: list[tuple[list[Any], int]] = []
    if not _same(general, concrete, pending):
        return None
    for (factor, symbols, offset), value in pending:
        if factor == 1 and len(symbols) == 1 and offset == 0:
            found.setdefault(symbols[0], value)
    if len(found) != count:
        return None
    values = tuple(found[index] for index in range(count))
    return values if all(_evaluate(expression, values) == value for expression, value in pending) else None


def _evaluate(expression: list[Any], values: tuple[int, ...]) -> int:
    factor, symbols, offset = expression
    for symbol in symbols:
        factor *= values[symbol]
    return factor + offset


def _collect(items: list[Any], vectors: set[tuple[int, ...]]) -> bool:
    first = items[0]
    if isinstance(first, dict):
        return all(isinstance(i, dict) and i.keys() == first.keys() for i in items) and all(
            _collect([item[key] for item in items], vectors) for key in first
        )
    if isinstance(first, list):
        return all(isinstance(i, list) and len(i) == len(first) for i in items) and all(
            _collect(list(column), vectors) for column in zip(*items, strict=True)
        )
    if all(type(item) is int for item in items):
        if len(set(items)) > 1:
            vectors.add(tuple(items))
        return True
    return all(type(item) is type(first) and item == first for item in items)


def _merge(items: list[Any], symbols: list[tuple[int, ...]]) -> Any:
    first = items[0]
    if isinstance(first, dict):
        return {key: _merge([item[key] for item in items], symbols) for key in first}
    if isinstance(first, list):
        return [_merge(list(column), symbols) for column in zip(*items, strict=True)]
    if len(set(items)) == 1:
        return first
    return {"e": _fit(tuple(items), symbols)}


def _fit(vector: tuple[int, ...], symbols: list[tuple[int, ...]]) -> list[Any] | None:
    """``vector`` as an expression of ``symbols``."""
    for length in (1, 2, 3):
        for chosen in itertools.combinations_with_replacement(range(len(symbols)), length):
            product = [1] * len(vector)
            for index in chosen:
                product = [a * b for a, b in zip(product, symbols[index], strict=True)]
            if len(set(product)) < 2:
                continue
            factor, rest = divmod(vector[0], product[0]) if product[0] else (0, 1)
            if not rest and factor and all(factor * p == v for p, v in zip(product, vector, strict=True)):
                return [factor, list(chosen), 0]
            offset = vector[0] - product[0]
            if length == 1 and all(p + offset == v for p, v in zip(product, vector, strict=True)):
                return [1, list(chosen), offset]
    return None


def _same(general: Any, concrete: Any, pending: list[tuple[list[Any], int]]) -> bool:
    if isinstance(general, dict):
        if "e" in general:
            pending.append((general["e"], concrete))
            return type(concrete) is int
        return (
            isinstance(concrete, dict)
            and general.keys() == concrete.keys()
            and all(_same(value, concrete[key], pending) for key, value in general.items())
        )
    if isinstance(general, list):
        return (
            isinstance(concrete, list)
            and len(general) == len(concrete)
            and all(_same(a, b, pending) for a, b in zip(general, concrete, strict=True))
        )
    return type(general) is type(concrete) and general == concrete
