"""Defining operators of Marid's own, ``torch.ops.marid.*``, that are written in Python: a record for each.

Most are functions in plain PyTorch (``of_function``). The function is the operator wherever there is nothing else:
where gradients are wanted (it is taken apart, and PyTorch derives it), on meta tensors and other devices. For the CPU
there may be kernels in C++. On the lazy device a call is one node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]

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


@dataclass(frozen=True)
class OwnOperator:
    """What an operator is: its schema, with its name, and its kernels by dispatch key.

    ``derivative`` and ``vmap`` are what ``torch.library.register_autograd`` takes (the backward, and what keeps what
    that needs) and ``register_vmap``, for an operator that PyTorch cannot take apart.
    """

    schema: str
    kernels: dict[str, Function]
    derivative: tuple[Function, Function] | None = None
    vmap: Function | None = None
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)


_defined: set[str] = set()
_library = torch.library.Library("marid", "FRAGMENT")
_to_call: Callable[[], None] | None = None


def define(*operators: OwnOperator) -> tuple[str, ...]:
    """Define each of these operators, once. Returns their names."""
    names = tuple([one.schema.partition("(")[0] for one in operators])
    for name, one in zip(names, operators, strict=True):
        if name in _defined:
            continue
        _defined.add(name)
        _library.define(one.schema, tags=one.tags)
        for key, kernel in one.kernels.items():
            _library.impl(name, kernel, key)
        if one.derivative is not None:
            backward, keep = one.derivative
            torch.library.register_autograd(f"marid::{name}", backward, setup_context=keep, lib=_library)
        if one.vmap is not None:
            torch.library.register_vmap(f"marid::{name}", one.vmap, lib=_library)
    if _to_call is not None:
        _to_call()
    return names


def when_defined(call: Callable[[], None]) -> None:
    """Call this now, and from now on when operators have been defined."""
    global _to_call
    call()
    _to_call = call


def of_function(function: Function, wanting_gradients: Function | None = None, **more: Any) -> OwnOperator:
    """The operator that a function is, by its name and signature, with ``more`` of its record.

    Unless it has a derivative, ``wanting_gradients``, or else the function itself, is called above autograd where
    gradients are wanted or a transform of functions is active.
    """
    schema = function.__name__ + torch.library.infer_schema(function, mutates_args=())
    kernels = {"CompositeExplicitAutograd": function}
    if "derivative" not in more:
        kernels["Autograd"] = _above_autograd(function, wanting_gradients or function)
    return OwnOperator(schema, kernels, **more)


def _above_autograd(function: Function, wanting_gradients: Function) -> Function:
    kinds = inspect.get_annotations(function)
    tensors = [i for i, name in enumerate(inspect.signature(function).parameters) if "Tensor" in str(kinds[name])]

    def above(*args: Any, **kwargs: Any) -> Any:
        given = [args[index] for index in tensors if index < len(args)]
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
        if wanted or torch._C._are_functorch_transforms_active():
            return wanting_gradients(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.marid, function.__name__).default(*args, **kwargs)

    return above
