"""Random access to the number stream of PyTorch's CPU generator (a 32-bit Mersenne Twister).

A position is a number of 32-bit words used since seeding, and a *spare*: small ``normal_`` draws make numbers in pairs
and keep the second one, so a position also says at which word such a pair was drawn (-1 for none). Numbers recorded at
a position are therefore those that eager CPU PyTorch draws there, whatever has or has not run before.

Going forward costs one cheap draw a word and leaves checkpoints on the way; going back starts at the nearest one.
Programs run mostly in the order in which they were recorded, so both are rare.
"""

from __future__ import annotations

import bisect

import torch

from marid.graph.node import Draw
from marid.recent import Recent

PAIR_WORDS = 4  # a normal pair is made of two doubles in [0, 1), two words each
_CHECKPOINT_EVERY = 1 << 20  # 2 ms are skipped at most behind a state of 5 KB
_SPARES = 8
_STREAMS = 16
# Where numbers go that nobody wants. Made once: a run of a program must not allocate differently the next time.
_SKIPPED = torch.empty(_CHECKPOINT_EVERY, dtype=torch.uint8, device="cpu")
_PAIR = torch.empty(1, dtype=torch.float64, device="cpu")


class MersenneTwisters:
    """CPU generators positioned at draws, one stream for each seed in use. Not thread-safe."""

    def __init__(self) -> None:
        self._streams: Recent[int, _Stream] = Recent(_STREAMS)

    def at(self, draw: Draw) -> torch.Generator:
        """A generator from which exactly the numbers of ``draw`` are taken next."""
        stream = self._streams.used(draw.seed)
        if stream is None:
            stream = _Stream(draw.seed)
            self._streams.put(draw.seed, stream)
        stream.seek(draw.offset, draw.spare)
        stream.offset, stream.spare = draw.end, draw.end_spare
        return stream.generator

    def forget(self) -> None:
        """Start over: an operation failed and may not have taken its numbers."""
        self._streams.clear()


class _Stream:
    """The generator of one seed, and states of it to go on from, by the spare that they hold."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)
        self.offset, self.spare = 0, -1
        self.beginning = self.generator.get_state()
        self.checkpoints: Recent[int, list[tuple[int, torch.Tensor]]] = Recent(_SPARES)

    def seek(self, offset: int, spare: int) -> None:
        if (self.offset, self.spare) == (offset, spare):
            return
        checkpoints = self._checkpoints(spare)
        after = bisect.bisect_right(checkpoints, offset, key=lambda point: point[0])
        nearest, state = checkpoints[after - 1]
        if self.spare != spare or not nearest <= self.offset <= offset:
            self.generator.set_state(state)
            self.offset, self.spare = nearest, spare
        while self.offset < offset:
            if self.offset - nearest >= _CHECKPOINT_EVERY:
                nearest = self.offset
                checkpoints.insert(after, (nearest, self.generator.get_state()))
                after += 1
            chunk = min(offset - self.offset, _CHECKPOINT_EVERY)
            _SKIPPED[:chunk].random_(generator=self.generator)
            self.offset += chunk

    def _checkpoints(self, spare: int) -> list[tuple[int, torch.Tensor]]:
        """Positions with this spare, and the generator's states there, in order: first where the spare is made."""
        found = self.checkpoints.used(spare)
        if found is not None:
            return found
        if spare < 0:
            found = [(0, self.beginning)]
        else:
            self.seek(spare, -1)
            _PAIR.normal_(generator=self.generator)
            self.offset, self.spare = spare + PAIR_WORDS, spare
            found = [(self.offset, self.generator.get_state())]
        self.checkpoints.put(spare, found)
        return found
