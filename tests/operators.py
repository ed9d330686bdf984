"""Operators that tests call, with kernels for the CPU alone: workers import them too (``--import tests.operators``)."""

from __future__ import annotations

import torch

_library = torch.library.Library("marid_tests", "DEF")
_library.define("opaque(Tensor x) -> Tensor")
_library.define("broken(Tensor x) -> Tensor")
_library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")


def _opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the kernel's own error")


def _scale(x: torch.Tensor, by: float) -> torch.Tensor:
    x.numpy()[...] *= by
    return x


_library.impl("opaque", _opaque, "CPU")
_library.impl("broken", _broken, "CPU")
_library.impl("scale_", _scale, "CPU")
