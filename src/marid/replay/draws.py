"""Random numbers of a recorded function: where they came from, and taking as many again.

A replay takes its numbers from the generators in the order in which the Python took them, each draw by the rule by
which the recorder takes it, so that they are the numbers that the Python would have got.
"""

from __future__ import annotations

import pickle
import random as python_random
from typing import Any

import numpy as np
import torch

from marid.frontend import handles, random
from marid.frontend.observe import Drawn
from marid.graph.node import Draw

_Position = tuple[int, int, int]


class Streams:
    """Where all generators that a function could use are, before it runs."""

    def __init__(self, generators: list[torch.Generator], drawing: list[Any]) -> None:
        self._own = [g for g in generators if g.device.type == handles.DEVICE_TYPE]
        self._before = self._positions()
        self._others = [g for g in generators if g.device.type != handles.DEVICE_TYPE]
        self._drawing = drawing
        self._hosts = self._host_states()

    def _positions(self) -> dict[Any, _Position]:
        found: dict[Any, _Position] = {}  # by address of a generator; the devices' own count down from -1
        for index in range(handles.device_count):
            generator = random.default_generator(index)
            found[-1 - index] = (generator.seed, generator.offset, generator.spare)
        for given in self._own:
            with random.generator_of(given, 0) as generator:
                found[given._cdata] = (generator.seed, generator.offset, generator.spare)
        return found

    def _host_states(self) -> list[Any]:
        default = torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]
        legacy: Any = np.random.get_state()
        states = [bytes(g.get_state().numpy()) for g in (default, *self._others)]
        return [
            *(states, python_random.getstate(), legacy[0], legacy[1].tobytes(), legacy[2:]),
            *[_state_of(one) for one in self._drawing],
        ]

    def refusal(self, draws: list[Drawn]) -> str | None:
        """Why what happened to the generators is not just ``draws``; None when it is."""
        reached = dict(self._before)
        for drawn in draws:
            which = -1 - drawn.device if drawn.generator is None else drawn.generator._cdata
            if which not in reached:
                return "random numbers come from a generator that the function makes"
            draw = drawn.draw
            if reached[which] != (draw.seed, draw.offset, draw.spare):
                return "the state of a random generator is set inside of the function"
            reached[which] = (draw.seed, draw.end, draw.end_spare)
        if reached != self._positions():
            return "the state of a random generator is set inside of the function"
        if self._hosts != self._host_states():
            return "random numbers are drawn on the host"
        return None


def _state_of(drawing: Any) -> bytes | None:
    """What decides the numbers that a generator of Python or numpy gives next; None for one that has no state."""
    if isinstance(drawing, python_random.SystemRandom):
        return None
    return pickle.dumps(drawing.getstate() if isinstance(drawing, python_random.Random) else drawing)


def take_again(draws: list[Drawn]) -> list[Draw]:
    """As many numbers as ``draws`` took, from where the generators are now."""
    taken: list[Draw] = []
    for drawn in draws:
        with random.generator_of(drawn.generator, drawn.device) as generator:
            draw = random.draw(drawn.name, generator, drawn.spec, drawn.args, drawn.kwargs)
        assert draw is not None
        taken.append(draw)
    return taken
