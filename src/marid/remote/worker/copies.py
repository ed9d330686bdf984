"""Tensors on their way from worker to worker, on the workers: what others may collect, and what is collected.

The client allows it: the worker that has a tensor is told that whoever comes with some ticket, and has proved some key,
may collect it; the worker that is to have it is told where it is. The one that wants it asks for pieces, a few at a
time, so that neither side holds more than that in messages. Asking again is harmless, so whatever is lost on the way is
asked for again; the ticket is used up when the last piece has come.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import zmq
from zmq.utils import z85

from marid.engine.plain import as_bytes, as_int, as_text
from marid.errors import WireError
from marid.remote.wire.codec import VERSION, decode, encode
from marid.remote.wire.endpoints import ClientKey, ClientSocket, Wake
from marid.remote.wire.requests import TICKET_BYTES

_KEY_BYTES = 32
_PIECE = 4 << 20
_WINDOW = 4  # pieces that are asked for at once
_TICKETS = 4096  # of one session
_AGAIN = 1.0  # seconds after which a piece is asked for again
_LATER = 0.02  # seconds after which one is asked for that is not there yet
_IDLE = 60.0  # seconds that a connection is kept without use
_CONNECTIONS = 64  # of one worker, with a thread each
_RETRY = 0.2  # seconds between attempts to connect
_ADDRESS = re.compile(r"tcp://[\w.:%\[\]-]{1,200}:\d{1,5}|ipc:///[^\0]{1,200}", re.ASCII)
_NOBODY = bytes(16)


class Unreachable(Exception):
    """The worker that has a tensor does not answer the one that is to have it."""


# --- where a tensor is -----------------------------------------------------------------------------------------------


class _Packed(Protocol):
    """Who has packed tensors."""

    def packed(self, handle: int, start: int, longest: int) -> tuple[memoryview, int] | None:
        """So many bytes of a tensor at most, from a place on, and how many it has; None where there is none."""
        ...


class Tickets:
    """What the clients of this worker let others collect. Used under the lock of the sockets. ``published`` is called
    with each ticket and the key that it is for, and with None when it is used up."""

    def __init__(self, published: Callable[[bytes, bytes | None], None]) -> None:
        self._published = published
        self._tickets: OrderedDict[bytes, tuple[_Packed, int, bytes]] = (
            OrderedDict()
        )  # workspace, handle and key, by ticket
        self.collected = 0
        """Bytes that others have collected."""

    def offer(self, workspace: _Packed, header: dict[str, Any]) -> None:
        """Take note of an offer. Raises ``WireError``."""
        ticket = as_bytes(header.get("ticket"), TICKET_BYTES, "a ticket")
        handle = as_int(header.get("handle"), 0, 1 << 53, "a handle")
        peer = as_bytes(header.get("peer"), _KEY_BYTES, "a key")
        found = self._tickets.get(ticket)
        if found is not None and found[0] is not workspace:
            raise WireError("a ticket is known already")
        self._tickets[ticket] = workspace, handle, peer
        self._published(ticket, peer)
        own = [one for one, (of, _, _) in self._tickets.items() if of is workspace]
        for oldest in own[:-_TICKETS]:
            self._withdraw(oldest)

    def forget(self, workspace: _Packed) -> None:
        """A client has left."""
        for ticket in [one for one, (of, _, _) in self._tickets.items() if of is workspace]:
            self._withdraw(ticket)

    def _withdraw(self, ticket: bytes) -> None:
        del self._tickets[ticket]
        self._published(ticket, None)

    def answer(self, header: dict[str, Any], proved: str | None) -> tuple[dict[str, Any], list[Any]] | None:
        """A piece for another worker, which has ``proved`` its key (in hexadecimal digits; None on a worker without
        keys); None where there is nothing to say. Raises ``WireError``."""
        ticket = as_bytes(header.get("ticket"), TICKET_BYTES, "a ticket")
        offer = self._tickets.get(ticket)
        if offer is None or (proved is not None and proved != offer[2].hex()):
            return {"kind": "later", "ticket": ticket}, []  # as if it were not known yet: who asks learns nothing
        if header.get("kind") == "collected":
            self._withdraw(ticket)
            return None
        start = as_int(header.get("start"), 0, 1 << 47, "a place")
        found = offer[0].packed(offer[1], start, _PIECE)
        if found is None:
            return {"kind": "later", "ticket": ticket}, []
        piece, nbytes = found
        as_int(start, 0, nbytes, "a place")
        self.collected += len(piece)
        return {"kind": "piece", "ticket": ticket, "start": start, "nbytes": nbytes}, [piece]


# --- where it is to be -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerAddress:
    """A worker from which tensors are collected: its address, its public key (None without keys) and its boot."""

    address: str
    key: bytes | None
    boot: bytes

    @classmethod
    def read(cls, header: dict[str, Any]) -> PeerAddress:
        """As a client says it. Raises ``WireError``."""
        address = as_text(header.get("address"), 256, "an address")
        if not _ADDRESS.fullmatch(address):
            raise WireError("an address of a worker is none")
        key = header.get("key")
        key = None if key is None else as_bytes(key, _KEY_BYTES, "a key")
        return cls(address, key, as_bytes(header.get("of"), 8, "a boot"))


class Arrival:
    """A tensor that is being collected: ``data`` are its bytes, all there when it ``is_complete``."""

    def __init__(self, ticket: bytes, nbytes: int) -> None:
        self.ticket = ticket
        self.data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.error: Exception | None = None
        self.patience = 0.0
        self.requested_at = time.monotonic()
        self._memory = self.data.numpy().data
        self._changing = threading.Lock()  # what is missing: two threads ask for it
        self._missing = OrderedDict.fromkeys(range(0, nbytes, _PIECE), 0.0)  # pieces, and when to ask for them (again)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return not self._missing

    @property
    def has_ended(self) -> bool:
        """Whether there is no more to wait for."""
        return self.is_complete or self.error is not None

    def restart(self) -> None:
        """Ask for all that is missing."""
        with self._changing:
            self._missing = OrderedDict.fromkeys(self._missing, 0.0)

    def due(self, now: float) -> list[int]:
        """The pieces to ask for."""
        with self._changing:
            found = [start for start, at in itertools.islice(self._missing.items(), _WINDOW) if at <= now]
            for start in found:
                self._missing[start] = now + _AGAIN
        return found

    def later(self, now: float) -> None:
        """It is not there yet."""
        with self._changing:
            for start in itertools.islice(self._missing, _WINDOW):
                self._missing[start] = min(self._missing[start], now + _LATER)

    def take(self, header: dict[str, Any], segments: list[Any]) -> None:
        """A piece has come; one that has come before is ignored. Raises ``WireError``."""
        nbytes = as_int(header.get("nbytes"), 0, 1 << 47, "a number of bytes")
        if nbytes != len(self._memory):
            self.error = WireError(f"a tensor of {len(self._memory)} bytes was to be collected, and it has {nbytes}")
            return
        start = as_int(header.get("start"), 0, nbytes, "a place")
        if start not in self._missing:
            return
        piece = memoryview(segments[0]).cast("B") if len(segments) == 1 else b""
        if len(piece) != min(_PIECE, nbytes - start):
            raise WireError("a piece is longer or shorter than what was asked for")
        self._memory[start : start + len(piece)] = piece
        with self._changing:
            self._missing.pop(start, None)


class Collectors:
    """The connections of a worker to others, one thread each. ``changed`` is called when an arrival has ended."""

    def __init__(self, changed: Callable[[], None]) -> None:
        public, secret = zmq.curve_keypair()
        self.key = z85.decode(public)
        """The public key that this worker proves to others, made for this life of it."""
        self.received = 0
        """Bytes that were collected from others."""
        self._pair = public, secret
        self.changed = changed
        self._context: zmq.Context[Any] = zmq.Context()
        self._lock = threading.Lock()
        self._threads: dict[PeerAddress, _Collector] = {}
        self._stopping = False

    def collect(self, peer: PeerAddress, arrival: Arrival) -> None:
        """Have an arrival come from there; from there only, if it was collected elsewhere before."""
        with self._lock:
            for collector in self._threads.values():
                if collector.peer != peer:
                    collector.arrivals.pop(arrival.ticket, None)
            collector = self._threads.get(peer)
            if collector is None:
                if len(self._threads) >= _CONNECTIONS:
                    arrival.error = Unreachable("the worker collects from as many others as it may already")
                    self.changed()
                    return
                collector = self._threads[peer] = _Collector(self, peer)
            if arrival.ticket not in collector.arrivals:
                arrival.requested_at = time.monotonic()
                arrival.restart()
                collector.arrivals[arrival.ticket] = arrival
            collector.wake.wake()

    def forget(self, arrival: Arrival) -> None:
        """Nobody wants it any more."""
        with self._lock:
            for collector in self._threads.values():
                collector.arrivals.pop(arrival.ticket, None)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._stopping = True
            collectors = list(self._threads.values())
        for collector in collectors:
            collector.wake.wake()
            collector.thread.join()
        self._context.term()

    # --- of the threads ---

    def serve(self, of: _Collector) -> None:
        """What the thread of one connection does."""
        try:
            self._serve(of)
        except zmq.ZMQError as error:  # no such address, or no socket to be had
            with self._lock:
                del self._threads[of.peer]
            for arrival in of.arrivals.values():
                arrival.error = Unreachable(f"the worker at {of.peer.address} cannot be connected to: {error}")
            self.changed()
        finally:
            of.wake.close()

    def _serve(self, of: _Collector) -> None:
        key = None if of.peer.key is None else ClientKey(*self._pair, z85.encode(of.peer.key))
        heard = used = time.monotonic()
        link = ClientSocket(self._context, of.peer.address, key, of.wake)
        made = heard
        while True:
            now = time.monotonic()
            with self._lock:
                arrivals = dict(of.arrivals)
                if self._stopping or (not arrivals and now - used > _IDLE):
                    del self._threads[of.peer]
                    break
            used = now if arrivals else used
            if (link.broken or link.refused or link.dropped) and now - made > _RETRY:
                link.close()
                link = ClientSocket(self._context, of.peer.address, key, of.wake)
                made = now
                for arrival in arrivals.values():
                    arrival.restart()
            for arrival in arrivals.values():
                for start in arrival.due(now):
                    link.send(self._header(of.peer, "collect", arrival.ticket, start=start), [])
                if now - max(heard, arrival.requested_at) > arrival.patience:
                    arrival.error = Unreachable(f"the worker at {of.peer.address} does not answer")
            for frames in link.poll(int(_LATER * 1000) if arrivals else 1000):
                heard = time.monotonic()
                self._take(of.peer, link, arrivals, frames)
            ended = [ticket for ticket, arrival in arrivals.items() if arrival.has_ended]
            with self._lock:
                for ticket in ended:
                    of.arrivals.pop(ticket, None)
            if ended:
                self.changed()
        link.close()

    def _take(self, peer: PeerAddress, link: ClientSocket, arrivals: dict[bytes, Arrival], frames: list[Any]) -> None:
        try:
            header = decode(frames[0].buffer)
            ticket = header.get("ticket")
            arrival = arrivals.get(ticket) if type(ticket) is bytes else None
            if arrival is None or arrival.has_ended:
                return
            if header.get("kind") == "later":
                arrival.later(time.monotonic())
            elif header.get("kind") == "piece":
                arrival.take(header, [frame.buffer for frame in frames[1:]])
                self.received += sum(len(frame) for frame in frames[1:])
                for start in arrival.due(time.monotonic()):
                    link.send(self._header(peer, "collect", arrival.ticket, start=start), [])
                if arrival.is_complete:
                    link.send(self._header(peer, "collected", arrival.ticket), [])
        except WireError:
            return  # asked for again

    def _header(self, peer: PeerAddress, kind: str, ticket: bytes, **fields: Any) -> bytes:
        header = {"v": VERSION, "kind": kind, "session": _NOBODY, "boot": peer.boot, "ticket": ticket}
        return encode({**header, **fields})


class Copies:
    """What one session collects from other workers: ``arrivals`` by ticket, from when they are asked for."""

    def __init__(self, collectors: Collectors) -> None:
        self.arrivals: dict[bytes, Arrival] = {}
        self._collectors = collectors
        self._sources: OrderedDict[bytes, tuple[PeerAddress, int]] = OrderedDict()
        self._lock = threading.Lock()

    def locate(self, header: dict[str, Any]) -> None:
        """The client says where a tensor is; on the thread of the sockets. Raises ``WireError``."""
        ticket = as_bytes(header.get("ticket"), TICKET_BYTES, "a ticket")
        if header.get("address", "") is None:
            self._withdraw(ticket)
            return
        where = PeerAddress.read(header), as_int(header.get("patience"), 1, 3600, "a number of seconds")
        with self._lock:
            self._sources[ticket] = where
            while len(self._sources) > _TICKETS:
                self._sources.popitem(last=False)
            self._begin(ticket)

    def _withdraw(self, ticket: bytes) -> None:
        arrival = self.arrivals.get(ticket)
        if arrival is not None:
            arrival.error = arrival.error or Unreachable("nobody has it any more")
            self._collectors.forget(arrival)
            self._collectors.changed()

    def expect(self, ticket: bytes, nbytes: int) -> Arrival:
        """Have it come, as soon as it is known from where."""
        with self._lock:
            arrival = self.arrivals[ticket] = Arrival(ticket, nbytes)
            self._begin(ticket)
            return arrival

    def _begin(self, ticket: bytes) -> None:
        arrival, where = self.arrivals.get(ticket), self._sources.get(ticket)
        if arrival is not None and where is not None and not arrival.has_ended:
            arrival.patience = where[1]
            self._collectors.collect(where[0], arrival)

    def forget(self, ticket: bytes) -> None:
        """It has come, or nobody wants it any more."""
        with self._lock:
            self._sources.pop(ticket, None)
            arrival = self.arrivals.pop(ticket, None)
            if arrival is not None:
                self._collectors.forget(arrival)

    def clear(self) -> None:
        """The session has ended."""
        for ticket in [*self.arrivals, *self._sources]:
            self.forget(ticket)


class _Collector:
    """One connection."""

    def __init__(self, collectors: Collectors, peer: PeerAddress) -> None:
        self.peer = peer
        self.arrivals: dict[bytes, Arrival] = {}
        self.wake = Wake()
        self.thread = threading.Thread(target=collectors.serve, args=(self,), name="marid-collect", daemon=True)
        self.thread.start()
