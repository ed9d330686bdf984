"""Steps on their way to a worker: kept until somebody needs them, sent together, answered, and done again elsewhere
when the worker is lost."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections import deque
from typing import Any, Protocol

from marid.errors import MaterializationError, UnsupportedOperationError, WireError, WorkerLostError
from marid.execute.kernel_warnings import warn_of
from marid.remote.blame import Blame
from marid.remote.failures import error_named, lost_error, stopped
from marid.remote.journal import Journal
from marid.remote.link import Link, LinkLost, RequestFailed
from marid.remote.memory import Memory
from marid.remote.messages import Message
from marid.remote.mispredictions import report_mispredictions
from marid.remote.offers import BATCH, Offers
from marid.remote.progress import UploadProgress
from marid.remote.requests import write_requests
from marid.remote.successor import Successor
from marid.remote.work import (
    AskWork,
    CallWork,
    FreeWork,
    ReplayWork,
    RolesWork,
    RunWork,
    Sent,
    UploadWork,
    Work,
)
from marid.report.hooks import Ran, ran, run_of
from marid.report.stats import counters
from marid.report.traffic import SocketCounts, traffic
from marid.uninterrupted import Uninterrupted

__all__ = ["Connection", "Delivery"]

logger = logging.getLogger("marid")

_PATIENCE = 0.25  # seconds after which it is looked at whether a worker process is still there
_CANCEL = 10.0  # seconds that a worker may take to stop
_FREED = 4000  # handles in one request
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
        self.memory = memory
        self.journal = Journal()
        self._offers = Offers()
        self._progress = UploadProgress(connection.name)
        self.link = _ours(connection.open())
        self._connection = connection
        self._sent = Sent()
        self._outbox: list[Work] = []
        self._asked: deque[tuple[int, Work]] = deque()  # sent and not answered, by sequence number
        self._since = 0.0  # when something was sent to a worker that had nothing to do
        self._counted = vars(SocketCounts())
        self._events: list[Ran] = []
        self._answered = 0.0  # when the latest of these came
        self.holding = False
        """Whether nothing may be freed now."""
        self.closed = False
        self.ending = False
        """Whether no other worker is to be taken if this one is lost."""
        self._blame = Blame()
        self._losses = 0  # of workers, since one has answered
        self._successor: Successor | None = None
        """Of a worker that was lost, while it is told what is needed."""

    def do(self, step: Work) -> None:
        """Have a step done with the next message."""
        for block in step.writes:
            block.version += 1
        self._outbox.append(step)
        self.journal.add(step)
        if isinstance(step, UploadWork):
            self._progress.add(step.contents[0].nbytes)

    def steps(self) -> list[Work]:
        """What was not answered yet, in order."""
        return [*[step for _, step in self._asked], *self._outbox]

    def flush(self, streaming: bool = False) -> None:
        """Send all that there is to do, what is to be freed first. With ``streaming``, leave uploads behind of which
        it is not known yet whether the worker has them."""
        self.drop()
        while self._outbox:
            link = self.link
            try:
                if streaming:
                    self.settle()
                ready = self._ready(streaming)
                if ready and self._blame.is_careful(self.steps):
                    step = self._outbox[0]
                    self._send(1)
                    if step.blamable:  # others may wait for what another device is still to be asked
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
                self._refuse(error)

    def _ready(self, streaming: bool) -> int:
        """How many steps can be sent. Asks about uploads, and waits for answers, but for the latest with
        ``streaming``."""
        if not any(isinstance(step, UploadWork) for step in self._outbox):
            return len(self._outbox)
        questions = self._offers.ask(self._outbox, self._sent, streaming)
        if questions:
            self._outbox[:0] = questions
            self._send(len(questions))
        place = 0
        while place < len(self._outbox):
            step = self._outbox[place]
            place += 1
            if not isinstance(step, UploadWork):
                continue
            questions = [one for one in step.questions or () if not one.answered]
            questions = [one for _, one in self._asked if one in questions] if questions else []
            if streaming and (step.questions is None or (questions and self._unsent() < _BEHIND)):
                return place - 1
            if questions:
                self._await(questions[0])
                place = 0  # they may be others, after a recovery
        return place

    def _unsent(self) -> int:
        return sum(content.nbytes for step in self._outbox for content in step.contents)

    def _refuse(self, error: WireError | OSError) -> None:
        """Something cannot be written down or read: take back the step that it is in, and raise."""
        self._progress.end()
        self._sent = Sent(switches=None)
        for place, step in enumerate(self._outbox):
            try:
                write_requests(step.requests(Sent()))
            except (WireError, OSError) as problem:
                for block in step.makes:
                    block.error = problem
                following = self._outbox[place + 1 :]
                del self._outbox[place:]
                if isinstance(step, RunWork) and not isinstance(step, ReplayWork):
                    following.insert(0, step)
                else:
                    self.journal.remove([step])
                self._outbox += self._take_back(following, problem)
                if isinstance(problem, OSError):
                    raise
                raise UnsupportedOperationError(f"{problem} (needed at {step.site})") from None
        raise error

    def drop(self) -> None:
        """Take note of what nobody holds any more: it is freed before anything else is done."""
        if self.holding:
            return
        handles = self.memory.dropped()
        for start in range(0, len(handles), _FREED):
            self._outbox.insert(0, FreeWork(tuple(handles[start : start + _FREED])))

    def _send(self, count: int) -> None:
        """Send the first steps in as few messages as they fit into; takes what was sent out of the outbox."""
        message = Message()
        for step in self._outbox[:count]:
            for request in step.requests(self._sent):
                if not message.has_room(request):
                    self._post(message)
                    message = Message()
                    message.has_room(request)
                message.requests.append(request)
            message.ends.append((len(message.requests) - 1, step))
        self._post(message)

    def _post(self, message: Message) -> None:
        if not message.requests:
            return
        if not self._asked:
            self._since = time.monotonic()

        def sent_as(first: int) -> None:
            self._asked.extend([(first + end, step) for end, step in message.ends])
            del self._outbox[: len(message.ends)]

        self.link.send(message.requests, sent_as, self._see_to_sources, self._blame.is_careful(self.steps))

    def wait(self, step: Work) -> None:
        """Send what there is to do, and wait until ``step`` was done or refused. Raises what came before it raised."""
        waited = False
        while not step.answered:
            if self._outbox:
                self.flush()
            if self._number(step) is None:
                break
            waited = self._await(step) or waited
        self.count(round_trips=int(waited and not isinstance(step, AskWork)))  # questions of ours are nobody's

    def _await(self, step: Work) -> bool:
        """Wait until something that was sent was answered, or something went wrong; whether that took time."""
        waited = False
        while not step.answered:
            seq = self._number(step)
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

    def _number(self, step: Work) -> int | None:
        """That of a step that was sent and is not answered; looked for from the newest."""
        for seq, asked in reversed(self._asked):
            if asked is step:
                return seq
        return None

    def withdraw(self, step: Work) -> None:
        """Nobody waits for it any more: it is not done, unless it was sent already."""
        if step in self._outbox:
            self._outbox.remove(step)
            self.journal.remove([step])

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
        if self.closed or not self._asked:
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
        if self._asked and self._asked[0][0] <= applied:
            try:
                with Uninterrupted():
                    step = self._take_answers(applied)
            except WireError as error:
                self.link.distrust(error)
                raise
            now = time.monotonic()
            step.seconds, self._since = now - self._since, now  # the last one stands for those before it
        if self.link.warnings:
            texts, self.link.warnings = self.link.warnings, []
            warn_of(texts)
        events, self._events = self._events, []
        for event in events:
            ran.tell(event)

    def _take_answers(self, applied: int) -> Work:
        """Those up to this number, of which there are some; the last step that was answered."""
        mispredictions, self.link.mispredictions = self.link.mispredictions, []
        while True:
            seq, step = self._asked.popleft()
            if mispredictions and isinstance(step, RunWork):
                report_mispredictions(mispredictions, seq, step)
            if isinstance(step, RunWork) and step.queued:
                self._add_event(step)
            step.done(self.link.take(seq))
            if isinstance(step, UploadWork):
                self._progress.done(step.contents[0].nbytes)
            elif isinstance(step, RunWork):
                counters.ops_executed += len(step.sized.known.program.instructions)
                counters.epoch += 1
            self._losses = 0
            if not self._asked or self._asked[0][0] > applied:
                return step

    def _add_event(self, step: RunWork) -> None:
        """A run is over that listeners are to be told of; what was sent later than an answer came began then."""
        now = time.perf_counter()
        began = max(step.queued, self._answered)
        self._answered = now
        device = next((spec.device for spec in step.sized.specs if spec is not None), 0)
        self._events.append(Ran(*run_of(step.recorded_nodes), began, now, step.queued, f"worker {device}"))

    def count(self, round_trips: int = 0) -> None:
        """Add to the statistics what went over the socket since the last time."""
        before, self._counted = self._counted, dict(vars(self.link.counts))
        more = {name: n - before[name] for name, n in self._counted.items() if n != before[name]}
        traffic.add(round_trips=round_trips, **more)

    def close(self) -> None:
        """Say good-bye to the worker, for good."""
        self._progress.end()
        self.closed = True
        self.count()
        self.link.close()

    # --- failures ---

    def _failed(self, failure: dict[str, Any]) -> None:
        """A step has failed, and the worker has refused what was sent behind it."""
        self._progress.end()
        following = [step for last, step in self._asked if last >= failure["seq"]] + self._outbox
        again = not following or following[0].retry(failure)
        with Uninterrupted():
            self._asked.clear()
            self._outbox = []
            self.link.resume()
            self._sent = Sent(switches=None)  # definitions behind the failure were refused too
            if again:
                self._outbox = following
            else:
                self._refused(following, failure)

    def _refused(self, following: list[Work], failure: dict[str, Any]) -> None:
        """The first of these steps has failed, or was cancelled: raise that, and take back the others."""
        failed = following.pop(0) if failure.get("type") != "Cancelled" or isinstance(following[0], RunWork) else None
        error = error_named(failure.get("type"), failure.get("text"))
        raised: BaseException = error
        gone: list[Work] = []
        if isinstance(failed, RunWork):
            raised = stopped(failed, failure, error, self.memory)
        if failed is not None and not failed.answered:
            gone.append(failed)
        self.journal.remove(gone)
        self._outbox = self._take_back(following, raised if isinstance(raised, Exception) else error)
        if failed is None:
            return
        if isinstance(failed, CallWork):
            failed.error, failed.answered = error, True
            return
        for block in failed.makes if not isinstance(failed, RunWork) else ():
            block.error = lost_error(str(error), block) if isinstance(error, WorkerLostError) else error
        raise raised

    def _take_back(self, steps: list[Work], error: Exception) -> list[Work]:
        """What was to be done behind a failure: runs are pending again, what else was to be made is lost to ``error``.
        The steps that are to be done all the same."""
        kept: list[Work] = []
        gone: list[Work] = []
        for step in reversed(steps):
            if step.refused():
                kept.insert(0, step)
                continue
            gone.append(step)
            step.spoil(error)
            self.memory.forget(step.handles)
        self.journal.remove(gone)
        return kept

    def cancel(self) -> None:
        """Ctrl-C: have the worker stop between two operations, and take back what it has not done. Replays cannot be
        taken back: where there is one, the wait ends and the work does not."""
        if any(isinstance(step, ReplayWork) for _, step in self._asked):
            return
        self.link.cancel()
        deadline = time.monotonic() + _CANCEL
        while self._asked and time.monotonic() < deadline:
            try:
                self.link.reach(self._asked[-1][0], _PATIENCE)
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
        return self._successor is not None or self.link.is_lost or self._connection.is_gone()

    def revive(self) -> None:
        """Take another worker if this one is known to be lost; say again what may not have been heard. To be called
        while others wait for it, also by what waits for it inside of a recovery of this one."""
        if self._successor is not None:
            with contextlib.suppress(LinkLost):  # which is seen where that recovery goes on
                self._successor.advance()
        elif not self.closed and self.is_lost:
            self._recover("a copy from it was waited for")
        for step in self._in_flight():
            step.say_again()

    def _in_flight(self) -> list[Work]:
        if self._successor is not None:
            return self._successor.in_flight()
        return [step for seq, step in self._asked if seq > self.link.applied]

    def _see_to_sources(self) -> None:
        """Something is waited for: have other workers do what they can for it."""
        for source in {id(end): end for step in self._in_flight() for end in step.sources}.values():
            source.revive()
        for step in self._in_flight():
            step.say_again()

    def _recover(self, reason: str) -> None:
        """Take another worker, and let it have all that is still needed."""
        self._progress.end()
        self._losses += 1
        if self._losses > _LOSSES:
            self._losses = 0
            raise WorkerLostError(f"{_LOSSES} workers in a row were lost and had done nothing: {reason}")
        at = self.link.at
        unanswered = [(seq, step) for seq, step in self._asked if seq > self.link.applied]
        culprit = self._blame.lost(self.steps, [step for _, step in unanswered])
        try:
            self._replace(reason)
        except BaseException:
            self.link.close()  # not all is there: whoever needs it takes another worker
            raise
        finally:
            self._successor = None
        if culprit is not None and culprit in self._outbox:
            known = at is not None and any(step is culprit and seq == at[0] for seq, step in unanswered)
            self._give_up(culprit, at[1] if known and at is not None else None)

    def _give_up(self, step: Work, index: int | None) -> None:
        """A step has ended its worker too often: take it back, and raise that."""
        place = self._outbox.index(step)
        following = self._outbox[place + 1 :]
        del self._outbox[place:]
        error = self._blame.error(step, index)
        self.journal.remove([step])
        self._outbox += self._take_back(following, error)
        self.memory.forget(step.handles)
        self._blame.give_up(step, index, error)
        if not isinstance(step, CallWork):
            raise error

    def _replace(self, reason: str) -> None:
        started = time.monotonic()
        with Uninterrupted():
            self._outbox = self.steps()  # stays so if no worker is to be had
            self._asked.clear()
        self.drop()
        if self.closed or self.ending:
            raise WorkerLostError(f"the {self._connection.name} was disconnected")
        self.count()
        self.link.close()
        for _ in range(_ATTEMPTS):
            self.link = _ours(self._connection.reopen(reason))
            self._counted = vars(SocketCounts())
            self._successor = Successor(self.link, self.journal, self._offers, self._reach)
            try:
                count = self._again(reason)
            except LinkLost as lost:
                reason = str(lost)
                continue
            self._sent = self._successor.sent
            self._drop_lost()
            seconds = time.monotonic() - started
            traffic.recovered(count, seconds)
            logger.warning(
                "the %s was lost (%s); %d step(s) were done again in %.2f s",
                *(self._connection.name, reason, count, seconds),
            )
            if self.link.welcome["limits"].get("spill"):
                self._outbox.append(RolesWork((handle, block) for handle, (block, _) in self.memory.alive.items()))
            return
        raise WorkerLostError(f"{_ATTEMPTS} workers in a row were lost while work was done again: {reason}")

    def _again(self, reason: str) -> int:
        """Do again what is needed and was done before; how many steps that were. What cannot be done is lost."""
        waiting = list(self._outbox)
        pending = {id(step) for step in waiting}
        done = [step for step in self.journal.steps if id(step) not in pending]
        handles = {*self.memory.alive, *[handle for step in waiting for handle in step.inputs]}
        blocks = [block for block, _ in self.memory.alive.values() if block.error is None]
        blocks += [block for step in waiting for block in (*step.reads, *step.writes)]
        needed = self.journal.needed(handles, blocks, done)
        assert self._successor is not None
        self._successor.do_again(needed, reason)
        made = {handle for step in needed for handle in step.handles}
        extra = sorted(made - handles)
        self._outbox[:0] = [FreeWork(tuple(extra[i : i + _FREED])) for i in range(0, len(extra), _FREED)]
        return len(needed)

    def _drop_lost(self) -> None:
        """Do not ask for what was lost: whoever reads it gets the error of its block."""
        spoiled = {handle: block for handle, (block, _) in self.memory.alive.items() if block.error is not None}
        for step in list(self._outbox) if spoiled else ():
            blocks = [*step.reads, *[spoiled[handle] for handle in step.inputs if handle in spoiled]]
            error = next((block.error for block in blocks if block.error is not None), None)
            if error is not None:
                self._outbox.remove(step)
                self._outbox += self._take_back([step], error)
                if isinstance(step, CallWork):
                    step.error, step.answered = error, True


def _ours(link: Link) -> Link:
    """A link that is closed by us at the end of the process, when the last statistics were asked for."""
    atexit.unregister(link.close)
    return link
