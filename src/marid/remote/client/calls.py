"""Operators that a worker runs at once: the step that asks for one, and what it has returned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from marid.engine.protocol import Called, Returned
from marid.errors import WireError
from marid.remote.client.memory import Block, Memory, RemoteBuffer, extent_of, geometry_of_spec
from marid.remote.client.steps import Sent, Step, configure
from marid.remote.wire.codec import as_int, as_list, as_text
from marid.remote.wire.kernel_settings import current
from marid.remote.wire.requests import (
    Call,
    Handle,
    Request,
)
from marid.remote.wire.tensors import spec_from

__all__ = ["RESULTS", "CallStep"]


RESULTS = 1 << 12
"""Handles that are set aside for what an operator returns."""


class CallStep(Step):
    """One operator, at once. ``result`` is what the worker answered."""

    may_crash = True

    def __init__(
        self,
        operator: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        state: bytes | None,
        base: int,
        site: Any,
    ) -> None:
        self._request = Call(operator, args, kwargs, state, base)
        self.operator = operator
        self.inputs = tuple([arg.number for arg in _handles((*args, *(arg for _, arg in kwargs)))])
        self.base = base
        self.site = site
        self._settings = current()
        self.result: Any = None
        self.error: Exception | None = None
        self.extra: tuple[int, ...] = ()
        """Further handles of its arguments, which nobody needs."""

    def requests(self, sent: Sent) -> list[Request]:
        return [*configure(self._settings, sent), self._request]

    def done(self, result: Any) -> None:
        super().done(result)
        self.result = result

    def refused(self) -> bool:
        return False  # whoever called asks again

    def called(self, memory: Memory, buffers: list[RemoteBuffer]) -> Called:
        """What the operator has returned for these arguments, which are what it has made of them from now on. Raises
        ``WireError``."""
        parts = _Returns(memory, buffers, self)
        try:
            returned = parts.read(self.result["returned"])
            geometries = [geometry_of_spec(spec_from(spec)) for spec in self.result["arguments"]]
            state = self.result["state"]
            after = None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)
            if len(geometries) != len(buffers):
                raise WireError("a call has as many arguments as it was given")
        except (LookupError, TypeError, ValueError, WireError) as error:
            raise WireError(f"what {self.operator} returned cannot be read: {error}") from None
        for buffer, geometry in zip(buffers, geometries, strict=True):
            if geometry != buffer.geometry:
                buffer.geometry = geometry
                buffer.block.nbytes = max(buffer.block.nbytes, extent_of(geometry))
                memory.alive[buffer.handle] = buffer.block, geometry
        self.makes, self.handles, self.extra = tuple(parts.blocks), (*parts.handles, *parts.extra), tuple(parts.extra)
        return Called(returned, geometries, after)


def _handles(args: Iterable[Any]) -> Iterable[Handle]:
    for arg in args:
        if isinstance(arg, Handle):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _handles(arg)


class _Returns:
    """Reads what an operator returned, noting the new ``blocks`` and ``handles``, and the ``extra`` ones: further
    handles of its arguments."""

    def __init__(self, memory: Memory, buffers: list[RemoteBuffer], step: CallStep) -> None:
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
            self.extra.append(as_int(handle, self._base, self._base + RESULTS - 1, "a handle"))
            return Returned(self._buffers[same_as], geometry, None, same_as, base)
        self.handles.append(as_int(handle, self._base, self._base + RESULTS - 1, "a handle"))
        if base is None:
            self.blocks.append(Block(geometry, self._site))
            block = self.blocks[-1]
        else:
            block = self._buffers[base].block
        return Returned(self._memory.made(handle, geometry, block, None), geometry, None, None, base)
