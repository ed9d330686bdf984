"""A TCP relay between clients and a worker that can be made to fail at a byte: to reset, to fall silent, or to call."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

__all__ = ["Relay"]

_CHUNK = 1 << 16


class Relay:
    """Forwards connections to ``target``. ``arm`` sets what happens after so many more bytes, in either direction."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._fuse: tuple[int, Callable[[], bool]] | None = None
        self._pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fired = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self, after: int) -> None:
        """Break the connection, with what is on its way."""
        self._arm(after, lambda: False)

    def stall(self, after: int) -> None:
        """Forward nothing more on the connections that there are, and close none: they are half open."""

        def stall() -> bool:
            for pair in self._pairs:
                pair.stalled = True
            return True

        self._arm(after, stall)

    def call(self, after: int, what: Callable[[], None]) -> None:
        """Do something else, and break the connection."""

        def call() -> bool:
            what()
            return False

        self._arm(after, call)

    def _arm(self, after: int, action: Callable[[], bool]) -> None:
        with self._lock:
            self._fuse = after, action

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                worker = socket.create_connection(self.target, 5)
            except OSError:
                client.close()
                continue
            worker.settimeout(None)
            pair = _Pair(client, worker)
            with self._lock:
                self._pairs.add(pair)
            for one, other in ((client, worker), (worker, client)):
                threading.Thread(target=self._pump, args=(pair, one, other), daemon=True).start()

    def _pump(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                whole = self._burn(len(data))
                if pair.stalled:
                    continue
                sink.sendall(data[:whole] if whole is not None else data)
                if whole is not None:
                    break
        pair.close()
        with self._lock:
            self._pairs.discard(pair)

    def _burn(self, count: int) -> int | None:
        """Note so many bytes: how many of them still go through before the connection breaks, None if all do."""
        with self._lock:
            if self._fuse is None:
                return None
            left, action = self._fuse
            if left > count:
                self._fuse = left - count, action
                return None
            self._fuse = None
            self.fired += 1
            return None if action() else left

    def close(self) -> None:
        """No more connections, and an end to those that there are."""
        self._listener.close()
        for pair in list(self._pairs):
            pair.close()


class _Pair:
    """A connection, and the one it is forwarded on."""

    def __init__(self, client: socket.socket, worker: socket.socket) -> None:
        self._sockets = client, worker
        self.stalled = False

    def close(self) -> None:
        """Reset both."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)
            one.close()
