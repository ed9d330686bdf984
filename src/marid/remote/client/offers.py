"""Asking the worker which chunks it has before they are sent: one question for many uploads, on its way while more is
hashed.

A question costs a round trip when somebody waits for the uploads, so small ones are worth it only as long as answers
save something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from marid.remote.client.contents import LARGE
from marid.remote.client.steps import Sent, UploadWork, Work
from marid.remote.wire.codec import as_int, as_list
from marid.remote.wire.requests import Have, Load, Request

__all__ = ["BATCH", "HaveWork", "Offers"]

BATCH = 32 << 20
"""Bytes of uploads that are asked for together while more are coming."""
_DIGESTS = 8192  # in one request: bounded by what a header may have


class HaveWork(Work):
    """Which of some chunks the worker has; what it has need not be sent."""

    lasting = False

    def __init__(self, request: Have | Load, learn: Callable[[int], None]) -> None:
        self.digests = request.digests
        self._request = request
        self._learn = learn
        self._sent: Sent | None = None

    def requests(self, sent: Sent) -> list[Request]:
        self._sent = sent
        return [self._request]

    def done(self, result: Any) -> None:
        places = as_list(result, len(self.digests), "positions")
        lacking = {as_int(place, 0, len(self.digests) - 1, "a position") for place in places}
        super().done(result)
        there = [digest for place, digest in enumerate(self.digests) if place not in lacking]
        assert self._sent is not None
        self._sent.chunks.update(there)
        self._learn(len(there))

    def refused(self) -> bool:
        return False  # a question, which need not have an answer


class Offers:
    """What a client asks one worker about uploads."""

    def __init__(self) -> None:
        self._worth = LARGE

    def ask(self, steps: Iterable[Work], sent: Sent, streaming: bool) -> list[HaveWork]:
        """Questions about the uploads among ``steps`` that were not asked about yet (and are now: ``questions``), if
        that is worth it; with ``streaming``, when there are many."""
        uploads = [step for step in steps if isinstance(step, UploadWork) and step.questions is None]
        unsent = [step for step in uploads if not sent.chunks.issuperset(step.contents[0].digests)]
        nbytes = sum(step.contents[0].nbytes for step in unsent)
        files = [step for step in unsent if step.contents[0].path is not None]
        if not files and nbytes < (BATCH if streaming else self._worth):
            return []
        names = dict.fromkeys([d for step in unsent if not step.contents[0].path for d in step.contents[0].digests])
        digests = tuple([digest for digest in names if digest not in sent.chunks])
        parts = [digests[start : start + _DIGESTS] for start in range(0, len(digests), _DIGESTS)]
        made = [HaveWork(Have(part), self._learn) for part in parts]
        made += [HaveWork(_load(step.contents[0]), self._learn) for step in files]
        for step in uploads:
            step.questions = made
        return made

    def _learn(self, found: int) -> None:
        self._worth = LARGE if found else min(2 * self._worth, BATCH)


def _load(of: Any) -> Load:
    return Load(of.path, of.offset, of.nbytes, of.digests)
