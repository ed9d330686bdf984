"""What operators return whose kernels cannot be asked (``derive.py``), said in Python for the cases that are common.

A rule is given a call as it is recorded, with values in place of tensors. It gives for each result shape, strides,
offset, dtype and the two bits of complex views, or ``NotImplemented`` for any call that it is not certain to be right
for, above all for those that might raise. ``tests/test_derive.py`` compares rules with the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from marid.graph.node import Spec, Value
from marid.native import module

aten = torch.ops.aten

Rule = Callable[..., Any]
rules: dict[Any, Rule] = {}


def _named(**arguments: Any) -> tuple[tuple[str, Any], ...] | None:
    return tuple((name, value) for name, value in arguments.items() if value is not None) or None


def _passed(*args: Any, **kwargs: Any) -> Any:
    return args, _named(**kwargs)


def _empty_like(x: Value, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
    return (x,), _named(dtype=dtype, memory_format=memory_format)


same_as: dict[Any, tuple[Any, Callable[..., tuple[tuple[Any, ...], Any]]]] = {
    **{
        getattr(aten, name).Scalar: (getattr(aten, name).Tensor, _passed)
        for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
    },
    aten._safe_softmax.default: (
        aten._softmax.default,
        lambda x, dim, dtype=None: ((x, dim, False), _named(dtype=dtype)),
    ),
    aten.full_like.default: (aten.empty_like.default, lambda x, _value, **options: _empty_like(x, **options)),
    aten.mean.default: (aten.mean.dim, lambda x, dtype=None: ((x, (), False), _named(dtype=dtype))),
    aten.ones_like.default: (aten.empty_like.default, _empty_like),
    aten.relu.default: (aten.clamp_min.default, lambda x: ((x, 0), None)),
    aten.sum.default: (aten.sum.dim_IntList, lambda x, dtype=None: ((x, (), False), _named(dtype=dtype))),
}
"""Operators that return what another one does: that, and its positional and named arguments for a call. Their own
kernels for tensors without data, where there are any, call others that are written in Python."""


def rule(func: Any) -> Callable[[Rule], Rule]:
    """Decorator: what an operator returns."""

    def register(function: Rule) -> Rule:
        rules[func] = function
        return function

    return register


def _dense(shape: Sequence[int], dtype: torch.dtype, order: Sequence[int] | None = None) -> Any:
    """A new tensor: without gaps, dimensions in memory in this order."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        stride[dim] = step
        step *= shape[dim]
    return tuple(shape), tuple(stride), 0, dtype, False, False


def _like(value: Value) -> Any:
    """A new tensor whose dimensions lie in memory as those of ``value``."""
    return module.derive(module.derives("aten::empty_like", ""), (value,), None, False)


def _packed(spec: Spec) -> Any:
    """A new tensor whose dimensions lie in memory in the order in which those of ``spec`` do: where that has no gaps,
    and where there is only one order."""
    if not spec.numel or spec.conj or spec.neg:
        return NotImplemented
    large = [dim for dim, size in enumerate(spec.shape) if size > 1]
    order = sorted(large, key=lambda dim: -spec.stride[dim])
    packed = _dense([spec.shape[dim] for dim in order], spec.dtype)[1]
    if [spec.stride[dim] for dim in order] == [*packed]:
        return spec.shape, spec.stride, 0, spec.dtype, False, False
    if len(large) < len(spec.shape) or 0 in spec.stride or len(set(spec.stride)) < len(order):
        return NotImplemented
    return _dense(spec.shape, spec.dtype, order)


def _plain(*values: Value) -> bool:
    """Whether these are floating-point tensors of one dtype, none of them empty."""
    specs = [_spec(value) for value in values]
    return all(spec.dtype is specs[0].dtype and spec.numel for spec in specs) and specs[0].dtype.is_floating_point


def _spec(value: Value) -> Spec:
    assert value.spec is not None
    return value.spec


def _statistics(of: Spec, normalized: int) -> tuple[int, ...]:
    return of.shape[: len(of.shape) - normalized] + (1,) * normalized


def has_plain_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the rows of a tensor lie behind each other by their strides alone. Those of dimensions of one element
    count, as they do where PyTorch decides."""
    steps = zip(stride, (*stride[1:], 1), (*shape[1:], 1), strict=True)
    return all(step == inner * size for step, inner, size in steps)


@rule(aten.linear.default)
def _linear(x: Value, weight: Value, bias: Value | None = None) -> Any:
    of, rows = _spec(x), _spec(weight)
    given = [value for value in (x, weight, bias) if value is not None]
    if not _plain(*given) or len(rows.shape) != 2 or not of.shape or of.shape[-1] != rows.shape[1]:
        return NotImplemented
    if bias is not None and _spec(bias).shape != rows.shape[:1]:
        return NotImplemented
    if len(of.shape) != 2 and not has_plain_rows(of.shape, of.stride):  # which is never recorded whole
        return NotImplemented
    return _dense((*of.shape[:-1], rows.shape[0]), of.dtype)


@rule(aten.addmm.default)
def _addmm(term: Value, left: Value, right: Value, **factors: Any) -> Any:
    number = module.derives("aten::addmm", "")  # which does not look at the term
    found = module.derive(number, (term, left, right), _named(**factors), False)
    if found is NotImplemented or len(_spec(term).shape) > 2:
        return NotImplemented
    rows, columns = (1, 1, *_spec(term).shape)[-2:]
    return found if rows in (1, found[0][0]) and columns in (1, found[0][1]) else NotImplemented


@rule(aten.max_pool1d.default)
def _max_pool1d(
    x: Value,
    kernel: tuple[int, ...],
    stride: tuple[int, ...] = (),
    padding: tuple[int, ...] = (0,),
    dilation: tuple[int, ...] = (1,),
    ceil: bool = False,
) -> Any:
    of, settings = _spec(x), (kernel, stride or kernel, padding, dilation)
    if not _plain(x) or len(of.shape) not in (2, 3) or any(len(setting) != 1 for setting in settings):
        return NotImplemented
    size, step, pad, gap = (setting[0] for setting in settings)
    if min(size, step, gap) < 1 or not 0 <= 2 * pad <= size:
        return NotImplemented
    places = of.shape[-1] + 2 * pad - gap * (size - 1) - 1
    count = places // step + 1
    if ceil and places % step and count * step < of.shape[-1] + pad:
        count += 1
    return _dense((*of.shape[:-1], count), of.dtype) if places >= 0 else NotImplemented


@rule(aten.native_batch_norm.default)
def _batch_norm(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    *_: Any,
) -> Any:
    of = _spec(x)
    given = [value for value in (weight, bias, mean, variance) if value is not None]
    if not _plain(x, *given) or len(of.shape) < 2 or not (training or (mean and variance)):
        return NotImplemented
    if of.dtype not in (torch.float32, torch.float64) or not has_plain_rows(of.shape, of.stride):
        return NotImplemented
    if any(_spec(value).shape != of.shape[1:2] or not _spec(value).is_contiguous for value in given):
        return NotImplemented
    saved = _dense(of.shape[1:2] if training else (0,), of.dtype)
    return [_dense(of.shape, of.dtype), saved, saved]


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(grad: Value, x: Value, weight: Value | None, *rest: Any) -> Any:
    of, (*statistics, training, _, wanted) = _spec(x), rest
    given = [value for value in (weight, *statistics) if value is not None]
    if not _plain(grad, x, *given) or len(of.shape) < 2 or _spec(grad).shape != of.shape or not training:
        return NotImplemented
    if of.dtype not in (torch.float32, torch.float64) or not has_plain_rows(of.shape, of.stride):
        return NotImplemented
    if any(_spec(value).shape != of.shape[1:2] or not _spec(value).is_contiguous for value in given):
        return NotImplemented
    shapes = of.shape, of.shape[1:2], of.shape[1:2]
    return [_dense(shape, of.dtype) if want else None for shape, want in zip(shapes, wanted, strict=True)]


@rule(aten.native_layer_norm.default)
def _layer_norm(x: Value, normalized: tuple[int, ...], weight: Value | None, bias: Value | None, *_: Any) -> Any:
    of = _spec(x)
    given = [value for value in (weight, bias) if value is not None]
    if not _plain(x, *given) or not normalized or of.shape[-len(normalized) :] != normalized:
        return NotImplemented
    if any(_spec(value).shape != normalized for value in given):
        return NotImplemented
    statistics = _dense(_statistics(of, len(normalized)), of.dtype)
    return [_dense(of.shape, of.dtype), statistics, statistics]


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad: Value,
    x: Value,
    normalized: tuple[int, ...],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: tuple[bool, ...],
) -> Any:
    of = _spec(x)
    if weight is None or bias is None or not normalized or of.shape[-len(normalized) :] != normalized:
        return NotImplemented
    if not _plain(grad, x, mean, rstd, weight, bias) or _spec(grad).shape != of.shape:
        return NotImplemented
    if _spec(weight).shape != normalized or _spec(bias).shape != normalized:
        return NotImplemented
    if not _spec(weight).is_contiguous or not _spec(bias).is_contiguous:
        return NotImplemented
    if any(_spec(value).shape != _statistics(of, len(normalized)) for value in (mean, rstd)):
        return NotImplemented
    shapes = of.shape, normalized, normalized
    return [_dense(shape, of.dtype) if want else None for shape, want in zip(shapes, wanted, strict=True)]


@rule(aten.embedding.default)
def _embedding(weight: Value, indices: Value, *_: Any) -> Any:
    rows, of = _spec(weight), _spec(indices)
    if len(rows.shape) != 2 or not rows.numel or not of.numel or of.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return _dense((*of.shape, rows.shape[1]), rows.dtype)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(grad: Value, indices: Value, count: int, *_: Any) -> Any:
    of, at = _spec(grad), _spec(indices)
    if not _plain(grad) or at.dtype is not torch.int64 or of.shape[:-1] != at.shape or count < 1:
        return NotImplemented
    return _dense((count, of.shape[-1]), of.dtype)


_NOT_REDUCED = 0


def _mean_or_sum(x: Value, target: Value, reduction: int = 1) -> Any:
    if not _plain(x, target) or _spec(x).shape != _spec(target).shape or reduction == _NOT_REDUCED:
        return NotImplemented
    return _dense((), _spec(x).dtype)


@rule(aten.mse_loss.default)
def _mse_loss(x: Value, target: Value, reduction: int = 1) -> Any:
    return _mean_or_sum(x, target, reduction)


@rule(aten.smooth_l1_loss.default)
@rule(aten.huber_loss.default)
def _huber_loss(x: Value, target: Value, reduction: int = 1, *_: Any) -> Any:
    return _mean_or_sum(x, target, reduction)


@rule(aten.mse_loss_backward.default)
@rule(aten.smooth_l1_loss_backward.default)
@rule(aten.huber_loss_backward.default)
def _loss_backward(grad: Value, x: Value, target: Value, *_: Any) -> Any:
    of = _spec(x)
    if not _plain(grad, x, target) or _spec(target).shape != of.shape or _spec(grad).shape not in ((), of.shape):
        return NotImplemented
    return _dense(of.shape, of.dtype) if all(_spec(value).is_contiguous for value in (x, target)) else NotImplemented


@rule(aten.binary_cross_entropy_with_logits.default)
def _logits_loss(x: Value, target: Value, weight: Any = None, weights: Any = None, reduction: int = 1) -> Any:
    return NotImplemented if weight is not None or weights is not None else _mean_or_sum(x, target, reduction)


@rule(aten._safe_softmax.default)
def _safe_softmax(x: Value, dim: int, dtype: torch.dtype | None = None) -> Any:
    of = _spec(x)
    if dtype is not None or not _plain(x) or not of.is_contiguous or not -len(of.shape) <= dim < len(of.shape):
        return NotImplemented
    return _dense(of.shape, of.dtype)


@rule(aten.clone.default)
def _clone(x: Value, *, memory_format: torch.memory_format | None = None) -> Any:
    spec = _spec(x)
    if memory_format is torch.contiguous_format and not (spec.conj or spec.neg):
        return _dense(spec.shape, spec.dtype)
    return _packed(spec) if memory_format in (None, torch.preserve_format) else NotImplemented


@rule(aten.stack.default)
def _stack(tensors: tuple[Value, ...], dim: int = 0) -> Any:
    specs = [_spec(one) for one in tensors]
    shape = specs[0].shape
    # It is a concatenation, and takes over a format with channels last, which fewer dimensions have not.
    alike = _plain(*tensors) and all(spec.shape == shape and (len(shape) < 3 or spec.is_contiguous) for spec in specs)
    if not alike or not -len(shape) - 1 <= dim <= len(shape):
        return NotImplemented
    dim %= len(shape) + 1
    return _dense((*shape[:dim], len(specs), *shape[dim:]), specs[0].dtype)


@rule(aten.select_backward.default)
def _select_backward(grad: Value, sizes: tuple[int, ...], dim: int, index: int) -> Any:
    of = _spec(grad)
    if not of.numel or not -len(sizes) <= dim < len(sizes) or not -sizes[dim] <= index < sizes[dim]:
        return NotImplemented
    rest = [size for place, size in enumerate(sizes) if place != dim % len(sizes)]
    return _dense(sizes, of.dtype) if tuple(rest) == of.shape else NotImplemented


@rule(aten.std.correction)
@rule(aten.var.correction)
def _spread(x: Value, dims: tuple[int, ...] | None = None, *, keepdim: bool = False, **_: Any) -> Any:
    of = _spec(x)
    count = len(of.shape)
    if not _plain(x) or any(not -count <= dim < count for dim in dims or ()):
        return NotImplemented
    over = {dim % count for dim in dims} if dims else set(range(count))
    kept = [1 if dim in over else size for dim, size in enumerate(of.shape) if keepdim or dim not in over]
    if len(over) != len(dims or over):
        return NotImplemented
    return _dense(kept, of.dtype)


def _attends(query: Spec, key: Spec, value: Spec) -> bool:
    """Whether these surely fit together as query, key and value of attention: floating-point tensors of four dimensions
    and one dtype, none of them empty."""
    return (
        query.dtype is key.dtype is value.dtype
        and query.dtype.is_floating_point
        and len(query.shape) == len(key.shape) == 4
        and key.shape == value.shape
        and (query.shape[:2], query.shape[3]) == (key.shape[:2], key.shape[3])
        and query.numel > 0 < key.numel
    )


def _statistics_dtype(of: Spec) -> torch.dtype:
    return torch.float64 if of.dtype is torch.float64 else torch.float32


# How attention has most tensors in memory: batch, position, head.
_BY_POSITION = (0, 2, 1, 3)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    query: Value,
    key: Value,
    value: Value,
    dropout: float = 0.0,
    *_: Any,
    attn_mask: Value | None = None,
    **__: Any,
) -> Any:
    of = _spec(query)
    if attn_mask is not None or dropout or not _attends(of, _spec(key), _spec(value)):
        return NotImplemented
    out = _like(query)
    return out if out is NotImplemented else [out, _dense(of.shape[:3], _statistics_dtype(of), _BY_POSITION[:3])]


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    dropout: float,
    *_: Any,
    attn_mask: Value | None = None,
    **__: Any,
) -> Any:
    of, to = _spec(query), _spec(key)
    if attn_mask is not None or dropout or not _attends(of, to, _spec(value)) or not _plain(query, grad, out):
        return NotImplemented
    if _spec(grad).shape != of.shape or _spec(out).shape != of.shape or _spec(logsumexp).shape != of.shape[:3]:
        return NotImplemented
    return [_dense(shape, of.dtype, _BY_POSITION) for shape in (of.shape, to.shape, to.shape)]
