"""Uploads: tensors of the host that become the worker's, what the worker is asked before, and a bar for long ones.

The worker is asked which chunks it has before they are sent: one question for many uploads, on its way while more is
hashed. A question costs a round trip when somebody waits for the uploads, so small ones are worth it only as long as
answers save something. Where somebody looks at a terminal, a progress bar shows what takes long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from marid.engine.plain import as_int, as_list
from marid.graph.node import Spec
from marid.remote.client.blocks import RemoteBuffer, role_of
from marid.remote.client.contents import LARGE, Content, FileContent
from marid.remote.client.steps import Sent, Step
from marid.remote.wire.requests import (
    Chunk,
    Have,
    Load,
    Request,
    Upload,
)
from marid.report.traffic import traffic
from marid.settings import settings

# --- steps -----------------------------------------------------------------------------------------------------------


class UploadStep(Step):
    """A tensor of the host becomes one of the worker."""

    def __init__(self, buffer: RemoteBuffer, content: Content | FileContent) -> None:
        self.handles = (buffer.handle,)
        self.makes = (buffer.block,)
        self.site = buffer.block.site
        self.geometry = buffer.geometry
        self.contents = (content,)
        self._block = buffer.block
        self._kept: Any = buffer  # so that it is not freed before it is there
        self.questions: Sequence[Step] | None = None if content.digests else ()
        """What the worker was asked about its chunks; None before that."""

    def done(self, result: Any) -> None:
        super().done(result)
        self._kept = None
        self.contents[0].spool()
        traffic.moved(self.site, role_of(self._block), up=self.contents[0].nbytes)

    def requests(self, sent: Sent) -> list[Request]:
        return upload_requests(self.contents[0], self.geometry, self.handles[0], sent)


def upload_requests(content: Content | FileContent, of: Spec, handle: int, sent: Sent) -> list[Request]:
    """What makes ``content`` a tensor: its bytes, or the chunks that the worker lacks and their names."""
    if not content.digests:
        return [Upload(handle, of.dtype, of.shape, of.stride, tuple(content.pieces()))]
    found: list[Chunk] = []
    missing = [digest for digest in content.digests if digest not in sent.chunks]
    if missing:
        for digest, piece in zip(content.digests, content.pieces(), strict=True):
            if digest not in sent.chunks:
                sent.chunks.add(digest)
                found.append(Chunk(digest, piece))
    traffic.add(deduplicated=content.nbytes - sum(memoryview(chunk.data).nbytes for chunk in found))
    return [*found, Upload(handle, of.dtype, of.shape, of.stride, digests=content.digests)]


# --- asking before ---------------------------------------------------------------------------------------------------


BATCH = 32 << 20
"""Bytes of uploads that are asked for together while more are coming."""
_DIGESTS = 8192  # in one request: bounded by what a header may have


class HaveStep(Step):
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

    def ask(self, steps: Iterable[Step], sent: Sent, streaming: bool) -> list[HaveStep]:
        """Questions about the uploads among ``steps`` that were not asked about yet (and are now: ``questions``), if
        that is worth it; with ``streaming``, when there are many."""
        uploads = [step for step in steps if isinstance(step, UploadStep) and step.questions is None]
        unsent = [step for step in uploads if not sent.chunks.issuperset(step.contents[0].digests)]
        nbytes = sum(step.contents[0].nbytes for step in unsent)
        files = [step for step in unsent if step.contents[0].path is not None]
        if not files and nbytes < (BATCH if streaming else self._worth):
            return []
        names = dict.fromkeys([d for step in unsent if not step.contents[0].path for d in step.contents[0].digests])
        digests = tuple([digest for digest in names if digest not in sent.chunks])
        parts = [digests[start : start + _DIGESTS] for start in range(0, len(digests), _DIGESTS)]
        made = [HaveStep(Have(part), self._learn) for part in parts]
        made += [HaveStep(_load(step.contents[0]), self._learn) for step in files]
        for step in uploads:
            step.questions = made
        return made

    def _learn(self, found: int) -> None:
        self._worth = LARGE if found else min(2 * self._worth, BATCH)


def _load(of: Any) -> Load:
    return Load(of.path, of.offset, of.nbytes, of.digests)


# --- a progress bar --------------------------------------------------------------------------------------------------


_BYTES = 64 << 20  # fewer are not worth a bar
_DELAY = 1.0  # seconds that uploads take before there is one
_EVERY = 0.1  # seconds between drawings


class UploadProgress:
    """What one device uploads: a bar from when that takes long until nothing is left.

    ``name`` says whose it is. Nothing is shown unless standard error is a terminal and ``settings.progress`` holds.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._total = self._done = 0
        self._started = 0.0
        self._shown = 0.0
        self._bar: Progress | None = None

    def add(self, nbytes: int) -> None:
        """So many bytes are to be uploaded."""
        if not self._total:
            self._started = time.monotonic()
        self._total += nbytes
        self._show()

    def done(self, nbytes: int) -> None:
        """So many bytes have arrived, or were there."""
        self._done += nbytes
        self._show()
        if self._done >= self._total:
            self.end()

    def end(self) -> None:
        """Nothing more is to be uploaded."""
        self._total = self._done = 0
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        if self._bar is None:
            if self._total < _BYTES or time.monotonic() - self._started < _DELAY:
                return
            if not settings.progress or not sys.stderr.isatty():
                return
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            console = Console(stderr=True, force_jupyter=False)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
            self._bar.add_task(f"upload to {self._name}", total=None)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], total=self._total, completed=self._done)
        if time.monotonic() - self._shown > _EVERY:
            self._shown = time.monotonic()
            self._bar.refresh()
