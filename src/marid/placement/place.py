"""``marid.place``: where the layers of a model go, and bringing them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.placement.forward import Forward, forward_of, owner
from marid.placement.measure import data_bytes, link_speed, speeds
from marid.placement.moving import Together
from marid.placement.plan import Cost, Device, Needs, chosen, cost_of
from marid.report.units import bytes_text
from marid.semantics.tracebacks import folded


@dataclass
class Placement:
    """Where the layers of a model go; printed, a table of that.

    ``devices`` are indices of the device, in the order of the layers; ``at`` has the index for each layer (a module
    that owns parameters or buffers), by the module's path. ``forward_bytes`` and ``backward_bytes`` go from one device
    to another in a step. ``limits`` are the bytes that each device had left.
    """

    model: nn.Module
    devices: tuple[int, ...]
    at: dict[str, int]
    limits: dict[int, int | None]
    forward: Forward
    cost: Cost

    @property
    def forward_bytes(self) -> int:
        """Bytes between devices in a forward."""
        return self.cost.forward_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes between devices in a backward; 0 unless the placement is for training."""
        return self.cost.backward_bytes

    @property
    def input_device(self) -> torch.device:
        """Where inputs are expected."""
        return _device(self.devices[0])

    @property
    def output_device(self) -> torch.device:
        """Where the last result of the forward is made."""
        return _device(self.devices[0] if self.cost.output is None else self.cost.output)

    def __post_init__(self) -> None:
        self._together = Together(self.devices)
        self._is_applied = False

    def apply(self) -> Placement:
        """Bring the layers to their devices, and have operands of different devices brought together whenever the model
        runs. Once is enough."""
        if self._is_applied:
            return self
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        owners = {id(tensor): owner(name) for name, tensor in tensors}

        def moved(tensor: Tensor) -> Tensor:
            layer = owners.get(id(tensor))  # of parameters that two modules share, the first one's
            return tensor if layer is None else tensor.to(_device(self.at[layer]))

        for module in self.model.modules():
            module._apply(moved, recurse=False)
        self._together.hook(self.model)
        self._is_applied = True
        return self

    def release(self) -> None:
        """Let the model run as any other; its layers stay where they are."""
        self._together.unhook()
        self._is_applied = False

    def __str__(self) -> str:
        lines = [f"{'device':<22}{'layers':>10}{'activations':>13}{'of':>11}{'GFLOP':>9}  from .. to"]
        for index in self.devices:
            names = [layer or "(the model itself)" for layer, where in self.at.items() if where == index]
            if names:
                room = self.limits[index]
                lines.append(
                    f"{_device(index)!s:<22}{bytes_text(self.cost.layers.get(index, 0)):>10}"
                    f"{bytes_text(self.cost.activations.get(index, 0)):>13}"
                    f"{'any' if room is None else bytes_text(room):>11}"
                    f"{self.cost.flops.get(index, 0) / 1e9:>9.2f}  {names[0]} .. {names[-1]}"
                )
        back = f", {bytes_text(self.backward_bytes)} in its backward" if self.backward_bytes else ""
        lines.append(f"{bytes_text(self.forward_bytes)} between devices in a forward{back}")
        return "\n".join(lines)


def _device(index: int) -> torch.device:
    return torch.device(handles.DEVICE_TYPE, index)


def _room(index: int) -> int | None:
    """Bytes that a worker has left; None for no limit."""
    said = engine_of(index).worker_stats()
    if not said or not said.get("memory_limit"):
        return None
    return max(0, said["memory_limit"] - said["bytes"] - said["other_bytes"])


@folded
def place(
    model: nn.Module,
    devices: Sequence[int | str | torch.device],
    *examples: Any,
    training: bool = False,
    states: int = 5,
    limits: Sequence[int | None] | None = None,
    apply: bool = True,
    **named: Any,
) -> Placement:
    """Divide the layers of ``model`` over ``devices``, and bring them there.

    ``model(*examples, **named)`` is followed on shapes alone: nothing runs, and no memory is taken. Layers in the order
    of their use are divided into stretches, one for a device, so that a step takes the least time: operations by the
    measured speed of each device, bytes between devices by the measured speed of their links, within the memory that
    each has. So a model that fits on the fastest device goes there as a whole, and one that does not is divided where
    the fewest bytes go on. What layers keep (a KV cache, the state of an optimizer) lies with them.

    From then on, whenever the model runs, operands that lie on different devices are brought together: on the device
    of a parameter, or else on the later one. Gradients go back the same way. Inputs belong on
    ``placement.input_device``, labels on ``placement.output_device``.

    ``training`` counts the activations that the backward needs, with their gradients, and ``states`` times the bytes of
    each parameter that is trained (5: its gradient, two of an AdamW, and what a step of it works with); bytes of the
    backward too. These are estimates. ``limits`` are the bytes of each device, where they are not what its worker has
    left of its limit (none for devices of this process). With ``apply=False`` the placement is only returned, to be
    looked at; ``placement.apply()`` does the rest.

    Raises ``MemoryLimitError``, naming the largest layers, where they cannot be divided so that they fit;
    ``UnsupportedOperationError`` where the forward depends on values; ``ValueError`` for no devices, or one twice.
    """
    indices = [_index(device) for device in devices]
    if not indices or len(set(indices)) < len(indices):
        raise ValueError(f"marid.place() takes one device or more, each once; it was given {[*devices]}")
    if limits is not None and len(limits) != len(indices):
        raise ValueError(f"marid.place() takes a limit for each of {len(indices)} devices; it was given {len(limits)}")
    forward = forward_of(model, examples, named, training)
    rooms = [_room(index) for index in indices] if limits is None else limits
    nbytes = data_bytes(rooms)
    measured, link = speeds(indices, nbytes), link_speed(indices, nbytes)
    needs = Needs(training, states if training else 0)
    given = [Device(index, room, measured[index]) for index, room in zip(indices, rooms, strict=True)]
    at = chosen(forward, given, link, needs)
    order = tuple(dict.fromkeys(at.values()))
    placement = Placement(
        model, order, at, dict(zip(indices, rooms, strict=True)), forward, cost_of(forward, at, order, needs)
    )
    return placement.apply() if apply else placement


def _index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        device = _device(device)
    device = torch.device(device)
    if device.type != handles.DEVICE_TYPE:
        raise ValueError(f"marid.place() takes devices of the type {handles.DEVICE_TYPE}, and not {device}")
    return device.index or 0
