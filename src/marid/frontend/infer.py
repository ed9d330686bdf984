"""What an operation returns, found without running it on the user's data.

For every new combination of operator, input specs and constants the operator runs twice: on meta tensors, and (where it
is cheap) on small or shrunk CPU tensors of the same geometry filled with ones. The meta run predicts; the *probe* keeps
it honest: it corrects strides and dtypes where a meta kernel differs from the CPU kernel, and it raises what eager
PyTorch raises. Large calls are tried with small sizes, and as they are where those mean nothing or the two disagree on
them. The answer is a ``Rule``, cached by the caller.

When the two disagree on shapes, which can depend on the made-up values, or nothing can be predicted, the rule says
``eager``: the operation then runs on its real inputs. So a wrong meta kernel costs time and never a wrong answer.

Kernels of operators that users define may count, print or draw, and are never probed. A meta kernel of theirs is taken
at its word until a result was laid out otherwise (``corrections.py``): the operator runs at once with other sizes then.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._meta_registrations  # Python meta kernels

from marid import policy
from marid.engine.protocol import other_layout
from marid.frontend import handles
from marid.frontend.smaller import Smaller, sizes_of
from marid.frontend.spared_imports import SizesAreNumbers
from marid.graph.arguments import placed
from marid.graph.dispatch_state import concretely
from marid.graph.node import Spec, Value, root_of
from marid.ops.facts import facts_of

# Operators a result of which was laid out otherwise than recorded.
_DISTRUSTED: set[Any] = set()


def _arange(*bounds: Any, dtype: torch.dtype | None = None, device: torch.device, **options: Any) -> torch.Tensor:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    whole, real = (all(isinstance(bound, kinds) for bound in (start, end, step)) for kinds in (int, (int, float)))
    if not real or not (whole or dtype is None or dtype.is_floating_point):  # its kernel rounds first
        return torch.ops.aten.arange.start_step(start, end, step, dtype=dtype, device=device, **options)
    count = -((start - end) // step) if whole else math.ceil((end - start) / step)
    default = torch.int64 if whole else torch.get_default_dtype()
    return torch.empty(count, dtype=dtype or default, device=device)


def _elementwise(first: torch.Tensor, *others: torch.Tensor, generator: Any = None) -> torch.Tensor:  # noqa: ARG001
    alike = all(other.shape == first.shape and other.dtype == first.dtype for other in others)
    if not alike or not first.dim() or not first.is_floating_point():
        raise NotImplementedError  # their kernels say what is wrong
    return torch.empty(first.shape, dtype=first.dtype, device=first.device)


# What stands in for meta kernels: of operators that have none, and of some whose own are written in Python, and take
# three times as long for each new size.
_PREDICTED_BY = {
    **dict.fromkeys(
        (
            torch.ops.aten._dirichlet_grad.default,
            torch.ops.aten._sample_dirichlet.default,
            torch.ops.aten._standard_gamma.default,
            torch.ops.aten._standard_gamma_grad.default,
            torch.ops.aten.binomial.default,
        ),
        _elementwise,
    ),
    torch.ops.aten.randn.generator: torch.ops.aten.rand.generator,
    **dict.fromkeys([getattr(torch.ops.aten.arange, name) for name in ("default", "start", "start_step")], _arange),
}


@dataclass(slots=True)
class OutSpec:
    """One returned tensor: where its ``Spec`` is in the return value, and the argument that it is a view of, if any.

    ``view_of`` and ``same_as`` count the tensor arguments of the call, in order; ``same_as`` means that the argument
    itself is returned.
    """

    path: tuple[int, ...]
    spec: Spec | None
    view_of: int | None = None
    same_as: int | None = None


@dataclass(slots=True)
class Rule:
    """What to record for an operation. ``eager`` is the reason why it must run at once, or None.

    ``returns`` is the shape of the return value: an ``OutSpec``, None, or a (nested) tuple or list of these.
    ``resized`` are tensor arguments whose geometry changes, with their new specs.
    """

    eager: str | None = None
    returns: Any = None
    outs: list[OutSpec] = field(default_factory=list)
    resized: list[tuple[int, Spec]] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class Request:
    """An operation to infer: ``args``/``kwargs`` hold values in place of tensors; ``tensors`` lists those in order.

    ``same`` gives for each of them the position of the first occurrence of the same tensor object. ``probes`` says
    whether a trial run is harmless.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Value]
    same: list[int]
    device: int
    probes: bool
    view: bool
    mutates: bool


def distrust(func: Any) -> None:
    """From now on believe no meta kernel of an operator: large calls are tried as they are, not with small sizes, and
    operators of users run at once with sizes that are new."""
    _DISTRUSTED.add(func)


def infer(request: Request) -> Rule:
    """The rule of a request. Raises what eager PyTorch raises for it."""
    try:
        predicted, meta_args = _predicted(request)
    except NotImplementedError as error:
        by_sizes = facts_of(request.func).shaped_by_sizes
        return _disputed(request, error) if by_sizes else Rule(eager="it has no meta kernel")
    except Exception as error:  # Whatever it is, eager PyTorch decides: the probe raises its own error or disproves it.
        return _disputed(request, error)
    rule = _corrected(_rule_of(request, predicted, meta_args), request)
    if rule.eager is None and request.probes:
        _verify(request, rule)
    elif facts_of(request.func).of_others and request.func in _DISTRUSTED:
        rule.eager = "its meta kernel and its CPU kernel disagree"
    return rule


def _predicted(request: Request) -> tuple[Any, list[torch.Tensor]]:
    """What the meta kernel returns, and its arguments. An operator that returns nothing needs none."""
    if not request.func._schema.returns:
        return None, _StandIns(request, "meta", None).all()
    return _run(request, "meta", None, _PREDICTED_BY.get(request.func))


def _disputed(request: Request, error: Exception) -> Rule:
    if not request.probes:
        if request.func.namespace != "aten":  # whose error may be that there is none
            return Rule(eager="its meta kernel fails")
        raise error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probed, cpu_args = _run(request, "cpu", 1)
    except Exception as eager_error:
        raise eager_error.with_traceback(None) from None
    if facts_of(request.func).shaped_by_sizes:
        return _rule_of(request, probed, cpu_args)
    return Rule(eager="its meta kernel refuses what the CPU kernel accepts")


def _corrected(rule: Rule, request: Request) -> Rule:
    """Shapes that the meta kernel gets wrong for the CPU."""
    if facts_of(request.func).saves_nothing and not request.args[5]:
        for out in rule.outs[1:]:  # nothing is saved outside of training
            assert out.spec is not None
            out.spec = handles.spec((0,), (1,), 0, out.spec.dtype, request.device)
    return rule


def _verify(request: Request, rule: Rule) -> None:
    """Correct strides and dtypes of ``rule`` by a probe, or mark it eager when a probe contradicts it."""
    if not _is_cheap(request, rule):
        agree = request.func not in _DISTRUSTED and (request.view or _agree_when_small(request))
        if agree:
            return
        if _elements(request, rule) > policy.PROBE_WHOLE_ELEMENTS:
            if agree is False:
                rule.eager = "its meta kernel and its CPU kernel disagree"
            return
    ran, seen = _tried(request)
    if not ran:
        rule.eager = "a trial run of it failed"
    elif seen is not None:
        _adopt(rule, seen, facts_of(request.func).shaped_by_sizes)


def _agree_when_small(request: Request) -> bool | None:
    """Whether the same call with small sizes returns what its meta kernel says; None where it means nothing then."""
    small = smaller(request)
    try:
        predicted, meta_args = _predicted(small)
    except Exception:  # Sizes among its arguments do not fit the others any more.
        return None
    ran, seen = _tried(small)
    return ran and (seen is None or seen == _corrected(_rule_of(small, predicted, meta_args), small))


def smaller(request: Request) -> Request:
    """The same call with small sizes."""
    call = Smaller(sizes_of(request.func)).call(request.args, tuple(request.kwargs.items()), tuple(request.tensors))
    args, kwargs, values = call
    return replace(request, args=args, kwargs=dict(kwargs), tensors=list(values))


def _is_cheap(request: Request, rule: Rule) -> bool:
    return facts_of(request.func).limited_in_size or _elements(request, rule) <= policy.PROBE_ELEMENTS


def _elements(request: Request, rule: Rule) -> int:
    elements = sum(value.spec.numel for value in request.tensors if value.spec is not None)
    return elements + sum(out.spec.numel for out in rule.outs if out.spec is not None)


def probe(request: Request, rule: Rule, whole: bool = False) -> tuple[bool, Rule | None]:
    """Whether a trial run on the CPU does not fail, and the rule that it gives; None where it cannot tell, as for calls
    that are too large to be tried. Calls of up to 2**14 elements are tried, and ``whole`` ones of up to 2**24."""
    small_enough = _elements(request, rule) <= policy.PROBE_WHOLE_ELEMENTS if whole else _is_cheap(request, rule)
    return _tried(request) if small_enough else (True, None)


def _tried(request: Request) -> tuple[bool, Rule | None]:
    for fill in (1, 0):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                probed, cpu_args = _run(request, "cpu", fill)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return True, None  # about the values, which are made up
        except Exception:  # Made-up values can be at fault; only the real ones tell.
            continue
        return True, _rule_of(request, probed, cpu_args)
    return False, None


def _adopt(rule: Rule, seen: Rule, shapes: bool) -> None:
    """Correct a rule by what was seen; its shapes too, where these may be believed. Which results there are does not
    depend on values."""
    mine = {out.path: out.spec for out in rule.outs}
    pairs = [(mine.get(out.path), out.spec) for out in seen.outs]
    resized = dict(rule.resized)
    pairs += [(resized.get(index), spec) for index, spec in seen.resized]
    same = all(a is None or b is None or a.shape == b.shape for a, b in pairs)
    if not shapes and not (same and resized.keys() == dict(seen.resized).keys()):
        rule.eager = "its meta kernel and its CPU kernel disagree"
        return
    rule.returns, rule.outs, rule.resized, rule.nbytes = seen.returns, seen.outs, seen.resized, seen.nbytes


# --- running on stand-ins ------------------------------------------------------------------------------------------


def _run(request: Request, device: str, fill: int | None, func: Any = None) -> tuple[Any, list[torch.Tensor]]:
    """Run the operator, or ``func``, on stand-ins; the return value and the stand-ins of ``request.tensors``."""
    with concretely(), SizesAreNumbers() if device == "meta" else nullcontext():
        stand_ins = _StandIns(request, device, fill)
        args = [placed(arg, stand_ins.next) for arg in request.args]
        kwargs = {name: placed(arg, stand_ins.next) for name, arg in request.kwargs.items()}
        names = {argument.name for argument in request.func._schema.arguments}
        if not stand_ins.made and "device" in names:
            kwargs["device"] = torch.device(device)
        if "generator" in names:
            kwargs["generator"] = torch.Generator() if device == "cpu" else None  # the user's must not move
        returned = (func or request.func)(*args, **kwargs)
    return returned, stand_ins.made


class _StandIns:
    """Tensors of the asked geometry; values that share memory get stand-ins that share it too."""

    def __init__(self, request: Request, device: str, fill: int | None) -> None:
        self.made: list[torch.Tensor] = []
        self._values = request.tensors
        self.same = request.same
        self.device = device
        self.fill = fill
        self.blocks: dict[int, torch.Tensor] = {}  # by identity of the value whose memory it stands for
        spans: dict[int, int] = {}  # in bytes
        widest: dict[int, int] = {}
        for value in request.tensors:
            assert value.spec is not None
            root = id(root_of(value))
            width = value.spec.dtype.itemsize
            spans[root] = max(spans.get(root, 0), (value.spec.offset + value.spec.span) * width)
            widest[root] = max(widest.get(root, 0), width)
        for value in request.tensors:
            root = id(root_of(value))
            if root not in self.blocks:
                assert value.spec is not None
                # Whole elements of the widest dtype, so that the block can be seen as any of them.
                nbytes = -(-spans[root] // widest[root]) * widest[root]
                self.blocks[root] = self._block(nbytes // value.spec.dtype.itemsize, value.spec.dtype)

    def all(self) -> list[torch.Tensor]:
        """The stand-ins of all values."""
        for value in self._values:
            self.next(value)
        return self.made

    def next(self, value: Value) -> torch.Tensor:
        """The stand-in of a value; they are met in the order of ``request.tensors``."""
        first = self.same[len(self.made)]
        self.made.append(self.made[first] if first < len(self.made) else self._make(value))
        return self.made[-1]

    def _make(self, value: Value) -> torch.Tensor:
        spec = value.spec
        assert spec is not None
        block = self.blocks[id(root_of(value))]
        tensor = (block if block.dtype is spec.dtype else block.view(spec.dtype)).as_strided(
            spec.shape, spec.stride, spec.offset
        )
        if spec.conj:
            torch._C._set_conj(tensor, True)
        if spec.neg:
            torch._C._set_neg(tensor, True)
        return tensor

    def _block(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(size, dtype=dtype, device=self.device)
        if self.fill is not None:
            # Integers index and divide; zero indexes anything that is not empty, so it is tried first for them.
            integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
            block.fill_(1 - self.fill if integral else self.fill)
        return block


# --- from results to rules -----------------------------------------------------------------------------------------


def _rule_of(request: Request, returned: Any, tensors: list[torch.Tensor]) -> Rule:
    rule = Rule()
    by_identity = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    rule.returns = _describe(rule, request, by_identity if request.mutates else {}, returned, ())
    if request.mutates:
        for index, (value, tensor) in enumerate(zip(request.tensors, tensors, strict=True)):
            spec = handles.spec_of(tensor, request.device)
            if spec is not value.spec:
                rule.resized.append((index, spec))
    return rule


def _describe(rule: Rule, request: Request, arguments: dict[int, int], item: Any, path: tuple[int, ...]) -> Any:
    if isinstance(item, (tuple, list)):
        return [_describe(rule, request, arguments, part, (*path, index)) for index, part in enumerate(item)]
    if item is None:
        return None
    if not isinstance(item, torch.Tensor):
        rule.eager = "it returns a value"
        return None
    if other_layout(item) is not None:
        rule.eager = "unsupported layout"
        return None
    out = OutSpec(path, handles.spec_of(item, request.device), same_as=arguments.get(id(item)))
    if out.same_as is None:
        if request.view:
            out.view_of = 0  # every view operator views its first argument
        else:
            assert out.spec is not None
            rule.nbytes += out.spec.nbytes
    rule.outs.append(out)
    return out
