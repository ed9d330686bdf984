"""Random access to the number stream of PyTorch's CPU generator (a 32-bit Mersenne Twister).

A position is a number of 32-bit words used since seeding, and a *spare*: small ``normal_`` draws make numbers in pairs
and keep the second one, so a position also says at which word such a pair was drawn (-1 for none). Numbers recorded at
a position are therefore those that eager CPU PyTorch draws there, whatever has or has not run before.

Going forward costs one cheap draw a word; going back starts at the nearest checkpoint. Programs run mostly in the order
in which they were recorded, so both are rare.
"""

from __future__ import annotations

import bisect

import torch

from marid.graph.node import Draw
from marid.recent import Recent

PAIR_WORDS = 4  # a normal pair is made of two doubles in [0, 1), two words each
_SKIP_CHUNK = 1 << 20
_CHECKPOINT_EVERY = 1 << 22
_STREAMS = 16
# Where numbers go that nobody wants. Made once: a run of a program must not allocate differently the next time.
_SKIPPED = torch.empty(_SKIP_CHUNK, dtype=torch.uint8, device="cpu")
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
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator()
        self.seed = seed
        self.checkpoints: list[tuple[int, torch.Tensor]] = []
        self.restart()

    def restart(self) -> None:
        self.generator.manual_seed(self.seed)
        self.offset, self.spare = 0, -1

    def seek(self, offset: int, spare: int) -> None:
        if (self.offset, self.spare) == (offset, spare):
            return
        if spare >= 0:
            self._go(spare)
            _PAIR.normal_(generator=self.generator)
            self.offset = spare + PAIR_WORDS
            self._skip(offset - self.offset)
        else:
            self._go(offset)

    def _go(self, offset: int) -> None:
        if self.offset > offset or self.spare >= 0:
            self.restart()
        nearest = bisect.bisect_right(self.checkpoints, offset, key=lambda point: point[0])
        if nearest and self.checkpoints[nearest - 1][0] > self.offset:
            self.offset, state = self.checkpoints[nearest - 1]
            self.generator.set_state(state)
        self._skip(offset - self.offset)
        last = self.checkpoints[-1][0] if self.checkpoints else 0
        if offset - last >= _CHECKPOINT_EVERY:
            self.checkpoints.append((offset, self.generator.get_state()))

    def _skip(self, words: int) -> None:
        while words > 0:
            chunk = min(words, _SKIP_CHUNK)
            _SKIPPED[:chunk].random_(generator=self.generator)
            self.offset += chunk
            words -= chunk
