"""What can be seen of a training from Python, and how two of them differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from marid.errors import MaterializationError

from .programs import same

__all__ = ["KINDS", "Difference", "Observer", "differences"]

KINDS = ("raises", "values", "shape", "dtype", "requires_grad", "strides")
_LOOKS = KINDS[2:]


@dataclass
class Seen:
    """A tensor (or a number, as its value) at a step. ``value`` is None where it was not read."""

    name: str
    looks: tuple[Any, ...] | None
    value: Any = None


@dataclass
class Difference:
    """How the device differs from the CPU, as one of ``KINDS``, and where."""

    kind: str
    name: str
    what: str

    def is_like(self, other: Difference) -> bool:
        """Whether two networks seem to differ for one reason."""
        return self.kind == other.kind and (self.kind != "raises" or self.name == other.name)

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}: {self.what}"


@dataclass
class Observer:
    """Notes what a training has at each step: geometry always, values at each step or at the end only."""

    each_step: bool
    seen: list[Seen] = field(default_factory=list)
    error: Exception | None = None
    _held: list[tuple[Seen, torch.Tensor]] = field(default_factory=list)

    def __call__(self, step: int, last: bool, names: dict[str, Any]) -> None:
        for name, value, is_new in _named(names):
            seen = Seen(f"{name} at step {step}", None)
            self.seen.append(seen)
            if not isinstance(value, torch.Tensor):
                seen.value = repr(value)
                continue
            seen.looks = _looks(value)
            if self.each_step or last:
                seen.value = _read(value)
            elif is_new:  # nobody writes it later
                self._held.append((seen, value.detach()))
        if last:
            for seen, tensor in self._held:
                seen.value = _read(tensor)
            self._held.clear()


def _named(names: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """All that a training holds, by name; and whether it is made anew at each step."""
    for name in ("loss", "out"):
        yield name, names.get(name), True
    x, net, optimizer = names.get("x"), names["net"], names.get("optimizer")
    if isinstance(x, torch.Tensor) and x.is_leaf:
        yield "x.grad", x.grad, True
    for name, parameter in net.named_parameters():
        yield name, parameter, False
        yield f"{name}.grad", parameter.grad, False
    for name, buffer in net.named_buffers():
        yield name, buffer, False
    if optimizer is not None:
        of = {parameter: name for name, parameter in net.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                for number, leaf in enumerate(tree_leaves(value)):
                    if not callable(leaf):
                        yield f"optimizer.{of.get(parameter, 'state')}.{key}[{number}]", leaf, False


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, gradient flag and strides."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride()


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def differences(cpu: Observer, device: Observer, tolerance: float) -> list[Difference]:
    """How ``device`` differs from ``cpu``: for each kind the first difference.

    Values are compared bit for bit, or where there is a ``tolerance``, relative to the largest value of the tensor.
    """
    found: dict[str, Difference] = {}
    ours, theirs = _error(cpu.error), _error(device.error)
    if ours != theirs and not _is_wrapped(cpu.error, device.error):
        types = f"{type(cpu.error).__name__}, on the device {type(device.error).__name__}"
        found["raises"] = Difference("raises", types, f"\n  cpu    {ours}\n  device {theirs}")
    for a, b in zip(cpu.seen, device.seen, strict=False):
        for one in _differences(a, b, tolerance):
            found.setdefault(one.kind, one)
    if not found and len(cpu.seen) != len(device.seen):
        found["raises"] = Difference(
            "raises", "the training", f"{len(cpu.seen)} seen, {len(device.seen)} on device; both {ours}"
        )
    return [found[kind] for kind in KINDS if kind in found]


def _differences(a: Seen, b: Seen, tolerance: float) -> Iterator[Difference]:
    if a.name != b.name or (a.looks is None) != (b.looks is None):
        yield Difference("values", a.name, f"cpu {a.value}, device {b.name}: {b.value}")
        return
    for kind, ours, theirs in zip(_LOOKS, a.looks or (), b.looks or (), strict=False):
        if ours != theirs:
            yield Difference(kind, a.name, f"cpu {ours}, device {theirs}")
    if a.value is None or b.value is None:
        return
    if not _equal(a.value, b.value, tolerance):
        yield Difference("values", a.name, _how_much(a.value, b.value))


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if not tolerance or not isinstance(a, torch.Tensor) or not a.is_floating_point() or a.shape != b.shape:
        return same(a, b)
    if not a.numel():
        return True
    tolerance *= {torch.float64: 1e-4, torch.bfloat16: 1e3}.get(a.dtype, 1)
    a, b = a.double(), b.double()
    close = (
        ((a - b).abs() <= tolerance * (1e-2 + a.nan_to_num(0, 0, 0).abs().max())) | (a == b) | (a.isnan() & b.isnan())
    )
    return bool(close.all())


def _how_much(a: Any, b: Any) -> str:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape or not a.numel():
        return f"cpu {a}, device {b}"
    a, b = a.double(), b.double()
    return f"largest difference {(a - b).abs().max().item():.3g}, values up to {a.abs().max().item():.3g}"


_TENSOR_TYPE = re.compile(r"torch\.\w+Tensor|(?:CPU|remote_accelerator)\w+Type")


def _error(error: Exception | None) -> str:
    if error is None:
        return "raises nothing"
    return f"raises {type(error).__name__}: {_TENSOR_TYPE.sub('tensor', str(error))}"


def _is_wrapped(cpu: Exception | None, device: Exception | None) -> bool:
    """Whether the device raised, where a value was read, the error that the CPU raised at the operation."""
    return cpu is not None and isinstance(device, MaterializationError) and isinstance(device, type(cpu))
