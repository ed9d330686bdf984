"""Tensors that stay packed: ``QuantizedTensor``, a matrix as it is in a GGUF file.

Products of a few rows by it (``linear``, ``matmul`` with its transpose, and Marid's own layers) take its numbers as
they are packed, and looking up rows (``embedding``) unpacks these. Every other operator is done on its float32
elements, which are unpacked for it, and says so once.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from marid.frontend.quantized_operators import PACKINGS

ops = torch.ops.marid


class QuantizedTensor(torch.Tensor):
    """A matrix (or several) of float32 elements that is kept packed: ``packed`` are its bytes, ``packing`` says how."""

    packed: Tensor
    packing: str
    turned: bool

    @staticmethod
    def __new__(cls, packed: Tensor, packing: str, turned: bool = False) -> QuantizedTensor:  # noqa: PYI034
        elements, size = PACKINGS[packing]
        shape = [*packed.shape[:-1], packed.shape[-1] // size * elements]
        if turned:
            shape[-2:] = shape[-1], shape[-2]
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=packed.device)  # pyright: ignore[reportAttributeAccessIssue]
        made.packed, made.packing, made.turned = packed, packing, turned
        return made

    @property
    def packed_bytes(self) -> int:
        """How much memory it takes."""
        return self.packed.nbytes

    def dequantize(self) -> Tensor:
        """Its elements, as an ordinary tensor."""
        plain = ops.dequantize(self.packed, self.packing)
        return plain.transpose(-1, -2) if self.turned else plain

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.packing}, shape={tuple(self.shape)}, device={str(self.device)!r})"

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _made, (self.packed, self.packing, self.turned, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            packed = copy.deepcopy(self.packed, memo)
            memo[id(self)] = _made(packed, self.packing, self.turned, isinstance(self, torch.nn.Parameter))
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed"], (self.packing, self.turned)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], how: Any, _size: Any, _stride: Any) -> QuantizedTensor:
        return QuantizedTensor(inner["packed"], *how)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _FUNCTIONS.get(getattr(func, "_qualified_op_name", func))
        if known is not None:
            found = known(*args, **kwargs)
            if found is not NotImplemented:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT:
                return func(*args, **kwargs)
            _refuse_writes(func, args, kwargs)
            args, kwargs = _unpacked((args, kwargs), func)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._with(args[0].packed)
        _refuse_writes(func, args, kwargs or {})
        args, kwargs = _unpacked((args, kwargs or {}), func)
        return func(*args, **kwargs)

    def _with(self, packed: Tensor | None = None, turned: bool | None = None) -> QuantizedTensor:
        packed = self.packed if packed is None else packed
        return QuantizedTensor(packed, self.packing, self.turned if turned is None else turned)


def _made(packed: Tensor, packing: str, turned: bool, is_parameter: bool) -> Any:
    made = QuantizedTensor(packed, packing, turned)
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


_ABOUT: set[Any] = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.is_floating_point),
    *(torch.Tensor.requires_grad_, torch.Tensor.is_contiguous, torch.Tensor.element_size, torch.Tensor.detach),
    *(torch.Tensor.storage_offset, torch.Tensor.is_complex, torch.Tensor.__hash__, torch.Tensor.__len__),
    *(torch.Tensor.ndimension, torch.Tensor.nelement, torch.is_floating_point, torch.is_complex),
    *(torch.Tensor.is_inference, torch.Tensor.get_device, torch.Tensor.is_conj, torch.Tensor.is_neg),
    *(torch.Tensor.is_signed, torch.Tensor.is_pinned, torch.Tensor.is_shared, torch._has_compatible_shallow_copy_type),  # pyright: ignore[reportPrivateImportUsage]
    *(
        function
        for name, attribute in vars(torch._C.TensorBase).items()
        if inspect.isgetsetdescriptor(attribute) and name not in ("H", "T", "data", "imag", "mH", "mT", "real")
        for function in (attribute.__get__, attribute.__set__)  # pyright: ignore[reportAttributeAccessIssue]
    ),
}
"""What asks for its geometry, and no elements."""

_WRITES = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_WRITES |= {"__setitem__", "__set__"}
"""Functions that write to their first argument, beside those whose names end so (``mul_``)."""

_said: set[str] = set()


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name  # of a property


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """A write would be one to a copy of its elements, and lost."""
    name = _name_of(func).partition(".")[0]
    in_place = getattr(func, "__name__", "") in _WRITES or (name.endswith("_") and not name.endswith("__"))
    written = (args[:1] if in_place else ()), kwargs.get("out")
    if any(isinstance(one, QuantizedTensor) for one in tree_leaves(written)):
        raise RuntimeError(f"{name} cannot write to a packed matrix: write to what its dequantize() returns")


def _unpacked(given: Any, func: Any) -> Any:
    for one in tree_leaves(given):
        if isinstance(one, QuantizedTensor) and _name_of(func) not in _said:
            _said.add(_name_of(func))
            warnings.warn(
                f"{_name_of(func)} has no form for packed matrices: one of {one.packing} is unpacked for it, to "
                f"{one.numel() * 4} bytes (said once for each operation)",
                stacklevel=3,
            )
    return tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, given)


# --- what it has forms for -------------------------------------------------------------------------------------------


def _linear(x: Any, weight: Any, bias: Any = None, activation: str = "none") -> Any:
    if not isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor) or isinstance(bias, QuantizedTensor):
        return NotImplemented
    if weight.turned or weight.dim() != 2:
        return NotImplemented
    return ops.quantized_linear(x, weight.packed, bias, weight.packing, activation)


def _matmul(x: Any, other: Any) -> Any:
    if not isinstance(other, QuantizedTensor) or not other.turned:
        return NotImplemented
    return _linear(x, other._with(turned=False)) if other.dim() == 2 else NotImplemented


def _addmm(bias: Any, x: Any, other: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    if not isinstance(other, QuantizedTensor) or not other.turned or other.dim() != 2:
        return NotImplemented
    if out is not None or bias.dim() != 1 or (beta, alpha) != (1, 1):
        return NotImplemented
    return _linear(x, other._with(turned=False), bias)


def _some(tensor: Any, index: Any) -> Any:
    """One of several matrices, or some of them: experts."""
    is_tensor = isinstance(index, Tensor) and not index.is_floating_point() and index.dtype is not torch.bool
    if tensor.dim() < 3 or not (is_tensor or type(index) is int):
        return NotImplemented
    return tensor._with(tensor.packed[index])


def _copy(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(source, QuantizedTensor) or not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    if (tensor.packing, tensor.turned, tensor.shape) != (source.packing, source.turned, source.shape):
        return NotImplemented
    tensor.packed.copy_(source.packed, non_blocking)
    return tensor


def _channel_mix(x: Any, shift: Any, mix: Any, key: Any, value: Any, lengths: Any = None) -> Any:
    mixed, last = ops.token_shift(x, shift, mix.unsqueeze(0), lengths)
    hidden = ops.fast_linear(mixed.squeeze(0), key, None, "squared_relu")
    return ops.fast_linear(hidden, value), last


def _embedding(input: Any, weight: Any, _padding: Any = None, max_norm: Any = None, *_: Any, **named: Any) -> Any:
    if not isinstance(weight, QuantizedTensor) or weight.turned or max_norm or named.get("max_norm"):
        return NotImplemented
    return ops.dequantize(torch.nn.functional.embedding(input, weight.packed), weight.packing)


def _turned(tensor: Any, *dims: int) -> Any:
    rank = tensor.dim()
    if rank < 2 or (dims and {dim % rank for dim in dims} != {rank - 2, rank - 1}) or (not dims and rank != 2):
        return NotImplemented
    return tensor._with(turned=not tensor.turned)


def _to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is not None and dtype.is_floating_point and dtype is not torch.float32:
        dtype = None  # the elements of a packed matrix have a type of their own
    if dtype not in (None, torch.float32):
        return NotImplemented
    return tensor if device is None else tensor._with(tensor.packed.to(device))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.nn.functional.embedding: _embedding,
    "marid::fast_linear": _linear,
    "marid::linear_activation": _linear,
    "marid::channel_mix_v7": _channel_mix,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm), _matmul),
    **dict.fromkeys((torch.t, torch.Tensor.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__), _turned),
    **dict.fromkeys((torch.transpose, torch.Tensor.transpose), _turned),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
    torch.Tensor.__getitem__: _some,
    torch.Tensor.copy_: _copy,
    torch.Tensor.data.__get__: lambda tensor: tensor._with(),  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda tensor: tensor._with(tensor.packed.cpu()),
    torch.Tensor.contiguous: lambda tensor, **_: NotImplemented if tensor.turned else tensor,
    torch.Tensor.clone: lambda tensor, **_: tensor._with(tensor.packed.clone()),
    # Its elements have a type of their own, as for ``to``.
    **dict.fromkeys(
        (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double), lambda tensor, **_: tensor
    ),
}
