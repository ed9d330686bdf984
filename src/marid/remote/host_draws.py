"""Random operators on a device that is not the CPU: drawn on the host, from the CPU's stream, and copied.

A recorded draw is a place in the stream of PyTorch's CPU generator (``graph/twister.py``), and no other device can give
the numbers that are there. So they are the same wherever a program runs.
"""

from __future__ import annotations

from typing import Any

import torch

from marid.graph.node import Operation

__all__ = ["HostDraw", "drawing_on"]

_HOST = torch.device("cpu")


def drawing_on(device: torch.device, op: Operation) -> Operation:
    """What draws the numbers of ``op`` on a device."""
    return op if device.type == _HOST.type else HostDraw(op, device)


class HostDraw(Operation):
    """``of``, for tensors on ``device``: what it is given is copied to the host, and what it has written and made is
    copied back. It can be called like the operator itself, and has its schema."""

    __slots__ = ("_device", "_schema")

    def __init__(self, of: Operation, device: torch.device) -> None:
        super().__init__(of.func, of.mutates, of.view)
        self._device = device
        self._schema = of.func._schema
        self.call = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [to_host(part) for part in item]
            if not isinstance(item, torch.Tensor):
                return item
            copies.append((item, item.to(_HOST, copy=True)))
            return copies[-1][1]

        def to_device(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [to_device(part) for part in item]
            if not isinstance(item, torch.Tensor):
                return item
            given = next((tensor for tensor, copy in copies if copy is item), None)
            return item.to(self._device) if given is None else given

        named = {name: _HOST if name == "device" else to_host(arg) for name, arg in kwargs.items()}
        returned = self.func._op(*[to_host(arg) for arg in args], **named)
        formals = self._schema.arguments
        for formal, arg in [
            *zip(formals, args, strict=False),
            *[(_formal(formals, name), kwargs[name]) for name in kwargs],
        ]:
            if formal.alias_info is not None and formal.alias_info.is_write and isinstance(arg, torch.Tensor):
                arg.copy_(next(copy for tensor, copy in copies if tensor is arg))
        return to_device(returned)


def _formal(formals: Any, name: str) -> Any:
    return next(formal for formal in formals if formal.name == name)
