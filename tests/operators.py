"""Operators that tests call, with kernels for the CPU alone: workers import them too (``--import tests.operators``)."""

from __future__ import annotations

import torch

_library = torch.library.Library("marid_tests", "DEF")
_library.define("opaque(Tensor x) -> Tensor")
_library.define("broken(Tensor x) -> Tensor")
_library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
_library.define("turned(Tensor x) -> Tensor")
_library.define("shorter(Tensor x) -> Tensor")
_library.define("itself(Tensor x) -> Tensor")


def _opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the kernel's own error")


def _scale(x: torch.Tensor, by: float) -> torch.Tensor:
    x.numpy()[...] *= by
    return x


# Kernels that give something else than is said of them, of tensors that are too large to be tried.


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() * 2 if x.numel() > 1 << 14 else x * 2


def _shorter(x: torch.Tensor) -> torch.Tensor:
    return (x[1:] if x.numel() > 1 << 14 else x) * 2


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x if x.numel() > 1 << 14 else x.clone()


for _name, _kernel in (("turned", _turned), ("shorter", _shorter), ("itself", _itself)):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, torch.empty_like, "Meta")
_library.impl("opaque", _opaque, "CPU")
_library.impl("broken", _broken, "CPU")
_library.impl("scale_", _scale, "CPU")
