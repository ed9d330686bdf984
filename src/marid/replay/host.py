"""What a recorded function does with tensors of the CPU, as far as its results on the device depend on it.

A tensor of the host that is an argument or reachable state may be uploaded: a replay uploads it again, with what it
holds then. One made from Python's data is part of the recording, like a number. One that was computed from others, or
whose values Python looks at, or that the function changes, cannot be replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.optim import Optimizer

from marid.frontend import handles
from marid.native import module
from marid.ops.facts import facts_of
from marid.replay.counters import CounterLog, is_in_a_formula
from marid.semantics.scopes import current_site


class HostWatch:
    """Inside (it is a context manager), what this thread does with tensors of the host is noted. ``refusal`` says why
    there can be no replay."""

    def __init__(
        self, known: list[torch.Tensor], state: list[torch.Tensor], optimizers: list[Optimizer], follows_rates: bool
    ) -> None:
        self.counters = CounterLog(state, optimizers, follows_rates=follows_rates)
        self.refusal: str | None = None
        self._known = {id(tensor): tensor for tensor in known}
        self._derived: dict[int, torch.Tensor] = {}
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        module.watch_host(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        module.watch_host(None)
        if self._error is not None and kind is None:
            raise self._error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is not the function's."""
        module.watch_host(None)
        try:
            yield
        finally:
            module.watch_host(self._called)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is an argument or reachable state."""
        return id(tensor) in self._known

    def is_derived(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was computed from such, or from random numbers."""
        return id(tensor) in self._derived

    def refuse(self, why: str) -> None:
        """Note why there can be no replay."""
        self.refusal = self.refusal or f"{why} at {current_site()}"

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        try:
            self._note(func, args, kwargs, returned)
        except BaseException as error:  # Ctrl-C, say: from here it would go nowhere, so it is raised at the end
            self._error = self._error or error

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        if func is torch.ops.aten._local_scalar_dense.default:
            if self.is_known(args[0]) or self.is_derived(args[0]):
                self._note_read(args[0], returned, is_in_a_formula(sys._getframe(2)))
            return
        given = list(_host_tensors((*args, *kwargs.values())))
        if any(handles.is_lazy(made) for made in _tensors((returned,))):
            return
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and not any(self.is_known(t) or self.is_derived(t) for t in given):
            return
        if func._schema.is_mutable and self.counters.write(func, args, kwargs, self.is_derived):
            return
        if not isinstance(returned, (torch.Tensor, list, tuple)):
            self.refuse("the value of a tensor of the CPU is read")
        if func._schema.is_mutable:
            formals = [formal.name for formal in func._schema.arguments]
            written = {name for name, writes in zip(formals, facts_of(func).written, strict=True) if writes}
            for name, arg in (*zip(formals, args, strict=False), *kwargs.items()):
                if name in written:
                    self._note_written(arg)
        for tensor in _host_tensors((returned,)):
            if not self.is_known(tensor):
                self._derived[id(tensor)] = tensor

    def _note_read(self, tensor: torch.Tensor, value: Any, in_a_formula: bool) -> None:
        why = self.counters.note_read(tensor, value) if in_a_formula else "the value of a tensor of the CPU is read"
        if why is not None:
            self.refuse(why)

    def _note_written(self, arg: Any) -> None:
        for tensor in _host_tensors((arg,)):
            if self.is_known(tensor):
                self.refuse("a tensor of the CPU is changed in place")
            self._derived[id(tensor)] = tensor


def _tensors(things: Any) -> Any:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, (list, tuple)):
            yield from _tensors(thing)


def _host_tensors(things: Any) -> Any:
    return (tensor for tensor in _tensors(things) if not handles.is_lazy(tensor) and tensor.device.type != "meta")
