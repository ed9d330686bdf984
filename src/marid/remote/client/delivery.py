"""Steps on their way to a worker: kept until somebody needs them, sent together, answered, and done again elsewhere
when the worker is lost."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from typing import Any, Protocol

from marid.errors import MaterializationError, WireError, WorkerLostError
from marid.execute.kernel_warnings import warn_of
from marid.remote.client.blocks import Memory
from marid.remote.client.link import Link
from marid.remote.client.queue import Batch, StepQueue, lost_at
from marid.remote.client.recovery import PoisonDetector, Recovery
from marid.remote.client.runs import ReplayStep, RunStep, report_mispredictions
from marid.remote.client.steps import AskStep, RolesStep, Sent, Step
from marid.remote.client.uploads import BATCH, Offers, UploadStep
from marid.remote.client.window import LinkLost, RequestFailed
from marid.report.hooks import Ran, ran, run_of
from marid.report.stats import counters
from marid.report.traffic import SocketCounts, traffic
from marid.uninterrupted import Uninterrupted

logger = logging.getLogger("marid")

_PATIENCE = 0.25  # seconds after which it is looked at whether a worker process is still there
_CANCEL = 10.0  # seconds that a worker may take to stop
_BEHIND = 4 * BATCH  # bytes of uploads that may wait for answers
_LOSSES = 8  # workers in a row that may be lost and have done nothing
_ATTEMPTS = 5  # workers in a row that may be lost while work is done again


class Connection(Protocol):
    """How a worker is reached."""

    name: str

    def open(self) -> Link:
        """A link to it."""
        ...

    def reopen(self, reason: str) -> Link:
        """A link to it again, or to another one, after it was lost. Raises ``WorkerLostError``."""
        ...

    def is_gone(self) -> bool:
        """Whether it is known that it has ended."""
        ...


class Delivery:
    """The steps of one worker. Not thread-safe: the engine calls it under its lock."""

    def __init__(self, connection: Connection, memory: Memory) -> None:
        self.queue = StepQueue(memory, connection.name)
        self._offers = Offers()
        self.link = _ours(connection.open())
        self._connection = connection
        self._sent = Sent()
        self._since = 0.0  # when something was sent to a worker that had nothing to do
        self._counted = vars(SocketCounts())
        self._events: list[Ran] = []
        self._answered = 0.0  # when the latest of these came
        self.closed = False
        self.ending = False
        """Whether no other worker is to be taken if this one is lost."""
        self._poison = PoisonDetector()
        self._losses = 0  # of workers, since one has answered
        self._recovery: Recovery | None = None
        """Of a worker that was lost, while another one is sent what is needed."""

    def flush(self, streaming: bool = False) -> None:
        """Send all that there is to do, what is to be freed first. With ``streaming``, leave uploads behind of which
        it is not known yet whether the worker has them."""
        self.queue.drop()
        while self.queue.outbox:
            link = self.link
            try:
                if streaming:
                    self.settle()
                ready = self._ready(streaming)
                if ready and self._poison.is_careful(self.queue.steps):
                    step = self.queue.outbox[0]
                    self._send(1)
                    if step.may_crash:  # others may wait for what another device is still to be asked
                        self._await(step)
                    continue
                if ready:
                    self._send(ready)
                if streaming:
                    return
            except LinkLost as lost:
                if link is self.link:  # else another worker was taken meanwhile
                    self._recover(str(lost))
            except RequestFailed:
                self.settle()
            except (WireError, OSError) as error:  # OSError: of a file with what is to be uploaded
                self._sent = Sent(settings=None)
                self.queue.refuse(error)

    def _ready(self, streaming: bool) -> int:
        """How many steps can be sent. Asks about uploads, and waits for answers, but for the latest with
        ``streaming``."""
        if not any(isinstance(step, UploadStep) for step in self.queue.outbox):
            return len(self.queue.outbox)
        questions = self._offers.ask(self.queue.outbox, self._sent, streaming)
        if questions:
            self.queue.outbox[:0] = questions
            self._send(len(questions))
        place = 0
        while place < len(self.queue.outbox):
            step = self.queue.outbox[place]
            place += 1
            if not isinstance(step, UploadStep):
                continue
            questions = [one for one in step.questions or () if not one.answered]
            questions = [one for _, one in self.queue.asked if one in questions] if questions else []
            if streaming and (step.questions is None or (questions and self.queue.unsent_bytes() < _BEHIND)):
                return place - 1
            if questions:
                self._await(questions[0])
                place = 0  # they may be others, after a recovery
        return place

    def _send(self, count: int) -> None:
        """Send the first steps in as few messages as they fit into; takes what was sent out of the outbox."""
        message = Batch()
        for step in self.queue.outbox[:count]:
            for request in step.requests(self._sent):
                if not message.fits(request):
                    self._post(message)
                    message = Batch()
                    message.fits(request)
                message.requests.append(request)
            message.ends.append((len(message.requests) - 1, step))
        self._post(message)

    def _post(self, message: Batch) -> None:
        if not message.requests:
            return
        if not self.queue.asked:
            self._since = time.monotonic()

        def sent_as(first: int) -> None:
            self.queue.asked.extend([(first + end, step) for end, step in message.ends])
            del self.queue.outbox[: len(message.ends)]

        self.link.send(message.requests, sent_as, self._see_to_sources, self._poison.is_careful(self.queue.steps))

    def wait(self, step: Step) -> None:
        """Send what there is to do, and wait until ``step`` was done or refused. Raises what came before it raised."""
        waited = False
        while not step.answered:
            if self.queue.outbox:
                self.flush()
            if self.queue.number(step) is None:
                break
            waited = self._await(step) or waited
        self.count(round_trips=int(waited and not isinstance(step, AskStep)))  # questions of ours are nobody's

    def _await(self, step: Step) -> bool:
        """Wait until something that was sent was answered, or something went wrong; whether that took time."""
        waited = False
        while not step.answered:
            seq = self.queue.number(step)
            if seq is None:
                break
            waited = waited or self.link.applied < seq
            try:
                self._reach(self.link, seq)
            except LinkLost as lost:
                self._recover(str(lost))
            except RequestFailed:
                pass  # seen to below
            except KeyboardInterrupt:
                self.cancel()
                raise
            self.settle()
        return waited

    def _reach(self, link: Link, seq: int) -> None:
        """Wait until a request is applied, or all is sent again over another link. Raises as ``Link.reach``."""
        while link is self.link:
            try:
                link.reach(seq, _PATIENCE)
                break
            except TimeoutError:
                if self._connection.is_gone():
                    raise LinkLost("its process has ended") from None
                self._note()
                self._see_to_sources()

    def settle(self) -> None:
        """Take note of the answers that have come; raise the error of a step that failed."""
        if self.closed or not self.queue.asked:
            return  # should the worker be lost, whoever sends it something finds that out
        failure: dict[str, Any] | None = None
        try:
            self.link.poll()
        except RequestFailed as failed:
            failure = failed.failure
        except LinkLost as lost:
            self._recover(str(lost))
        self._note()
        if failure is not None:
            self._failed(failure)

    def _note(self) -> None:
        """Take note of the answers that are here."""
        applied = self.link.applied
        if self.queue.asked and self.queue.asked[0][0] <= applied:
            try:
                with Uninterrupted():
                    step = self._take_answers(applied)
            except WireError as error:
                self.link.distrust(error)
                raise
            now = time.monotonic()
            step.seconds, self._since = now - self._since, now  # the last one stands for those before it
        texts = self.link.warnings()
        if texts:
            warn_of(texts)
        events, self._events = self._events, []
        for event in events:
            ran.tell(event)

    def _take_answers(self, applied: int) -> Step:
        """Those up to this number, of which there are some; the last step that was answered."""
        mispredictions = self.link.mispredictions()
        while True:
            seq, step = self.queue.asked.popleft()
            if mispredictions and isinstance(step, RunStep):
                report_mispredictions(mispredictions, seq, step)
            if isinstance(step, RunStep) and step.queued:
                self._add_event(step)
            step.done(self.link.take(seq))
            if isinstance(step, UploadStep):
                self.queue.progress.done(step.contents[0].nbytes)
            elif isinstance(step, RunStep):
                counters.ops_executed += len(step.specialization.encoded.program.instructions)
                counters.epoch += 1
            self._losses = 0
            if not self.queue.asked or self.queue.asked[0][0] > applied:
                return step

    def _add_event(self, step: RunStep) -> None:
        """A run is over that listeners are to be told of; what was sent later than an answer came began then."""
        now = time.perf_counter()
        began = max(step.queued, self._answered)
        self._answered = now
        device = next((spec.device for spec in step.specialization.specs if spec is not None), 0)
        self._events.append(Ran(*run_of(step.recorded_nodes), began, now, step.queued, f"worker {device}"))

    def count(self, round_trips: int = 0) -> None:
        """Add to the statistics what went over the socket since the last time."""
        before, self._counted = self._counted, dict(vars(self.link.counts))
        more = {name: n - before[name] for name, n in self._counted.items() if n != before[name]}
        traffic.add(round_trips=round_trips, **more)

    def close(self) -> None:
        """Say good-bye to the worker, for good."""
        self.queue.progress.end()
        self.closed = True
        self.count()
        self.link.close()

    # --- failures ---

    def _failed(self, failure: dict[str, Any]) -> None:
        """A step has failed, and the worker has refused what was sent behind it."""
        self.queue.progress.end()
        following = [step for last, step in self.queue.asked if last >= failure["seq"]] + self.queue.outbox
        again = not following or following[0].retry(failure)
        with Uninterrupted():
            self.queue.asked.clear()
            self.queue.outbox = []
            self.link.resume()
            self._sent = Sent(settings=None)  # definitions behind the failure were refused too
            if again:
                self.queue.outbox = following
            else:
                self.queue.fail(following, failure)

    def cancel(self) -> None:
        """Ctrl-C: have the worker stop between two operations, and take back what it has not done. Replays cannot be
        taken back: where there is one, the wait ends and the work does not."""
        if any(isinstance(step, ReplayStep) for _, step in self.queue.asked):
            return
        self.link.cancel()
        deadline = time.monotonic() + _CANCEL
        while self.queue.asked and time.monotonic() < deadline:
            try:
                self.link.reach(self.queue.asked[-1][0], _PATIENCE)
            except TimeoutError:
                continue
            except LinkLost:
                return
            except RequestFailed:
                pass
            try:
                self.settle()
            except (MaterializationError, KeyboardInterrupt):
                continue  # said already, or what was asked for

    # --- a worker that was lost ---

    @property
    def is_lost(self) -> bool:
        """Whether what the worker held is gone, or not all there again."""
        return self._recovery is not None or self.link.is_lost or self._connection.is_gone()

    def revive(self) -> None:
        """Take another worker if this one is known to be lost; say again what may not have been heard. To be called
        while others wait for it, also by what waits for it inside of a recovery of this one."""
        if self._recovery is not None:
            with contextlib.suppress(LinkLost):  # which is seen where that recovery goes on
                self._recovery.advance()
        elif not self.closed and self.is_lost:
            self._recover("a copy from it was waited for")
        for step in self._in_flight():
            step.renotify()

    def _in_flight(self) -> list[Step]:
        if self._recovery is not None:
            return self._recovery.in_flight()
        return [step for seq, step in self.queue.asked if seq > self.link.applied]

    def _see_to_sources(self) -> None:
        """Something is waited for: have other workers do what they can for it."""
        for source in {id(end): end for step in self._in_flight() for end in step.sources}.values():
            source.revive()
        for step in self._in_flight():
            step.renotify()

    def _recover(self, reason: str) -> None:
        """Take another worker, and let it have all that is still needed."""
        self.queue.progress.end()
        self._losses += 1
        if self._losses > _LOSSES:
            self._losses = 0
            raise WorkerLostError(f"{_LOSSES} workers in a row were lost and had done nothing: {reason}")
        at = self.link.at
        unanswered = [(seq, step) for seq, step in self.queue.asked if seq > self.link.applied]
        culprit = self._poison.lost(self.queue.steps, [step for _, step in unanswered])
        try:
            self._replace(reason)
            taken_back = self.queue.drop_lost()
        except BaseException:
            self.link.close()  # not all is there: whoever needs it takes another worker
            raise
        finally:
            self._recovery = None
        if culprit is not None and culprit in self.queue.outbox:
            known = at is not None and any(step is culprit and seq == at[0] for seq, step in unanswered)
            self._poison.give_up(self.queue, culprit, at[1] if known and at is not None else None)
        if taken_back is not None:
            raise lost_at(str(taken_back))

    def _replace(self, reason: str) -> None:
        started = time.monotonic()
        with Uninterrupted():
            self.queue.outbox = self.queue.steps()  # stays so if no worker is to be had
            self.queue.asked.clear()
        self.queue.drop()
        if self.closed or self.ending:
            raise WorkerLostError(f"the {self._connection.name} was disconnected")
        self.count()
        self.link.close()
        for _ in range(_ATTEMPTS):
            self.link = _ours(self._connection.reopen(reason))
            self._counted = vars(SocketCounts())
            self._recovery = Recovery(self.link, self.queue, self._offers, self._reach)
            try:
                count = self._recovery.restore(reason)
            except LinkLost as lost:
                reason = str(lost)
                continue
            self._sent = self._recovery.sent
            seconds = time.monotonic() - started
            traffic.recovered(count, seconds)
            logger.warning(
                "the %s was lost (%s); %d step(s) were done again in %.2f s",
                *(self._connection.name, reason, count, seconds),
            )
            if self.link.welcome["limits"].get("spill"):
                alive = self.queue.memory.alive
                self.queue.outbox.append(RolesStep((handle, block) for handle, (block, _) in alive.items()))
            return
        raise WorkerLostError(f"{_ATTEMPTS} workers in a row were lost while work was done again: {reason}")


def _ours(link: Link) -> Link:
    """A link that is closed by us at the end of the process, when the last statistics were asked for."""
    atexit.unregister(link.close)
    return link
