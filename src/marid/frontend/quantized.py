"""Tensors that stay packed: ``QuantizedTensor``, a matrix as it is in a GGUF file.

Products by it (``linear``, ``matmul`` with its transpose, and Marid's own layers) unpack it in registers, and looking
up rows (``embedding``) unpacks these. Every other operation is done on its float32 elements, which are unpacked for it,
and says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marid.frontend.quantized_operators import PACKINGS

__all__ = ["QuantizedTensor"]

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
        return QuantizedTensor, (self.packed, self.packing, self.turned)

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
            return func(*_unpacked(args, func), **_unpacked(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._with(args[0].packed)
        return func(*_unpacked(args, func), **_unpacked(kwargs or {}, func))

    def _with(self, packed: Tensor | None = None, turned: bool | None = None) -> QuantizedTensor:
        packed = self.packed if packed is None else packed
        return QuantizedTensor(packed, self.packing, self.turned if turned is None else turned)


_ABOUT: set[Any] = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.is_floating_point),
    *(torch.Tensor.requires_grad_, torch.Tensor.is_contiguous, torch.Tensor.element_size, torch.Tensor.detach),
    *(torch.Tensor.storage_offset, torch.Tensor.is_complex, torch.Tensor.__hash__, torch.Tensor.__len__),
    *(torch.Tensor.ndimension, torch.Tensor.nelement, torch.is_floating_point, torch.is_complex),
    *(torch.Tensor.is_inference, torch.Tensor.get_device, torch.Tensor.is_conj, torch.Tensor.is_neg),
    *(torch.Tensor.is_signed, torch.Tensor.is_pinned, torch.Tensor.is_shared),
    *(
        function
        for name in "shape dtype device layout requires_grad is_leaf grad grad_fn ndim nbytes names is_sparse "
        "is_quantized is_meta is_cpu is_cuda is_nested is_mkldnn itemsize _backward_hooks "
        "_post_accumulate_grad_hooks output_nr _version retains_grad is_sparse_csr".split()
        if (attribute := getattr(torch.Tensor, name, None)) is not None
        for function in (getattr(attribute, "__get__", None), getattr(attribute, "__set__", None))
        if function is not None
    ),
}
"""What asks for its geometry, and no elements."""

_said: set[str] = set()


def _unpacked(arg: Any, func: Any) -> Any:
    if isinstance(arg, QuantizedTensor):
        name = getattr(func, "__name__", str(func))
        if name not in _said:
            _said.add(name)
            warnings.warn(
                f"{name} has no form for packed matrices: one of {arg.packing} is unpacked for it, to "
                f"{arg.numel() * 4} bytes (said once for each operation)",
                stacklevel=4,
            )
        return arg.dequantize()
    if isinstance(arg, (tuple, list)):
        return type(arg)([_unpacked(item, func) for item in arg])
    if isinstance(arg, dict):
        return {name: _unpacked(item, func) for name, item in arg.items()}
    return arg


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
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda tensor: tensor._with(tensor.packed.cpu()),
    torch.Tensor.contiguous: lambda tensor, **_: NotImplemented if tensor.turned else tensor,
    torch.Tensor.clone: lambda tensor, **_: tensor._with(tensor.packed.clone()),
    torch.Tensor.float: lambda tensor, **_: tensor,
}
