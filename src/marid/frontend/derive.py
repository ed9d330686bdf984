"""Rules for new sizes, without the cost of inferring them.

Where a kernel in C++ tells what an operator returns (``native/derive.cpp``), or a function in ``rules.py`` does, that
is asked for each new call, in microseconds. It is believed once a probe (``infer.py``) has agreed with it for a call of
the same *pattern*: equal but for sizes. A pattern keeps what kernels branch on: operator, dtypes, number of dimensions,
which sizes are 0 and 1, the order of strides, and all constants that are no sizes; of operators that write in place
and return that, also which sizes are equal. Where a probe has disagreed, or the kernel raises, the call is inferred as
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from marid import policy
from marid.frontend import handles, infer
from marid.frontend.foreach_rules import for_each
from marid.frontend.rules import rules, same_as
from marid.frontend.smaller import Smaller, sizes_of
from marid.frontend.spared_imports import SizesAreNumbers
from marid.graph.arguments import leaves, map_leaves
from marid.graph.node import Node, Output, Spec, Value, root_of
from marid.native import module

if TYPE_CHECKING:
    from marid.frontend.known import Known
    from marid.frontend.record import Recorder


def deriver_of(recorder: Recorder) -> Derivation | None:
    """What derives the calls of an operator: given the recorder, key, arguments as recorded, and the values among them,
    it gives what is known of them, or None. Itself None where there is no such thing."""
    rule = rules.get(recorder.func) or for_each(recorder.func)
    if rule is not None:
        # Autograd gives an undefined tensor for a gradient that nobody has asked for; rules are about tensors.
        tensors = [place for place, one in enumerate(recorder.func._schema.arguments) if str(one.type) == "Tensor"]

        def derived(args: tuple[Any, ...], kwargs: Any) -> Any:
            if any(args[place] is None for place in tensors if place < len(args)):
                return NotImplemented
            return rule(*args, **dict(kwargs or ()))

        return Derivation(recorder, derived)
    if recorder.facts.asks_for_more:
        return None
    func, translated = same_as.get(recorder.func, (recorder.func, None))
    number = module.derives(func._schema.name, func._schema.overload_name)
    if number < 0:
        return None
    mutates = recorder.op.mutates
    if translated is not None:
        return Derivation(
            recorder, lambda args, kwargs: module.derive(number, *translated(*args, **dict(kwargs or ())), mutates)
        )
    return Derivation(recorder, lambda args, kwargs: module.derive(number, args, kwargs, mutates))


class Derivation:
    """How calls of one operator are derived, and the patterns for which that was right, or was not."""

    __slots__ = ("_returned", "_returns_given", "_sizes", "_trusted")

    def __init__(self, recorder: Recorder, returned: Callable[[Any, Any], Any]) -> None:
        self._returned = returned
        returns = recorder.func._schema.returns
        self._returns_given = all(one.alias_info is not None and one.alias_info.is_write for one in returns)
        self._trusted: dict[Any, bool] = {}
        self._sizes = sizes_of(recorder.func)

    def __call__(
        self, recorder: Recorder, key: Any, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]
    ) -> Known | None:
        devices = {value.spec.device for value in values if value.spec is not None}
        if len(devices) != 1:
            return None
        if recorder.op.mutates and len({id(root_of(value)) for value in values}) < len(values):
            return None  # writes overlap, perhaps
        pattern = self._pattern(len(args), key)
        trusted = self._trusted.get(pattern)
        rule = None if trusted is False else self.rule(recorder, args, kwargs, values)
        if rule is None:
            return None
        if trusted is None:
            trusted = self._confirmed(recorder, rule, args, kwargs, values)
            if len(self._trusted) >= policy.PATTERNS_PER_OPERATOR:
                self._trusted.clear()
            self._trusted[pattern] = trusted
        return recorder.learn(key, rule, args, kwargs, devices.pop()) if trusted else None

    def distrust(self, count: int, key: Any) -> None:
        """Calls of the pattern of this key, which have so many positional arguments, are derived no more."""
        self._trusted[self._pattern(count, key)] = False

    def rule(
        self, recorder: Recorder, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]
    ) -> infer.Rule | None:
        """The rule of a call; None where it cannot be derived."""
        with SizesAreNumbers():
            described = self._returned(args, kwargs)
        if described is NotImplemented:
            return None
        rule = infer.Rule()
        rule.returns = _returns(rule, described, [value.spec for value in values], recorder.op.view, ())
        return rule

    def _pattern(self, count: int, key: Any) -> Any:
        """The pattern of calls with this key, which have so many positional arguments."""
        sizes = self._sizes
        parts = [_blurred(part, index in sizes) for index, part in enumerate(key[:count])]
        for name, part in zip(key[count::2], key[count + 1 :: 2], strict=True):
            parts += name, _blurred(part, name in sizes)
        if self._returns_given:  # so a kernel may have looked at no size
            parts.append(_equal_sizes(key))
        return tuple(parts)

    def _confirmed(
        self, recorder: Recorder, rule: infer.Rule, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]
    ) -> bool:
        """Whether probes agree with the rule of a call. Large calls are judged by what the same does with small sizes,
        where that means anything, else as they are."""
        request = _request(recorder, args, kwargs, values)
        ran, seen = infer.probe(request, rule)
        if not ran or seen is not None:
            return ran and seen == rule
        small = Smaller(self._sizes).call(args, kwargs, values)
        expected = self.rule(recorder, *small)
        if expected is not None:
            rule, request = expected, _request(recorder, *small)
        ran, seen = infer.probe(request, rule, whole=True)  # many small tensors are large together
        return ran and (seen is None or seen == rule)


def _request(recorder: Recorder, args: tuple[Any, ...], kwargs: Any, values: tuple[Value, ...]) -> infer.Request:
    device = values[0].spec.device  # pyright: ignore[reportOptionalMemberAccess]
    return recorder.request(args, kwargs, values, [values.index(value) for value in values], device)


def _blurred(part: Any, is_size: bool) -> Any:
    """A part of a key without its sizes."""

    def blur(leaf: Any) -> Any:
        if type(leaf) is Spec:
            return leaf.kind or _kind(leaf)
        return max(-2, min(leaf, 2)) if is_size and type(leaf) is int else leaf

    return map_leaves(blur, part)


def _equal_sizes(key: Any) -> tuple[int, ...]:
    """Which of the sizes of all tensors in a key are equal."""
    seen: dict[int, int] = {}
    sizes = [size for leaf in leaves(key) if type(leaf) is Spec for size in leaf.shape]
    return tuple([seen.setdefault(size, len(seen)) for size in sizes])


def _kind(spec: Spec) -> Any:
    shape, stride = spec.shape, spec.stride
    # A dimension of size 1 can have any stride: some kernels keep it, some compute it, some leave such dimensions out.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim] if stride[dim] else 0))
    gaps = _gaps(spec, order), _gaps(spec, [dim for dim in order if shape[dim] > 1])
    sizes = tuple([min(size, 2) for size in shape])
    expanded = tuple([step == 0 for step in stride])
    spec.kind = spec.dtype, sizes, tuple(order), expanded, gaps, spec.is_contiguous, spec.conj, spec.neg
    return spec.kind


def _gaps(spec: Spec, order: Sequence[int]) -> tuple[int, ...]:
    """For each dimension and the next inner one: could they be one (0), is there a gap (1), or do they overlap (-1).
    A dimension without elements is stepped over as one of size 1: so strides are computed."""
    steps = [spec.stride[outer] - spec.stride[inner] * max(spec.shape[inner], 1) for outer, inner in pairwise(order)]
    steps += [spec.stride[order[-1]] - 1] if order else []
    return tuple([(step > 0) - (step < 0) for step in steps])


def _returns(rule: infer.Rule, described: Any, specs: Sequence[Any], view: bool, path: tuple[int, ...]) -> Any:
    """What ``rule`` returns, from a description as of ``native/derive.cpp``; its results are added to the rule."""
    if described is None:
        return None
    if type(described) is list:
        return [_returns(rule, part, specs, view, (*path, index)) for index, part in enumerate(described)]
    if type(described) is int:
        out = infer.OutSpec(path, specs[described], same_as=described)
        rule.outs.append(out)
        return out
    shape, stride, offset, dtype, conj, neg = described
    spec = handles.spec(shape, stride, offset, dtype, specs[0].device, conj, neg)
    out = infer.OutSpec(path, spec, 0 if view else None)
    if not view:
        rule.nbytes += spec.nbytes
    rule.outs.append(out)
    return out


module.configure_deriving(Node, Output, Spec)
