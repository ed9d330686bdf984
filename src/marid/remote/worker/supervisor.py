"""Where the clients of a worker with keys connect: who they are is found out here, and nothing else.

Each owner of a key has a process of its own, which runs its programs and holds its tensors (``worker.py``); messages
are handed on as they come, unread. A process that is lost is replaced by one that waits ready, and its clients are told
that what it held is gone. The supervisor alone has the worker's secret key, and holds no tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from marid.engine.plain import as_bytes, as_text
from marid.errors import WireError
from marid.remote.wire.codec import SEGMENTS, VERSION, decode, encode, pack_plain, unpack_plain
from marid.remote.wire.endpoints import WorkerKeys, received
from marid.remote.worker.connections import PEER, ServerSocket, microseconds, passed_on, seconds_from

_IDLE = 500  # milliseconds between looks at keys
_DRAINING = 10  # the same while a client does not take what it asked for
_QUEUED = 64 << 20  # bytes for the clients of one owner that may wait here; more wait in the owner's process
_EARLY = 64  # messages for a process that is not there yet
_ROUTES = 1024  # connections of one owner that are notified when its process is lost
_COLLECTING = ("collect", "collected")  # what another worker may ask for
_KEYS = 1.0  # seconds between looks at which keys are still there
_MESSAGES = 4096  # for one process that may wait until it takes them


class _Process:
    """A process for one owner, from before it is there until it is lost. ``owner`` is empty while it is spare."""

    def __init__(self, context: zmq.Context[Any], channel: str) -> None:
        self.channel = channel
        self.owner = b""
        self.ready = False
        self.routes: dict[bytes, None] = {}
        self.early: list[list[Any]] = []
        self.tickets: dict[bytes, bytes] = {}
        self.leaving: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.listened = True
        self.pace = self.pace_of_others = math.inf
        self.pair = context.socket(zmq.PAIR)
        self.pair.linger = 0
        self.pair.rcvhwm = 64
        self.pair.sndhwm = _MESSAGES
        self.pair.bind(channel)
        Path(channel.removeprefix("ipc://")).chmod(0o600)

    def queued(self) -> int:
        """Bytes that its clients have not taken yet."""
        while self.leaving and self.leaving[0][0].done:
            self.leaving.popleft()
        return sum(nbytes for _, nbytes in self.leaving)


class Supervisor:
    """Serves on ``address`` those whose keys are in the directory ``keys``, ``owners`` of them at a time. Processes are
    asked for, and heard of, through ``keeper``."""

    def __init__(self, address: str, keys: str | os.PathLike[str], owners: int, keeper: socket.socket) -> None:
        self._keys = WorkerKeys(keys)
        self._owners = owners
        self._keeper = keeper
        self._socket = ServerSocket(address, self._keys)
        self._socket.admits_peer = lambda key: any(key in one.tickets.values() for one in self._processes.values())
        self.address = self._socket.address
        self._folder = tempfile.mkdtemp(prefix="marid-owners-")
        self._processes: dict[str, _Process] = {}
        self._by_owner: dict[bytes, _Process] = {}
        self._spare: _Process | None = None
        self._removed: list[bytes] = []  # connections of owners whose keys were removed
        self._heard = b""
        self._looked = 0.0
        self._stopping = False
        keeper.setblocking(False)
        self._socket.also(keeper.fileno(), True)

    def serve(self) -> None:
        """Serve until ``stop``."""
        try:
            self._spare = self._start()
            while not self._stopping:
                listened = [self._listen(one) for one in self._processes.values()]
                for route, owner, frames in self._socket.poll(_IDLE if all(listened) else _DRAINING):
                    self._take(route, owner, frames)
                self._hear_keeper()
                for process in list(self._processes.values()):
                    if process.listened:
                        self._answer(process)
                if time.monotonic() - self._looked > _KEYS:
                    self._look_at_keys()
        finally:
            for process in list(self._processes.values()):
                self._end(process)
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """Stop serving; from a signal's handler."""
        self._stopping = True
        self._socket.wake()

    # --- processes ---

    def _start(self) -> _Process:
        channel = f"ipc://{self._folder}/{secrets.token_hex(16)}"
        process = self._processes[channel] = _Process(self._socket.context, channel)
        self._socket.also(process.pair, True)
        self._ask_keeper("spawn", channel)
        return process

    def _process_of(self, owner: bytes) -> _Process | None:
        """The process of an owner; None where there are as many as there may be."""
        found = self._by_owner.get(owner)
        if found is None:
            if len(self._by_owner) >= self._owners and not self._end_idle():
                return None
            found, self._spare = self._spare or self._start(), None
            found.owner = owner
            self._by_owner[owner] = found
            self._share_paces()
            self._spare = self._start()
        return found

    def _end_idle(self) -> bool:
        """End the process of an owner who is not connected any more; whether there was one."""
        for process in self._by_owner.values():
            if not any(self._socket.is_connected(route) for route in process.routes):
                self._end(process)
                return True
        return False

    def _end(self, process: _Process) -> None:
        """A process has ended, or is to."""
        if self._processes.pop(process.channel, None) is None:
            return
        if process.listened:
            self._socket.also(process.pair, False)
        process.pair.close(0)
        with contextlib.suppress(OSError):
            os.unlink(process.channel.removeprefix("ipc://"))
        if self._by_owner.get(process.owner) is process:
            del self._by_owner[process.owner]
        if self._spare is process:
            self._spare = None
        self._share_paces()
        self._ask_keeper("end", process.channel)

    def _lost(self, process: _Process) -> None:
        """A process has ended: another one takes its place at once, and clients hear that what it held is gone."""
        routes = list(process.routes)
        self._end(process)
        if process.owner:
            for route in routes:
                self._socket.send(route, _header({"kind": "gone"}), [])
        if self._spare is None:
            self._spare = self._start()

    def _ask_keeper(self, kind: str, channel: str) -> None:
        self._keeper.setblocking(True)
        self._keeper.sendall(f"{kind} {channel}\n".encode())
        self._keeper.setblocking(False)

    def _hear_keeper(self) -> None:
        """What the keeper says: which processes have ended."""
        try:
            data = self._keeper.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:  # the keeper has ended, and so do we
            self._stopping = True
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            process = self._processes.get(line.decode().partition(" ")[2])
            if process is not None:
                self._lost(process)

    def _look_at_keys(self) -> None:
        """Let go whose key was removed."""
        self._looked = time.monotonic()
        self._socket.disconnect(self._removed)  # who were notified the last time
        self._removed.clear()
        admitted = self._keys.admitted()
        for owner, process in list(self._by_owner.items()):
            if owner not in admitted:
                for route in process.routes:
                    self._socket.send(route, _refusal("key", "the key is not let in any more"), [])
                self._removed += process.routes
                self._end(process)

    # --- messages ---

    def _take(self, route: bytes, owner: bytes, frames: list[Any]) -> None:
        """A message of a client, or of another worker."""
        if not 1 <= len(frames) <= SEGMENTS + 1:
            self._socket.send(route, _refusal("malformed", "a message has too many segments, or none"), [])
        elif owner.startswith(PEER):
            self._collected(route, owner, frames)
        elif owner not in self._by_owner and owner not in self._keys.admitted():
            self._socket.disconnect([route])
        else:
            process = self._process_of(owner)
            if process is None:
                self._socket.send(route, _refusal("owners", "the worker serves as many owners as it may"), [])
                return
            if route not in process.routes:
                process.routes[route] = None
                while len(process.routes) > _ROUTES:
                    del process.routes[next(iter(process.routes))]
            self._give(process, [route, owner, *frames])

    def _collected(self, route: bytes, owner: bytes, frames: list[Any]) -> None:
        """Another worker asks for something: whoever has offered it answers."""
        try:
            header = decode(frames[0].buffer)
            ticket = as_bytes(header.get("ticket"), 32, "a ticket") if header.get("kind") in _COLLECTING else None
        except WireError as error:
            self._socket.send(route, _refusal("malformed", str(error)), [])
            return
        if ticket is None:
            refusal = _refusal("owner", "another worker may only collect what it is offered")
            self._socket.send(route, refusal, [])
            return
        for process in self._by_owner.values():
            if ticket in process.tickets:
                self._give(process, [route, owner, *frames])
                return
        self._socket.send(route, _header({"kind": "later", "ticket": ticket}), [])

    def _give(self, process: _Process, parts: list[Any]) -> None:
        if not process.ready:
            process.early.append(parts)
            del process.early[_EARLY:]
            return
        with contextlib.suppress(zmq.Again):  # it does not take anything any more: who waits is told when it ends
            process.pair.send_multipart(parts, int(zmq.NOBLOCK), copy=False)

    def _listen(self, process: _Process) -> bool:
        """Whether to hand on what a process says: not while its clients do not take what is there for them."""
        listen = process.queued() < _QUEUED
        if listen is not process.listened:
            self._socket.also(process.pair, listen)
            process.listened = listen
        return listen

    def _answer(self, process: _Process) -> None:
        for frames in received(process.pair):
            route = frames[0].bytes
            if len(frames) < 2:
                continue
            if not route:
                self._notified(process, frames)
            else:
                tracker, nbytes = passed_on(self._socket, route, frames[1:])
                if tracker is not None:
                    process.leaving.append((tracker, nbytes))

    def _notified(self, process: _Process, frames: list[Any]) -> None:
        """What a process says to the supervisor. It is believed nothing but what is its own."""
        try:
            fields = unpack_plain(frames[1].buffer, 64)
            if type(fields) is not dict:
                return
            kind = as_text(fields.get("kind"), 16, "a kind")
            if kind == "ready":
                process.ready = True
                os.unlink(process.channel.removeprefix("ipc://"))  # nobody else comes in
                for parts in process.early:
                    self._give(process, parts)
                process.early.clear()
                self._share_paces()
            elif kind == "pace":
                process.pace = seconds_from(fields.get("microseconds"))
                self._share_paces()
            elif kind == "offered":
                ticket, key = as_bytes(fields.get("ticket"), 32, "a ticket"), fields.get("key")
                process.tickets.pop(ticket, None)
                if key is not None:
                    process.tickets[ticket] = as_bytes(key, 32, "a key")
        except (WireError, OSError):
            return

    def _share_paces(self) -> None:
        """Let each process know how long the briefest messages of other owners take."""
        for process in self._by_owner.values():
            others = [one.pace for one in self._by_owner.values() if one is not process]
            pace = min(others, default=math.inf)
            if process.ready and pace != process.pace_of_others:
                process.pace_of_others = pace
                self._give(process, [b"", pack_plain(microseconds(pace))])


def _header(fields: dict[str, Any]) -> bytes:
    return encode({"v": VERSION, **fields})


def _refusal(reason: str, text: str) -> bytes:
    return _header({"kind": "refused", "reason": reason, "text": text})
