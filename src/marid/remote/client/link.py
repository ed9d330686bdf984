"""The client's end of a session: messages are delivered in order and each is applied once, whatever the network does.

Whoever waits for an answer serves the socket meanwhile, so that nothing is handed from thread to thread; a thread of
the link does so when nobody waits. When the connection breaks, it is made again and everything unanswered is sent
again, which the worker recognises. What that cannot mend is ``LinkLost``: the worker has begun a new life, or has given
the session up, or does not come back; what it held is gone.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq
from zmq.utils import z85

from marid.engine.plain import as_int
from marid.errors import AuthenticationError, WireError, WorkerLostError
from marid.remote.client.window import LinkLost, Window
from marid.remote.wire.codec import VERSION, decode, encode
from marid.remote.wire.endpoints import ClientKey, ClientSocket, Wake, greets
from marid.remote.wire.replies import check_welcome
from marid.remote.wire.requests import Request, write_requests
from marid.report.traffic import SocketCounts

_HEARTBEATS = 10  # in a lease, when there is nothing else to say
_RETRY = 0.2  # seconds between attempts to connect
_GREETING = 1.0  # seconds in which a worker greets whoever connects
_DROPS = 3  # connections that end before keys were compared, after which that is taken to be the reason
_SLICE = 100  # milliseconds that one thread serves the socket at most
_BUSY, _IDLE = 0.03, 0.5  # seconds between looks of the link's thread, with and without something unanswered


class Link:
    """A session with the worker at ``address`` (``tcp://host:port`` or ``ipc://path``), to be used from any thread.

    ``key`` is needed where the worker has keys. ``patience`` is how many seconds a worker may be out of reach before
    the session counts as lost, ``timeout`` how long the first answer may take. Raises ``WorkerLostError`` when nobody
    answers, ``AuthenticationError`` when the worker does not accept the key, and ``WireError`` when it speaks another
    version of the protocol.
    """

    def __init__(
        self, address: str, key: ClientKey | None = None, *, patience: float = 30.0, timeout: float = 10.0
    ) -> None:
        self.address = address
        self.session = os.urandom(16)
        self.counts = SocketCounts()
        self.welcome: dict[str, Any] = {}
        """What the worker has said of itself: ``device``, ``torch``, ``pid``, ``limits``."""
        self.at: tuple[int, int] | None = None
        """The newest request that was sent carefully and was begun, and the operator that it has come to."""
        self._key = key
        self._patience = patience
        self._boot: bytes | None = None
        self._window = Window()
        self._cancel: dict[str, Any] = {}
        self._notes: deque[dict[str, Any]] = deque()
        # The socket, and what is known of the connection; ``_serving`` guards it.
        self._serving = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = Wake()
        self._socket: ClientSocket | None = None
        self._greeted = False
        self._drops = 0
        self._nobody_behind = False
        self._torn = False
        self._heard = self._spoke = time.monotonic()
        self._ended = threading.Event()
        atexit.register(self.close)
        self._greet(timeout)
        threading.Thread(target=self._keep, name="marid-link", daemon=True).start()

    def _greet(self, timeout: float) -> None:
        started = time.monotonic()
        try:
            while not self._greeted:
                with self._serving:
                    self._serve(_SLICE)
                if self._window.error is not None:
                    raise self._window.error
                longest = max(timeout, self._patience) if self._nobody_behind else timeout
                if time.monotonic() - started > longest:
                    if self._nobody_behind:
                        raise WorkerLostError(
                            f"{self.address} takes connections and ends them: nothing answered behind it within "
                            f"{longest:g} s. Is it a tunnel or a proxy, and does `marid worker` run behind it?"
                        )
                    raise WorkerLostError(
                        f"no worker answers at {self.address} within {timeout:g} s: is `marid worker` running there, "
                        f"and is the address right? `marid doctor {self.address}` looks closer"
                    )
        except BaseException:
            self.close()
            raise

    @property
    def boot(self) -> bytes:
        """Which life of the worker this is."""
        assert self._boot is not None
        return self._boot

    @property
    def is_encrypted(self) -> bool:
        """Whether both sides have proved their keys."""
        return self._key is not None

    @property
    def peer_address(self) -> dict[str, Any]:
        """Where other workers find this one, and the key that it will prove to them."""
        key = None if self._key is None else z85.decode(self._key.worker)
        return {"address": self.address, "key": key, "of": self.boot}

    @property
    def is_lost(self) -> bool:
        """Whether the session is known to be gone."""
        return self._window.error is not None

    def warnings(self) -> list[str]:
        """What kernels have warned of, once."""
        texts, self._window.warnings = self._window.warnings, []
        return texts

    def mispredictions(self) -> list[Any]:
        """Results that were not what was recorded, once: with the answers that are taken next."""
        found, self._window.mispredictions = self._window.mispredictions, []
        return found

    @property
    def applied(self) -> int:
        """The newest request that is known to be applied."""
        return self._window.applied

    # --- requests ---

    def send(
        self,
        requests: Sequence[Request],
        sent_as: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
        careful: bool = False,
    ) -> int:
        """Send requests in one message; the number of the first, those of the others follow. Waits only while more is
        in flight than the worker allows, and does ``meanwhile`` again and again then. Segments must stay as they are
        until they are answered. ``sent_as`` is told that number too, and Ctrl-C comes before both or after both.
        ``careful``: have the worker say what it comes to (``at``).

        Raises ``RequestFailed`` when one sent before has failed, and ``LinkLost``.
        """
        data, segments = write_requests(requests)
        limits = self.welcome["limits"]
        while (first := self._window.enqueue(data, segments, limits, sent_as, careful)) is None:
            self._pass_time(_SLICE)
            if meanwhile is not None:
                meanwhile()
        self._pass_on()
        return first

    def try_send(self, requests: Sequence[Request]) -> int | None:
        """The same without waiting; None where there is no room for it now."""
        first = self._window.enqueue(*write_requests(requests), self.welcome["limits"], None)
        if first is not None:
            self._pass_on()
        return first

    def wait(self, seq: int, timeout: float | None = None) -> Any:
        """``reach`` and ``take`` in one."""
        self.reach(seq, timeout)
        return self.take(seq)

    def reach(self, seq: int, timeout: float | None = None) -> None:
        """Wait until a request is applied.

        Raises ``RequestFailed`` when it or one before it has failed, ``LinkLost``, and ``TimeoutError``.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._window.applied < seq:
            self._window.check()
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"no answer from {self.address} within {timeout:g} s")
            self._pass_time(_SLICE)

    def take(self, seq: int) -> Any:
        """The answer to a request that is applied, once: a CPU tensor for ``Fetch``, plain data for others, None where
        there is none."""
        return self._window.take(seq)

    def poll(self) -> None:
        """Take what has come, and raise what went wrong: ``RequestFailed``, ``LinkLost``."""
        if self._window.unanswered:
            self._pass_time(0)
        self._window.check()

    def resume(self) -> int:
        """Go on after a failure: what was sent behind the request that failed was not applied, and numbers go on from
        there. The number that the next request gets."""
        return self._window.resume()

    def cancel(self) -> None:
        """Ask the worker to stop what it was sent: it fails as ``Cancelled`` between two operations, or is done by
        then."""
        with self._window.guard:
            self._cancel = self._window.cancel()
        self._pass_on()

    def notify(self, fields: dict[str, Any]) -> None:
        """Say something that is no request, at once: it is not answered, and lost when the connection breaks. Does
        nothing when the session is gone."""
        with self._window.guard:
            if self._window.error is None:
                self._notes.append(fields)
        self._pass_on()

    def distrust(self, error: WireError) -> None:
        """The worker has sent something that is not what was asked for: have no more to do with it."""
        self._window.fail(error)

    def close(self) -> None:
        """Say good-bye; the worker frees what it holds. May be called again."""
        atexit.unregister(self.close)
        self._window.fail(LinkLost("the connection was closed"))
        self._ended.set()
        self._wake.wake()
        with self._serving:
            if self._context.closed:
                return
            if self._socket is not None:
                self._socket.close(self._header({"kind": "bye"}) if self._greeted and not self._torn else None)
            self._socket = None
            self._context.term()
            self._wake.close()

    # --- serving the socket ---

    def _pass_time(self, milliseconds: int) -> None:
        """Serve the socket until something happens, but not longer than that; or let others serve it."""
        if self._serving.locked():
            self._wake.wake()
            if milliseconds:
                with self._window.changed:
                    self._window.changed.wait(milliseconds / 1000)
            return
        with self._serving:
            self._serve(milliseconds)

    def _pass_on(self) -> None:
        """Send what is to be sent, or have it sent by whoever serves the socket."""
        if self._serving.locked():
            self._wake.wake()
            return
        with self._serving:
            self._serve(None)

    def _keep(self) -> None:
        while not self._ended.wait(_BUSY if self._window.unanswered or not self._greeted else _IDLE):
            self._pass_time(0)

    def _serve(self, milliseconds: int | None) -> None:
        """Send what is to be sent and, unless that is None, take what has come or comes within that time."""
        if self._window.error is not None:
            return
        try:
            if self._socket is None or self._torn:
                self._connect()
            self._torn = True  # an interrupt in here may come between two parts of a message
            self._flush()
            if milliseconds is not None:
                self._receive(milliseconds)
                self._flush()
            self._torn = False
        except WireError as error:
            self._window.fail(error)

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self.counts.reconnects += 1
        self._greeted = False
        self._socket = ClientSocket(self._context, self.address, self._key, self._wake)
        self._put({"kind": "hello", "torch": torch.__version__}, [])

    def _receive(self, milliseconds: int) -> None:
        assert self._socket is not None
        for frames in self._socket.poll(milliseconds):
            self._heard = time.monotonic()
            self.counts.messages_down += 1
            self.counts.bytes_down += sum(map(len, frames))
            self._take(decode(frames[0].buffer), [frame.buffer for frame in frames[1:]])
        now = time.monotonic()
        if self._boot is None and (self._socket.refused or self._drops >= _DROPS):
            if self._socket.refused or greets(self.address, _GREETING):
                self._window.fail(_refused(self.address, self._key))
            else:
                self._nobody_behind, self._drops = True, 0  # it may come back
        elif self._greeted and self._socket.broken:
            self._heard = now
            self._connect()
        elif (self._socket.broken or self._socket.dropped) and now - self._spoke > _RETRY:
            self._drops += self._socket.dropped
            self._connect()  # what was said is lost, the greeting too
        elif not self._greeted and self._boot is not None and now - self._heard > self._patience:
            self._window.fail(LinkLost(f"the worker at {self.address} was out of reach for {self._patience:g} s"))
        elif self._greeted and now - self._spoke > self.welcome["limits"]["lease"] / _HEARTBEATS:
            self._put({"kind": "ping"}, [])

    def _flush(self) -> None:
        window = self._window
        while self._greeted and (window.queue or self._notes or self._cancel):
            with window.guard:
                cancel, self._cancel = self._cancel, {}
                notes = [self._notes.popleft() for _ in range(len(self._notes))]
                outgoing = window.outgoing()
            for note in ([cancel] if cancel else []) + notes:
                self._put(note, [])
            if outgoing is not None:
                sent, fields = outgoing
                window.weigh(sent, self._put(fields, sent.segments))

    def _put(self, fields: dict[str, Any], segments: list[Any]) -> int:
        """Send a message; its bytes."""
        assert self._socket is not None
        nbytes = self._socket.send(self._header(fields), segments)
        self.counts.bytes_up += nbytes
        self.counts.messages_up += 1
        self._spoke = time.monotonic()
        return nbytes

    def _header(self, fields: dict[str, Any]) -> bytes:
        return encode({"v": VERSION, "session": self.session, "boot": self._boot, **fields})

    # --- what the worker says ---

    def _take(self, header: dict[str, Any], segments: list[Any]) -> None:
        kind = header.get("kind")
        if kind == "reply":
            self._window.reply(header, segments)
        elif kind == "welcome":
            self._welcomed(header)
        elif kind == "at":
            seq, index = (as_int(header.get(name), 0, 1 << 53, name) for name in ("seq", "index"))
            self.at = seq, index
        elif kind == "gone":
            self._window.fail(LinkLost(f"the worker at {self.address} no longer has the session"))
        elif kind == "refused":
            self._window.fail(WireError(f"the worker at {self.address} refuses: {header.get('text')}"))

    def _welcomed(self, header: dict[str, Any]) -> None:
        check_welcome(header)
        if self._boot is None:
            self._boot = header["boot"]
            self.welcome = header
        elif header.get("boot") != self._boot:
            self._window.fail(LinkLost(f"the worker at {self.address} was started again"))
            return
        self.counts.resent += self._window.send_again()
        self._greeted = True
        self._drops = 0


def _refused(address: str, key: ClientKey | None) -> AuthenticationError:
    given = "with the key that was given" if key is not None else "without a key"
    return AuthenticationError(
        f"the worker at {address} refuses a connection {given}: the worker's owner makes keys with "
        "`marid worker keygen NAME`, and you connect with key=<the file NAME.json>; a worker without keys takes none"
    )
