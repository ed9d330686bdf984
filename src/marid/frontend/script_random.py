"""``torch.get_rng_state()`` and ``torch.set_rng_state()`` under ``marid run``, where the device is the default.

A script that names no device draws from the device's generator, and means that one where ``python`` has the CPU's. So
the state is that of the generator that has drawn since the last call, the device's if both have, in the form in which
the CPU's is given. Setting it puts both generators where they were when it was asked for. What comes from elsewhere, as
from a checkpoint, is looked for in the stream of its seed.
"""

from __future__ import annotations

import torch

from marid.frontend.random import Generator, cpu_state, default_generator, position_of
from marid.recent import Recent

_KEPT = 64  # states, those that were asked for last
_Position = tuple[int, int, int]


def install() -> None:
    """Have PyTorch's two functions speak of the default device too. ``fork_rng()`` keeps the states of all devices, of
    which a script knows none: its warning about how many there are is left out."""
    states = _States()
    torch.random._fork_rng_warned_already = True
    torch.get_rng_state = torch.random.get_rng_state = states.get
    torch.set_rng_state = torch.random.set_rng_state = states.set


class _States:
    def __init__(self) -> None:
        self._last = _position(_generator())
        self._given: Recent[bytes, tuple[_Position, torch.Tensor]] = Recent(_KEPT)

    def get(self) -> torch.Tensor:
        """The state of random numbers as a CPU ``uint8`` tensor of the size of ``torch.Generator().get_state()``."""
        position, of_cpu = _position(_generator()), torch.default_generator.get_state()
        state = of_cpu
        if position != self._last:
            state = cpu_state(*position)
        self._last = position
        self._given.put(_key(state), (position, of_cpu.clone()))
        return state

    def set(self, new_state: torch.Tensor) -> None:
        """Go to a state from ``get``. Raises ``RuntimeError`` or ``TypeError`` for what is none, as PyTorch does."""
        new_state = new_state.cpu()
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(new_state)  # says what is wrong with it
        position, of_cpu = self._given.get(_key(new_state), (None, new_state))
        try:
            position = position_of(new_state) if position is None else position
        except RuntimeError:
            torch.default_generator.set_state(before)
            raise
        torch.default_generator.set_state(of_cpu)
        generator = _generator()
        generator.seed, generator.offset, generator.spare = self._last = position


def _generator() -> Generator:
    return default_generator(torch.remote_accelerator.current_device())  # pyright: ignore[reportAttributeAccessIssue]


def _position(generator: Generator) -> _Position:
    return generator.seed, generator.offset, generator.spare


def _key(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())
