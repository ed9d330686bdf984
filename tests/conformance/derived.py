"""Derived rules held against the CPU's kernels, at the sizes of a call and at others of the same pattern."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from marid.frontend import derive, handles, infer
from marid.graph.node import Node, Output, Spec, Value

VARIANTS = 3
_OTHER_SIZES = range(2, 40)

Recorded = tuple[tuple[Any, ...], Any, tuple[Value, ...]]


@contextmanager
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside, whatever is derived is compared; what was compared is counted, what differs is added to the list."""
    found = Found()
    original = derive.Derivation.__call__
    choice = random.Random(0)

    def spy(self: Any, recorder: Any, key: Any, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]) -> Any:
        known = original(self, recorder, key, args, kwargs, values)
        if known is not None:
            calls: list[Recorded | None] = [(args, kwargs, values)]
            calls += [_resized(self._sizes, args, kwargs, values, choice) for _ in range(VARIANTS)]
            for call in calls:
                if call is not None:
                    found.note(self, recorder, call)
        return known

    with monkeypatch.context() as patch:
        patch.setattr(derive.Derivation, "__call__", spy)
        yield found


class Found(list[str]):
    """What differs; ``compared`` counts the comparisons, by operator."""

    def __init__(self) -> None:
        self.compared: dict[str, int] = {}

    def note(self, derivation: Any, recorder: Any, call: Recorded) -> None:
        rule = derivation.rule(recorder, *call)
        if rule is None:  # it would be inferred
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ran, seen = infer.probe(derive._request(recorder, *call), rule)
        name = str(recorder.func)
        self.compared[name] = self.compared.get(name, 0) + (seen is not None)
        shown = [value.spec for value in call[2]], call[0], call[1]
        if not ran:
            self.append(f"{name} of {shown} is refused by the CPU")
        elif seen is not None and seen != rule:
            self.append(f"{name} of {shown}: {_specs(rule)} on the CPU is {_specs(seen)}")


def _specs(rule: infer.Rule) -> list[Spec | None]:
    return [out.spec for out in rule.outs]


def _resized(
    sizes: set[Any], args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...], choice: random.Random
) -> Recorded | None:
    """The same call with other sizes, equal ones equal; None where strides do not allow it."""
    others: dict[int, int] = {}

    def size(of: int) -> int:
        if of > 1 and of not in others:
            others[of] = choice.choice([n for n in _OTHER_SIZES if n not in others.values()][:8])
        return others.get(of, of)

    resized: dict[Value, Value] = {}
    for value in values:
        assert value.spec is not None
        shape = tuple([size(n) for n in value.spec.shape])
        stride = _strides(value.spec, shape)
        if stride is None:
            return None
        of = value.spec
        spec = handles.spec(shape, stride, of.offset, of.dtype, of.device, of.conj, of.neg)
        resized[value] = Node(0, None, None, None, spec, None, None, None)

    def place(arg: Any, is_size: bool) -> Any:
        if isinstance(arg, (Node, Output)):
            return resized[arg]
        if type(arg) is tuple:
            return tuple([place(item, is_size) for item in arg])
        return others.get(arg, arg) if is_size and type(arg) is int else arg

    placed = tuple([place(arg, index in sizes) for index, arg in enumerate(args)])
    named = kwargs and tuple([(name, place(arg, name in sizes)) for name, arg in kwargs])
    return placed, named, tuple([resized[value] for value in values])


def _strides(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides with the order and the gaps of those of ``spec``."""
    stride = [0] * len(shape)
    inner: int | None = None
    for dim in sorted((d for d in range(len(shape)) if spec.stride[d]), key=lambda d: (spec.stride[d], -d)):
        if inner is None:
            stride[dim] = spec.stride[dim]
        else:
            filled = spec.stride[inner] * spec.shape[inner]
            if filled == 0 or spec.stride[dim] % filled:
                return None
            stride[dim] = stride[inner] * shape[inner] * (spec.stride[dim] // filled)
        inner = dim
    return tuple(stride)
