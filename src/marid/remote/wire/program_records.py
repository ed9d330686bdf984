"""Programs as plain data, named by digest.

A body is ``[[operator names], [input slots], [output slots], [instruction, ...]]``, an instruction
``[operator index, [argument, ...], [name, argument, ...], [slot, path..., ...]]``. Arguments: a slot is its number; "p"
is the next number of the run, "g" the next random position; lists are themselves, and so are constants as
``engine/plain.py`` writes them. A program travels once, compressed, and is then named by the digest of its body, and
so do geometries: the spec of every slot, ``[[spec, ...], [index by slot, ...]]``. ``worker/program_reader.py`` reads
both.
"""

from __future__ import annotations

import zlib
from typing import Any

import blake3

from marid.engine.plain import constant_to, spec_to
from marid.errors import WireError
from marid.graph.node import Spec
from marid.graph.program import Program, filled
from marid.remote.wire.codec import pack_plain

DIGEST_BYTES = 32
BODY_BYTES = 8 << 20
"""The longest body of a program or a geometry."""


def digest_of(body: Any) -> bytes:
    """What a body is named by: BLAKE3 of all of it."""
    return blake3.blake3(body).digest()


def packed(body: bytes) -> bytes:
    """A body as it travels: compressed by zlib, which leaves a half of it or less."""
    return zlib.compress(body)


def unpacked(data: Any) -> bytes:
    """The body that ``data`` is of. Takes no more memory than a body may have. Raises ``WireError``."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(data, BODY_BYTES + 1)
    except zlib.error as error:
        raise WireError(f"a body cannot be decompressed: {error}") from None
    if len(body) > BODY_BYTES:
        raise WireError(f"a body has more than the {BODY_BYTES} bytes that it may have")
    if not stream.eof or stream.unused_data:
        raise WireError("a body ends too early, or has something behind it")
    return body


def body_of(program: Program) -> bytes:
    """The body of a program. Raises ``WireError`` for one with a constant that cannot be sent."""
    names: dict[str, int] = {}
    instructions = []
    for instruction in program.instructions:
        named: list[Any] = []
        for name, arg in instruction.kwargs:
            named += [name, _argument_to(arg)]
        results: list[Any] = []
        for result in instruction.results:
            results += [result.slot, list(result.path)]
        index = names.setdefault(str(instruction.op.func), len(names))
        instructions.append([index, [_argument_to(arg) for arg in instruction.args], named, results])
    return pack_plain([list(names), list(program.input_slots), list(program.output_slots), instructions])


def _argument_to(arg: Any) -> Any:
    return filled(arg, int, lambda param: "g" if param.draw else "p", list, constant_to)


def geometry_of(specs: tuple[Spec | None, ...]) -> bytes:
    """The body of the specs of all slots of a program."""
    unique: dict[Spec, int] = {}
    indices = [-1 if spec is None else unique.setdefault(spec, len(unique)) for spec in specs]
    return pack_plain([[spec_to(spec) for spec in unique], indices])


def changes_between(
    before: tuple[Spec | None, ...], after: tuple[Spec | None, ...]
) -> tuple[tuple[int, Spec], ...] | None:
    """The specs that have others in their place, by their number among the different ones of ``before``; None where
    slots with equal specs before have different ones after."""
    places: dict[Spec, int] = {}
    found: dict[Spec, Spec] = {}
    for old, new in zip(before, after, strict=True):
        if old is None or new is None:
            if old is not new:
                return None
            continue
        places.setdefault(old, len(places))
        if found.setdefault(old, new) is not new:
            return None
    return tuple([(places[old], new) for old, new in found.items() if old is not new])


def changed(before: tuple[Spec | None, ...], changes: tuple[tuple[int, Spec], ...]) -> tuple[Spec | None, ...]:
    """What ``changes_between`` was given second."""
    unique: dict[Spec, int] = {}
    for spec in before:
        if spec is not None:
            unique.setdefault(spec, len(unique))
    other = dict(changes)
    return tuple([None if spec is None else other.get(unique[spec], spec) for spec in before])
