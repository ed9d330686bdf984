"""What an operator has returned on a worker, as the client takes note of it."""

from __future__ import annotations

from typing import Any

from marid.engine.protocol import Returned
from marid.remote.client.memory import Block, Memory, RemoteBuffer, geometry_of_spec
from marid.remote.client.steps import CallWork
from marid.remote.wire.codec import as_int, as_list, as_text
from marid.remote.wire.tensors import spec_from

__all__ = ["Returns"]

_RESULTS = 1 << 12  # handles set aside for what an operator returns


class Returns:
    """Reads what an operator returned, noting the new ``blocks`` and ``handles``, and the ``extra`` ones: further
    handles of its arguments."""

    def __init__(self, memory: Memory, buffers: list[RemoteBuffer], step: CallWork) -> None:
        self.blocks: list[Block] = []
        self.handles: list[int] = []
        self.extra: list[int] = []
        self._memory = memory
        self._buffers = buffers
        self._site = step.site
        self._base = step.base

    def read(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.read(one) for one in item]
        if not isinstance(item, dict):
            return item
        if "c" in item:
            return complex(*item["c"])
        handle, spec, layout, same_as, base = as_list(item["t"], 5, "a result")
        for index in (same_as, base):
            if index is not None:
                as_int(index, 0, len(self._buffers) - 1, "an argument")
        if layout is not None:
            return Returned(None, None, as_text(layout, 64, "a layout"))
        geometry = geometry_of_spec(spec_from(spec))
        if same_as is not None:
            self.extra.append(as_int(handle, self._base, self._base + _RESULTS - 1, "a handle"))
            return Returned(self._buffers[same_as], geometry, None, same_as, base)
        self.handles.append(as_int(handle, self._base, self._base + _RESULTS - 1, "a handle"))
        if base is None:
            self.blocks.append(Block(geometry, self._site))
            block = self.blocks[-1]
        else:
            block = self._buffers[base].block
        return Returned(self._memory.made(handle, geometry, block, None), geometry, None, None, base)
