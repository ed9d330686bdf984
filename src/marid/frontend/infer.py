"""What an operation returns, found without running it on the user's data.

For every new combination of operator, input specs and constants the operator runs twice: on meta tensors, and (where it
is cheap) on small or shrunk CPU tensors of the same geometry filled with ones. The meta run predicts; the *probe* keeps
it honest: it corrects strides where a meta kernel differs from the CPU kernel, and it raises what eager PyTorch raises.
The answer is a ``Rule``, cached by the caller.

When the two disagree on anything but strides, or nothing can be predicted, the rule says ``eager``: the operation then
runs on its real inputs. So a wrong meta kernel costs time and never a wrong answer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._meta_registrations  # Python meta kernels

from marid.engine.inprocess import concretely
from marid.frontend import handles
from marid.frontend.smaller import SMALL, dense_like
from marid.graph.node import Node, Output, Spec, Value, root_of

__all__ = ["OutSpec", "Request", "Rule", "infer", "probe"]

_PROBE_ELEMENTS = 1 << 14
_WHOLE_ELEMENTS = 1 << 24
# Operators that give results other strides than their meta kernels say: large calls are tried as they are.
_LAID_OUT_OTHERWISE = {
    *(torch.ops.aten._fft_r2c.default, torch.ops.aten._fft_c2r.default, torch.ops.aten._fft_c2c.default),
    *(torch.ops.aten.linalg_eig.default, torch.ops.aten.max_unpool2d.default, torch.ops.aten.nonzero_static.default),
}
# Operators whose kernels refuse large sizes that their meta kernels accept.
_WRONGLY_REFUSED = {torch.ops.aten._grouped_mm.default}  # by meta kernels written for CUDA; shapes are static
_LIMITED_IN_SIZE = {torch.ops.aten.multinomial.default, torch.ops.aten.multinomial.out}


@dataclass(slots=True)
class OutSpec:
    """One returned tensor: where it is in the return value, its spec, and the argument it is a view of, if any.

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


def infer(request: Request) -> Rule:
    """The rule of a request. Raises what eager PyTorch raises for it."""
    try:
        predicted, meta_args = _run(request, "meta", None)
    except NotImplementedError:
        return Rule(eager="it has no meta kernel")
    except Exception as error:  # Whatever it is, eager PyTorch decides: the probe raises its own error or disproves it.
        return _disputed(request, error)
    rule = _corrected(_rule_of(request, predicted, meta_args), request)
    if rule.eager is None and request.probes:
        _verify(request, rule)
    return rule


def _disputed(request: Request, error: Exception) -> Rule:
    if not request.probes:
        raise error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probed, cpu_args = _run(request, "cpu", 1)
    except Exception as eager_error:
        raise eager_error.with_traceback(None) from None
    if request.func in _WRONGLY_REFUSED:
        return _rule_of(request, probed, cpu_args)
    return Rule(eager="its meta kernel refuses what the CPU kernel accepts")


def _corrected(rule: Rule, request: Request) -> Rule:
    """Shapes that the meta kernel gets wrong for the CPU."""
    if request.func is torch.ops.aten.native_batch_norm.default and not request.args[5]:
        for out in rule.outs[1:]:  # nothing is saved outside of training
            assert out.spec is not None
            out.spec = handles.spec((0,), (1,), 0, out.spec.dtype, request.device)
    return rule


def _verify(request: Request, rule: Rule) -> None:
    """Correct the strides of ``rule`` by a probe, or mark it eager when a probe contradicts it."""
    ran, seen = probe(request, rule)
    if ran and seen is None and request.func in _LAID_OUT_OTHERWISE:
        if _elements(request, rule) > _WHOLE_ELEMENTS:
            rule.eager = "its meta kernel and its CPU kernel disagree"
            return
        ran, seen = probe(request, rule, whole=True)
    if not ran:
        rule.eager = "a trial run of it failed"
    elif seen is not None:
        _adopt(rule, seen)


def _elements(request: Request, rule: Rule) -> int:
    elements = sum(value.spec.numel for value in request.tensors if value.spec is not None)
    return elements + sum(out.spec.numel for out in rule.outs if out.spec is not None)


def probe(request: Request, rule: Rule, whole: bool = False) -> tuple[bool, Rule | None]:
    """Whether a trial run on the CPU does not fail, and the rule that it gives; None where it cannot tell. Large calls
    are only tried with small sizes, unless they are to be tried as they are (``whole``)."""
    large = not whole and _elements(request, rule) > _PROBE_ELEMENTS
    shrink = large and request.func not in _LIMITED_IN_SIZE
    if shrink and (request.view or not _shrinkable(request)):
        return True, None
    for fill in (1, 0):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                probed, cpu_args = _run(request, "cpu", fill, shrink)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return True, None  # about the values, which are made up
        except Exception:  # Made-up values can be at fault; only the real ones tell.
            continue
        return True, None if shrink else _rule_of(request, probed, cpu_args)
    return False, None


def _adopt(rule: Rule, seen: Rule) -> None:
    mine = [out.spec for out in rule.outs] + [spec for _, spec in rule.resized]
    theirs = [out.spec for out in seen.outs] + [spec for _, spec in seen.resized]
    same = len(mine) == len(theirs) and all(
        a is b or (a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype)
        for a, b in zip(mine, theirs, strict=True)
    )
    if not same:
        rule.eager = "its meta kernel and its CPU kernel disagree"
        return
    rule.returns, rule.outs, rule.resized, rule.nbytes = seen.returns, seen.outs, seen.resized, seen.nbytes


def _shrinkable(request: Request) -> bool:
    """Whether the operation means the same on smaller tensors: it has no size among its arguments."""

    def free(arg: Any) -> bool:
        if type(arg) is tuple or type(arg) is list:
            return all(type(item) is Node or type(item) is Output or item is None for item in arg)
        return True

    return all(free(arg) for arg in request.args) and all(free(arg) for arg in request.kwargs.values())


# --- running on stand-ins ------------------------------------------------------------------------------------------


def _run(request: Request, device: str, fill: int | None, shrink: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """Run on stand-ins; the return value and the stand-ins of ``request.tensors``."""
    with concretely():
        stand_ins = _StandIns(request, device, fill, shrink)
        args = [stand_ins.place(arg) for arg in request.args]
        kwargs = {name: stand_ins.place(arg) for name, arg in request.kwargs.items()}
        names = {argument.name for argument in request.func._schema.arguments}
        if not stand_ins.made and "device" in names:
            kwargs["device"] = torch.device(device)
        if "generator" in names:
            kwargs["generator"] = torch.Generator() if device == "cpu" else None  # the user's must not move
        returned = request.func(*args, **kwargs)
    return returned, stand_ins.made


class _StandIns:
    """Tensors of the asked geometry; values that share memory get stand-ins that share it too."""

    def __init__(self, request: Request, device: str, fill: int | None, shrink: bool) -> None:
        self.made: list[torch.Tensor] = []
        self.same = request.same
        self.device = device
        self.fill = fill
        self.shrink = shrink
        self.sizes: dict[int, int] = {}
        self.blocks: dict[int, torch.Tensor] = {}  # by identity of the value whose memory it stands for
        spans: dict[int, int] = {}  # in bytes
        widest: dict[int, int] = {}
        for value in request.tensors:
            assert value.spec is not None
            shape, stride, offset = self._geometry(value)
            span = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            root = id(root_of(value))
            width = value.spec.dtype.itemsize
            spans[root] = max(spans.get(root, 0), (offset if 0 in shape else span) * width)
            widest[root] = max(widest.get(root, 0), width)
        for value in request.tensors:
            root = id(root_of(value))
            if root not in self.blocks:
                assert value.spec is not None
                # Whole elements of the widest dtype, so that the block can be seen as any of them.
                nbytes = -(-spans[root] // widest[root]) * widest[root]
                self.blocks[root] = self._block(nbytes // value.spec.dtype.itemsize, value.spec.dtype)

    def place(self, arg: Any) -> Any:
        """The argument with stand-ins in place of values; values are met in the order of ``request.tensors``."""
        kind = type(arg)
        if kind is Node or kind is Output:
            first = self.same[len(self.made)]
            self.made.append(self.made[first] if first < len(self.made) else self._make(arg))
            return self.made[-1]
        return [self.place(item) for item in arg] if kind is tuple or kind is list else arg

    def _make(self, value: Value) -> torch.Tensor:
        spec = value.spec
        assert spec is not None
        block = self.blocks[id(root_of(value))]
        tensor = (block if block.dtype is spec.dtype else block.view(spec.dtype)).as_strided(*self._geometry(value))
        if spec.conj:
            torch._C._set_conj(tensor, True)
        if spec.neg:
            torch._C._set_neg(tensor, True)
        return tensor

    def _geometry(self, value: Value) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        spec = value.spec
        assert spec is not None
        if not self.shrink:
            return spec.shape, spec.stride, spec.offset
        shape = tuple(self._small(size) for size in spec.shape)
        return shape, dense_like(shape, spec.stride), 0

    def _block(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(size, dtype=dtype, device=self.device)
        if self.fill is not None:
            # Integers index and divide; zero indexes anything that is not empty, so it is tried first for them.
            integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
            block.fill_(1 - self.fill if integral else self.fill)
        return block

    def _small(self, size: int) -> int:
        if size <= SMALL:
            return size
        # Equal sizes stay equal and different ones different.
        return self.sizes.setdefault(size, SMALL + 1 + len(self.sizes))


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
    if item.layout is not torch.strided or item.is_quantized:
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
