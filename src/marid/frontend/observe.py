"""What happens beside the tape while a function is recorded for ``marid.compile``: reads, uploads, random numbers.

The places where these happen tell the observer of their thread, if there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from marid.errors import SyncForbiddenError
from marid.frontend import handles
from marid.graph.node import Draw, Node, Output, Spec, Value
from marid.semantics.scopes import current_site

_CONTENT = 4096  # elements of a tensor of the host that a recording can take for a constant


@dataclass(frozen=True, slots=True)
class Upload:
    """Data that came from a tensor of the host, by ``make``; ``content`` is a copy of a small tensor as it was then."""

    tensor: torch.Tensor
    make: Callable[[torch.Tensor], torch.Tensor]
    content: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers taken from a generator (None for the device's own), with all that decides how many they are."""

    generator: torch.Generator | None
    device: int
    name: str
    spec: Spec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw


@dataclass(slots=True)
class Observer:
    """Notes of one recording. ``refuse_reads`` makes a read an error at its line. ``outcome`` says how a comparison
    of numbers comes out, of which the recording takes note: a function of ``operator`` by name, and two sides (numbers,
    tensors, or what is computed of such); None where the numbers have to be read."""

    refuse_reads: bool
    outcome: Callable[[str, Any, Any], bool | None]
    reads: list[str] = field(default_factory=list)
    uploads: dict[Value, Upload] = field(default_factory=dict)
    draws: list[Drawn] = field(default_factory=list)

    def read(self, what: str) -> None:
        """A value is about to be read. Raises ``SyncForbiddenError`` where that is refused."""
        text = f"{what} at {current_site()} reads a value"
        if self.refuse_reads:
            raise SyncForbiddenError(
                f"{text} inside a function that marid.compile(..., fullgraph=True) records; "
                "keep the value on the device, or read it outside of the function"
            )
        self.reads.append(text)

    def upload(self, value: Value, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``value`` came from ``tensor``."""
        content = tensor.detach().clone() if tensor.numel() <= _CONTENT else None
        self.uploads[value] = Upload(tensor, make, content)

    def drew(
        self,
        generator: torch.Generator | None,
        device: int,
        name: str,
        spec: Spec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draw: Draw,
    ) -> None:
        """Numbers were taken. Keeps no value alive."""
        named = {key: _stub(arg) for key, arg in kwargs.items()}
        self.draws.append(Drawn(generator, device, name, spec, tuple([_stub(arg) for arg in args]), named, draw))


def _stub(arg: Any) -> Any:
    return Node(0, None, None, None, arg.spec, None, None, None) if isinstance(arg, (Node, Output)) else arg


class _Current(threading.local):
    observer: Observer | None = None


_current = _Current()


def observer() -> Observer | None:
    """The observer of this thread."""
    return _current.observer


@contextmanager
def observing(
    refuse_reads: bool, outcome: Callable[[str, Any, Any], bool | None] = lambda *_: None
) -> Iterator[Observer]:
    """A block that is observed; blocks do not nest."""
    assert _current.observer is None
    _current.observer = made = Observer(refuse_reads, outcome)
    try:
        with handles.recording():
            yield made
    finally:
        _current.observer = None
