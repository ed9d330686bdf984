"""What the tests share: running something on both devices and comparing what comes out."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["DEVICE", "assert_same", "interrupted", "on_both", "seeded", "train_step"]

DEVICE = "remote_accelerator"


def assert_same(lazy: Any, expected: Any) -> None:
    """Equality of values (NaN equals NaN), shape, dtype, strides and gradient flag; also inside of containers."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(lazy, torch.Tensor)
        assert lazy.shape == expected.shape
        assert lazy.dtype == expected.dtype
        assert lazy.stride() == expected.stride()
        assert lazy.requires_grad == expected.requires_grad
        torch.testing.assert_close(lazy.detach().cpu(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert lazy.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(lazy[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(lazy) == len(expected)
        for a, b in zip(lazy, expected, strict=True):
            assert_same(a, b)
    else:
        assert type(lazy) is type(expected)
        assert lazy == expected or (lazy != lazy and expected != expected)  # NaN


def on_both(function: Callable[[str], Any]) -> Any:
    """Run ``function(device)`` on the CPU and on the device, from the same seed; compare; the device's result."""
    torch.manual_seed(0)
    expected = function("cpu")
    torch.manual_seed(0)
    lazy = function(DEVICE)
    assert_same(lazy, expected)
    return lazy


def seeded(module: Any, device: str) -> Any:
    """The module on ``device``, with the generators seeded anew: its weights came from the CPU's."""
    module.to(device)
    torch.manual_seed(1)
    return module


def train_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """One training step from a loss; the loss as a tensor that holds no graph."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@contextmanager
def interrupted(delay: float, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raise ``error`` in the main thread after ``delay`` seconds, if the block lasts as long: by Ctrl-C's signal."""

    def interrupt(*_: Any) -> None:
        raise error

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    on_ctrl_c = signal.signal(signal.SIGINT, interrupt)
    old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    gc.disable()  # what is raised in a callback of the collector is lost
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        signal.signal(signal.SIGINT, on_ctrl_c)
        gc.enable()
