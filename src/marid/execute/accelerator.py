"""What is needed of the device that programs run on, beside PyTorch's kernels for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from marid.execute.cuda import Cuda


class Accelerator(Protocol):
    """One device. To be used on one thread, below all dispatch."""

    captures: bool
    """Whether work can be captured on it."""
    pins: bool
    """Whether copies to it are faster from pinned memory of the host."""

    def to_device(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """The same elements on the device, for whatever is launched from now on."""
        ...

    def to_host(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """The same elements on the host, there when this returns."""
        ...

    def wait(self) -> bool:
        """Wait until all that was launched has been done; whether that took any waiting."""
        ...

    def wait_for_uploads(self) -> None:
        """Wait until what ``to_device`` was given may be written again."""
        ...

    def is_idle(self) -> bool:
        """Whether all that was launched has been done."""
        ...

    def trim(self) -> None:
        """Give back memory that is only kept to be used again."""
        ...

    def capture(self, launch: Callable[[], None], /) -> Callable[[], None]:
        """What launches again, on the same addresses, all that ``launch`` launches; nothing is executed now, and the
        memory that results lie in stays theirs as long as they live. Raises what ``launch`` raises, and
        ``RuntimeError`` for what cannot be captured."""
        ...


class Host:
    """The processor itself: tensors are where they are to be, and launching costs nothing."""

    captures = False
    pins = False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def wait(self) -> bool:
        """Nothing is launched here."""
        return False

    def wait_for_uploads(self) -> None:
        """Nothing is copied here."""

    def is_idle(self) -> bool:
        """Nothing is launched here."""
        return True

    def trim(self) -> None:
        """Memory is kept by the arena."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Always raises ``RuntimeError``."""
        raise RuntimeError(f"the processor captures nothing ({launch})")


_KINDS: dict[str, Callable[[torch.device], Accelerator]] = {"cpu": lambda _: Host(), "cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """That device, made ready on this thread."""
    return _KINDS[device.type](device)
