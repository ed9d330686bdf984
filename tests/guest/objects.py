"""Tensors, modules and functions as Python objects: pickles, modes, subclasses, copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from tests.guest.common import Small, data, use
from tests.guest.programs import several


@use
def pickling() -> Any:
    functions = [torch.topk, torch.chunk, torch.sort, torch.unbind, torch.set_num_threads, F.linear]
    back = [pickle.loads(pickle.dumps(function)) is function for function in functions]
    model = pickle.loads(pickle.dumps(Small()))
    file = io.BytesIO()
    torch.save({"x": data(2), "model": model.state_dict()}, file)
    file.seek(0)
    return back, model(data(1, 4)), torch.load(file, weights_only=True)


@use
def names_of_functions() -> Any:
    functions = [torch.topk, torch.chunk, torch.Tensor.add, torch.nn.functional.softmax, torch.Tensor.split]
    return [resolve_name(function) for function in functions]


@use
def function_modes() -> Any:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((resolve_name(func), func is torch.topk, func is torch.chunk, len(types)))
            return func(*args, **(kwargs or {}))

    with Mode():
        several(data(4, 4))
    return seen


@use
def dispatch_modes() -> Any:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        Small()(data(2, 4)).sum().backward()
    return seen


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        CALLS.append(str(func))
        out = func(*tree_map_only(Wrapped, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, out)


CALLS: list[str] = []


@use
def subclasses() -> Any:
    class Plain(torch.Tensor):
        pass

    CALLS.clear()
    x = Wrapped(data(4, 4))
    out = (x @ x.t() + 1).relu().split(2)[0].inner
    plain = data(3).as_subclass(Plain)
    return CALLS, out, type(plain + 1).__name__, type(plain.topk(2)).__name__


@use
def copies() -> Any:
    model = Small()
    twin = copy.deepcopy(model)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    copied = copy.deepcopy(lazy)
    return [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)], lazy(
        data(3, 4)
    ).shape == copied(data(3, 4)).shape


@use
def attributes() -> Any:
    """Of what one could have replaced: names, modules, texts."""
    things = [
        *(torch.topk, torch.set_num_threads, torch._C._set_default_dtype, nn.Module.__call__, nn.Module._apply),
        *(nn.TransformerEncoder.forward, nn.UninitializedParameter.__new__, torch.autograd.backward),
    ]
    return [(thing.__name__, getattr(thing, "__module__", None)) for thing in things]


@use
def moving_modules() -> Any:
    """With the caller's function, child by child and parameter by parameter; what fails midway leaves what was done."""

    class Watched(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            seen.append(fn.__qualname__.rpartition(".")[2])
            return super()._apply(fn, recurse)

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        seen.append([parameter.dtype for parameter in model.parameters()])
        if len(seen) > 4:
            raise KeyError("enough")
        return tensor.half()

    seen: list[Any] = []
    model = nn.Sequential(Watched(2, 2), nn.Sequential(Watched(2, 2)))
    try:
        model._apply(halved)
    except KeyError as error:
        seen.append(str(error))
    return [str(one) for one in seen], [parameter.dtype for parameter in model.parameters()]
