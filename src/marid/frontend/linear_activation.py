"""``torch.ops.marid.linear_activation(x, weight, bias, activation)``: a layer and its activation as one operator.

It equals ``activation(torch.nn.functional.linear(x, weight, bias))`` bit for bit; the activation is written over the
product. On the lazy device it is one node. Under autocast it takes its operands as they are. On the CPU without
gradients ``native/gemm/fast_linear.cpp`` computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marid.ops.own_operators import define, of_function

aten = torch.ops.aten


def _silu_backward(grad: Tensor, _out: Tensor, product: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return aten.silu_backward(grad, product)
    share = torch.sigmoid(product)  # the kernel has no derivative of its own
    return grad * share * (1 + product * (1 - share))


_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "squared_relu": lambda y: torch.relu_(y).square_(),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "silu": lambda y: torch.nn.functional.silu(y, inplace=True),
    "gelu": aten.gelu_.default,
    "gelu_tanh": lambda y: aten.gelu_.default(y, approximate="tanh"),
}
ACTIVATIONS = tuple(_IN_PLACE)

# The derivative from the gradient, the result and the product; the last is kept only where the result does not suffice.
_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda grad, _out, _product: grad,
    "relu": lambda grad, out, _product: aten.threshold_backward(grad, out, 0),
    "squared_relu": lambda grad, _out, product: grad * (2 * torch.relu(product)),
    "sigmoid": lambda grad, out, _product: aten.sigmoid_backward(grad, out),
    "tanh": lambda grad, out, _product: aten.tanh_backward(grad, out),
    "silu": _silu_backward,
    "gelu": lambda grad, _out, product: aten.gelu_backward(grad, product),
    "gelu_tanh": lambda grad, _out, product: aten.gelu_backward(grad, product, approximate="tanh"),
}
_NEEDS_PRODUCT = {"squared_relu", "silu", "gelu", "gelu_tanh"}

_AUTOCAST = [
    key for key in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1") if hasattr(torch._C.DispatchKey, key)
]


def _check(activation: str) -> None:
    if activation not in _IN_PLACE:
        raise ValueError(f"linear_activation() knows {', '.join(ACTIVATIONS)}, but got {activation!r}")


class _without_autocast:
    def __enter__(self) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST[0]))
        for name in _AUTOCAST[1:]:
            keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        self._guard = torch._C._ExcludeDispatchKeyGuard(keys)
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)  # pyright: ignore[reportArgumentType]


def linear_activation(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The activation of ``torch.nn.functional.linear(x, weight, bias)``. Raises ``ValueError`` for an unknown one."""
    _check(activation)
    with _without_autocast():
        return _IN_PLACE[activation](torch.nn.functional.linear(x, weight, bias))


def _linear_activation(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """What it is where gradients are wanted: the same, and what they need of the product."""
    _check(activation)
    with _without_autocast():
        product = torch.nn.functional.linear(x, weight, bias)
        if activation not in _NEEDS_PRODUCT:
            return _IN_PLACE[activation](product), product.new_empty(0)
        return _IN_PLACE[activation](product.clone()), product


def _wanting_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if not torch._C._are_functorch_transforms_active():
        return torch.ops.marid._linear_activation(x, weight, bias, activation)[0]
    _check(activation)  # transforms derive only what PyTorch itself defines
    product = torch.nn.functional.linear(x, weight, bias)
    return product if activation == "none" else _IN_PLACE[activation](product.clone())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.activation = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, *output)


def _backward(ctx: Any, grad: Tensor | None, grad_of_product: Tensor | None) -> tuple[Any, ...]:
    x, weight, out, product = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    grads = [] if grad is None else [_BACKWARD[ctx.activation](grad, out, product)]
    if grad_of_product is not None and ctx.activation in _NEEDS_PRODUCT:
        grads.append(grad_of_product)
    if not grads:
        return None, None, None, None
    total = grads[0] if len(grads) == 1 else grads[0] + grads[1]
    rows = total.reshape(-1, total.shape[-1]) if weight.dim() == 2 else total.reshape(-1, 1)
    matrix = weight if weight.dim() == 2 else weight.unsqueeze(0)
    grad_x = (rows @ matrix).reshape(x.shape) if wants_x else None
    grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).reshape(weight.shape) if wants_weight else None
    grad_bias = (rows.sum(0) if weight.dim() == 2 else rows.sum()) if ctx.has_bias and wants_bias else None
    return grad_x, grad_weight, grad_bias, None


def _vmap(keeps: bool) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Any:
        # Everything gets a leading batch dimension, and the product is a batched one.
        def led(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        several = led(x, in_dims[0])
        matrices = led(weight, in_dims[1])
        flat = several.reshape(info.batch_size, -1, several.shape[-1])
        product = torch.bmm(flat, matrices.transpose(1, 2)).reshape(*several.shape[:-1], matrices.shape[1])
        if bias is not None:
            row = led(bias, in_dims[2])
            product = product + row.reshape(info.batch_size, *(1,) * (product.dim() - 2), -1)
        out = _IN_PLACE[activation](product.clone())
        if not keeps:
            return out, 0
        kept = product if activation in _NEEDS_PRODUCT else product.new_empty(info.batch_size, 0)
        return (out, kept), (0, 0)

    return rule


define(
    of_function(linear_activation, wanting_gradients=_wanting_gradients, vmap=_vmap(keeps=False)),
    of_function(_linear_activation, derivative=(_backward, _setup_context), vmap=_vmap(keeps=True)),
)
