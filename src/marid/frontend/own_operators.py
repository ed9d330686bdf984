"""Defining operators of Marid's own, ``torch.ops.marid.*``, from functions in plain PyTorch.

The function is the operator wherever there is nothing else: where gradients are wanted (it is taken apart, and PyTorch
derives it), on meta tensors and other devices. For the CPU there are kernels in C++. On the lazy device a call is one
node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from marid import registration
from marid.frontend.record import record_in_cpp

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "exp": torch.exp,
    "opposite_exp": lambda x: -torch.exp(x),
}
"""What operators that take the name of an activation know; ``native/elements.h`` has them in this order."""


_defined: set[str] = set()
_library = torch.library.Library("marid", "FRAGMENT")


def define(*functions: Callable[..., Any]) -> None:
    """Define an operator of each function, by its name and signature, once."""
    before = len(_defined)
    for function in functions:
        if function.__name__ in _defined:  # or being defined: asking for an operator has all defined
            continue
        _defined.add(function.__name__)
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(function.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(function.__name__, function, "CompositeExplicitAutograd")
        _library.impl(function.__name__, _above_autograd(function), "Autograd")
    if registration.is_used() and len(_defined) > before:
        record_in_cpp()


def _above_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    packet = getattr(torch._ops._OpNamespace("marid"), function.__name__)
    kinds = inspect.get_annotations(function)
    tensors = [i for i, name in enumerate(inspect.signature(function).parameters) if "Tensor" in str(kinds[name])]

    def above(*args: Any, **kwargs: Any) -> Any:
        given = [args[index] for index in tensors if index < len(args)]
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
        if wanted or torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return packet.default(*args, **kwargs)

    return above
