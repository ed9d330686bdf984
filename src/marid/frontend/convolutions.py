"""What convolutions and their gradients return.

Which backend the CPU takes, and so how results lie in memory, depends on sizes, strides, dtypes, the number of threads
and what is switched on. PyTorch's own code is asked for that, on tensors that look like the CPU's and have no memory.
``tests/conformance/test_convolutions.py`` compares what is said here with the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marid.frontend.memory_layout import MemoryLayout, Sizes, dense
from marid.frontend.rules import rule
from marid.graph.node import Spec, Value

aten = torch.ops.aten

_Backend: Any = torch._C._ConvBackend
# These know of one group only: each is calculated by itself, and they are put side by side.
_OF_ONE_GROUP = {
    *(_Backend.NnpackSpatial, _Backend.Slow2d, _Backend.SlowDilated2d, _Backend.SlowDilated3d),
    *(_Backend.SlowTranspose2d, _Backend.SlowTranspose3d),
}
_PLAIN = torch.contiguous_format


def _group(laid: MemoryLayout, dim: int, groups: int) -> MemoryLayout:
    """One of so many equal parts along a dimension, as backends get it."""
    if groups == 1:
        return laid
    shape = (*laid.shape[:dim], laid.shape[dim] // groups, *laid.shape[dim + 1 :])
    return MemoryLayout(shape, laid.stride).contiguous(laid.suggested())


def _joined(part: MemoryLayout, shape: Sizes) -> MemoryLayout:
    """What ``cat`` makes of parts that are laid out like this one."""
    return part if shape == part.shape else dense(shape, part.suggested())


def _raised(laid: MemoryLayout) -> MemoryLayout:
    """With one dimension more, as convolutions in one dimension are calculated."""
    (batch, channels, size), (outer, middle, step) = laid
    return MemoryLayout((batch, channels, 1, size), (outer, middle, size * step, step))


def _lowered(laid: MemoryLayout) -> MemoryLayout:
    return MemoryLayout((*laid.shape[:2], laid.shape[3]), (*laid.stride[:2], laid.stride[3]))


def _memory_format_of(input: MemoryLayout, weight: MemoryLayout) -> torch.memory_format:
    """The memory format in which kernels in two dimensions, other than oneDNN's, calculate on these."""
    asked = input.look(torch.float32), weight.look(torch.float32)
    return torch._C._conv_determine_backend_memory_format(*asked, _Backend.Slow2d)


class _Convolution:
    """A convolution: its backend, and how its operands lie in memory where the backend gets them.

    Raises what eager PyTorch raises for sizes that do not go together.
    """

    def __init__(
        self,
        input: Spec,
        weight: Spec,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        transposed: bool,
        output_padding: Sizes,
        groups: int,
    ) -> None:
        self.groups = groups
        self.flat = len(weight.shape) == 3 == len(input.shape)
        self.input, self.weight = MemoryLayout(input.shape, input.stride), MemoryLayout(weight.shape, weight.stride)
        if self.flat:
            self.input, self.weight = _raised(self.input.contiguous(_PLAIN)), _raised(self.weight)
            stride, dilation = (1, *stride[-1:]), (1, *dilation[-1:])
            padding, output_padding = (0, *padding[-1:]), (0, *output_padding[-1:])
        asked = self.input.look(input.dtype), self.weight.look(weight.dtype)
        options = stride, padding, dilation, transposed, output_padding, groups
        self.backend = torch._C._select_conv_backend(*asked, None, *options, None)  # pyright: ignore
        self.memory_format = torch._C._conv_determine_backend_memory_format(*asked, self.backend)
        # Of all that are left on the CPU; for oneDNN's transposed convolutions Python has no name.
        self.onednn = self.backend not in (_Backend.Empty, _Backend.Slow3d, *_OF_ONE_GROUP)
        self.input, self.weight = self.input.contiguous(self.memory_format), self.weight.contiguous(self.memory_format)
        if self.onednn:  # asks again: operands of single elements that are laid out in a format may not look like it
            asked = self.input.look(input.dtype), self.weight.look(weight.dtype)
            self.memory_format = torch._C._conv_determine_backend_memory_format(*asked, self.backend)
        shape = self.input.shape, self.weight.shape
        sizes = zip(*(of[2:] for of in shape), *(_each(of, len(shape[0]) - 2) for of in options[:3]), strict=True)
        if transposed:
            given = list(zip(sizes, _each(output_padding, len(shape[0]) - 2), strict=True))
            if any(o >= max(s, d) for (_, _, s, _, d), o in given):
                raise RuntimeError("output padding must be smaller than either stride or dilation")
            out = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for (n, k, s, p, d), o in given]
        else:
            out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        channels = shape[1][1] * groups if transposed else shape[1][0]
        self.output_shape = (shape[0][0], channels, *out)

    def part(self) -> tuple[MemoryLayout, MemoryLayout]:
        """Input and weight of one group."""
        return _group(self.input, 1, self.groups), _group(self.weight, 0, self.groups)

    def output(self) -> MemoryLayout:
        if self.backend not in _OF_ONE_GROUP:
            return dense(self.output_shape, self.memory_format)
        memory_format = _PLAIN
        if len(self.output_shape) == 4 and self.backend != _Backend.NnpackSpatial:
            memory_format = _memory_format_of(*self.part())
        batch, channels, *sizes = self.output_shape
        return _joined(dense((batch, channels // self.groups, *sizes), memory_format), self.output_shape)

    def gradients(self) -> tuple[MemoryLayout, MemoryLayout] | None:
        """Of input and weight; None where the CPU refuses to calculate them."""
        if self.backend not in _OF_ONE_GROUP:
            return dense(self.input.shape, self.memory_format), dense(self.weight.shape, self.memory_format)
        input, weight = self.part()
        memory_format = weight_format = _PLAIN
        if len(self.output_shape) == 4:
            memory_format = _memory_format_of(input, weight)
            same = self.backend in (_Backend.NnpackSpatial, _Backend.SlowDilated2d)
            weight_format = memory_format if same else weight.suggested()
        of_input, of_weight = dense(input.shape, memory_format), dense(weight.shape, weight_format)
        if of_weight.contiguous(memory_format) is not of_weight:
            return None
        return _joined(of_input, self.input.shape), _joined(of_weight, self.weight.shape)


def _each(given: Sizes, rank: int) -> Sizes:
    return given * rank if len(given) == 1 else given


def _asked(values: Sequence[Value | None], *options: Any) -> _Convolution | None:
    """The convolution of these; None where no rule is certain to hold."""
    input, weight, *others = [value.spec for value in values if value is not None]
    assert input is not None
    assert weight is not None
    if not input.dtype.is_floating_point or any(of is None or of.dtype is not input.dtype for of in (weight, *others)):
        return None
    if not 3 <= len(input.shape) == len(weight.shape) <= 5:
        return None
    try:
        asked = _Convolution(input, weight, *options)
    except RuntimeError:  # eager PyTorch raises it, or more: the call is inferred
        return None
    return asked if asked.backend != _Backend.Empty and min(asked.output_shape) > 0 else None


def _described(laid: MemoryLayout, like: Spec) -> Any:
    return laid.shape, laid.stride, 0, like.dtype, False, False


@rule(aten.convolution.default)
def _convolution(input: Value, weight: Value, bias: Value | None, *options: Any) -> Any:
    of = input.spec
    assert of is not None
    asked = _asked((input, weight, bias), *options)
    if asked is None or (bias is not None and bias.spec.shape != asked.output_shape[1:2]):  # pyright: ignore
        return NotImplemented
    output = asked.output()
    return _described(_lowered(output) if asked.flat else output, of)


@rule(aten.convolution_backward.default)
def _convolution_backward(grad: Value, input: Value, weight: Value, bias_sizes: Sizes | None, *options: Any) -> Any:
    *geometry, wanted = options
    of = grad.spec
    assert of is not None
    asked = _asked((input, weight, grad), *geometry)
    if asked is None or (wanted[2] and bias_sizes != asked.output_shape[1:2]):
        return NotImplemented
    shape = asked.output_shape
    gradients = asked.gradients()
    if gradients is None or of.shape != ((*shape[:2], shape[3]) if asked.flat else shape):
        return NotImplemented
    # oneDNN calculates the gradients of weight and bias together, and returns that of the weight unasked, as it is.
    given = wanted[0], wanted[1] or (wanted[2] and asked.onednn)
    laid = [_lowered(each) if asked.flat and want else each for each, want in zip(gradients, wanted, strict=False)]
    found = [_described(each, of) if is_given else None for each, is_given in zip(laid, given, strict=True)]
    return [*found, _described(MemoryLayout(shape[1:2], (1,)), of) if wanted[2] else None]
