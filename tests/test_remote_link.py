"""Delivery over a bad network: connections that break, stand still, or lose what was sent."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from marid.errors import WorkerLostError
from marid.remote.client.link import Link
from marid.remote.client.window import LinkLost, RequestFailed
from marid.remote.launch.local import LocalWorker
from marid.remote.wire import requests as ask
from marid.remote.wire.fields import Handle
from tests.helpers import interrupted
from tests.remote_helpers import serving, upload, worker_process


class Proxy:
    """Stands between a client and a worker, counts bytes, and does them harm. Broken connections can be made again."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pairs: dict[socket.socket, socket.socket] = {}
        self.stands_still = False
        """Take what is sent, and pass nothing on."""
        self.limit: int | None = None
        """Break the connection when so many more bytes have passed."""
        self.passed = 0
        self.breaks = 0
        self._break = False
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def break_now(self) -> None:
        """Break all connections."""
        self._break = True

    def close(self) -> None:
        self._ended = True
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._pairs:
                    self._pass_on(key.fileobj)  # pyright: ignore
            if self._break:
                self._break = False
                self._drop()
        self._drop()
        self._listener.close()

    def _accept(self) -> None:
        one, _ = self._listener.accept()
        try:
            other = socket.create_connection(self._target, 1)
        except OSError:
            one.close()
            return
        for end, far in ((one, other), (other, one)):
            self._pairs[end] = far
            self._selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, end: socket.socket) -> None:
        try:
            data = end.recv(65536)
            if data and self.stands_still:
                return
            if data and self.limit is not None:
                data = data[: self.limit]
                self.limit -= len(data)
            if data:
                self._pairs[end].sendall(data)
            self.passed += len(data)
        except OSError:
            data = b""
        if not data or self.limit == 0:
            self.limit = None
            self._drop()

    def _drop(self) -> None:
        self.breaks += bool(self._pairs)
        for end in self._pairs:
            self._selector.unregister(end)
            end.close()
        self._pairs.clear()


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    with worker_process() as one:
        yield one


@pytest.fixture
def proxy(worker: LocalWorker) -> Iterator[Proxy]:
    one = Proxy(worker.address)
    yield one
    one.close()


@contextlib.contextmanager
def _through(proxy: Proxy) -> Iterator[Link]:
    link = Link(proxy.address)
    try:
        yield link
    finally:
        link.close()


def _add(handle: int, result: int) -> ask.Call:
    return ask.Call("aten.add_.Tensor", (Handle(handle), 1.0), (), None, result)


def _count(link: Link, turns: int, harm: object) -> float:
    """Add one so many times, in messages of several requests, with ``harm`` in between; the sum."""
    link.send([upload(1, torch.zeros(1))])
    for turn in range(turns):
        harm(turn)  # pyright: ignore
        link.send([_add(1, 10 + 2 * turn), _add(1, 11 + 2 * turn), ask.Free((10 + 2 * turn, 11 + 2 * turn))])
    return link.wait(link.send([ask.Fetch(1)]), 60).item()


def test_nothing_is_lost_or_done_twice_when_connections_break(proxy: Proxy) -> None:

    def harm(turn: int) -> None:
        if turn % 25 == 24:
            time.sleep(0.02)
            proxy.break_now()

    with _through(proxy) as link:
        assert _count(link, 200, harm) == 400.0
        assert proxy.breaks >= 1  # ZeroMQ may mend one that lost nothing, unseen by the link


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_in_the_middle_of_a_message(proxy: Proxy, seed: int) -> None:
    """In either direction, after any number of bytes."""
    choose = random.Random(seed)

    def harm(turn: int) -> None:
        if proxy.limit is None and turn % 10 == 5:
            proxy.limit = choose.randint(1, 3000)

    with _through(proxy) as link:
        assert _count(link, 120, harm) == 240.0
        assert proxy.breaks >= 1


def test_a_large_tensor_over_a_connection_that_breaks(proxy: Proxy) -> None:
    tensor = torch.randn(2_000_000)
    with _through(proxy) as link:
        proxy.limit = 3_000_000
        link.wait(link.send([upload(1, tensor)]), 60)
        proxy.limit = 5_000_000
        assert torch.equal(link.wait(link.send([ask.Fetch(1)]), 60), tensor)
        assert link.counts.reconnects >= 2
        assert link.counts.resent >= 2


def test_a_connection_that_stands_still_is_made_again(proxy: Proxy) -> None:
    """Half open: nothing says that it is broken, but heartbeats do not come back."""
    with _through(proxy) as link:
        link.wait(link.send([upload(1, torch.zeros(1))]))
        proxy.stands_still = True
        seq = link.send([_add(1, 10)])
        time.sleep(1)
        threading.Timer(8.0, lambda: setattr(proxy, "stands_still", False)).start()
        link.wait(seq, 60)
        assert link.counts.reconnects >= 1
        assert link.wait(link.send([ask.Fetch(1)]), 60).item() == 1.0


def test_a_failure_is_told_after_a_connection_broke(proxy: Proxy) -> None:
    with _through(proxy) as link:
        link.wait(link.send([upload(1, torch.zeros(2))]))
        proxy.limit = 900  # the request arrives, the answer does not
        seq = link.send([ask.Call("aten.mm.default", (Handle(1), Handle(1)), (), None, 50)])
        time.sleep(0.2)
        proxy.break_now()
        with pytest.raises(RequestFailed, match="RuntimeError"):
            link.wait(seq, 60)
        link.resume()
        assert link.wait(link.send([ask.Fetch(1)]), 60).tolist() == [0.0, 0.0]


def test_an_interrupt_while_waiting_leaves_the_link_usable(worker: LocalWorker) -> None:
    """Wherever it comes: what was sent is done once, and what is asked is answered."""
    link = Link(worker.address)
    try:
        link.send([upload(1, torch.zeros(1))])
        done = 0
        for turn in range(60):
            with contextlib.suppress(KeyboardInterrupt), interrupted(0.0005 + turn * 0.0001):
                for _ in range(50):
                    link.wait(link.send([_add(1, 100 + done), ask.Free((100 + done,))]))
                    done += 1
            done = int(link.wait(link.send([ask.Fetch(1)]), 60).item())
        assert done > 60
    finally:
        link.close()


def test_threads_share_a_link(worker: LocalWorker) -> None:
    link = Link(worker.address)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                value = float(number * 1000 + turn)
                handle = number * 1000 + turn
                seq = link.send([upload(handle, torch.full((3,), value)), ask.Fetch(handle), ask.Free((handle,))])
                if link.wait(seq + 1, 60).tolist() != [value] * 3:
                    wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    link.close()
    assert not wrong


def test_clients_that_come_and_go() -> None:
    """Several clients at once over connections that break; nothing is left of them."""
    with worker_process("--lease", "5") as worker:  # a good-bye may be lost
        _come_and_go(worker, clients=4, seconds=3.0)


@pytest.mark.conformance
def test_thirty_two_clients_for_five_minutes() -> None:
    with worker_process("--lease", "15") as worker:
        _come_and_go(worker, clients=32, seconds=300.0)


def _come_and_go(worker: LocalWorker, clients: int, seconds: float) -> None:
    wrong: list[object] = []
    until = time.monotonic() + seconds

    def work(seed: int) -> None:
        choose = random.Random(seed)
        proxy = Proxy(worker.address)
        try:
            while time.monotonic() < until:
                with _through(proxy) as link:
                    turns = choose.randint(1, 60)

                    def harm(_turn: int) -> None:
                        if proxy.limit is None and choose.random() < 0.05:
                            proxy.limit = choose.randint(1, 5000)

                    if _count(link, turns, harm) != 2.0 * turns:
                        wrong.append(seed)
                    proxy.limit = None
        except BaseException as error:
            wrong.append(error)
        finally:
            proxy.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    link = Link(worker.address)
    give_up = time.monotonic() + 40
    while True:
        stats = link.wait(link.send([ask.Stats()]))
        if (stats["sessions"], stats["tensors"], stats["other_bytes"]) == (1, 0, 0):
            break
        assert time.monotonic() < give_up, stats
        time.sleep(0.1)
    link.close()


def test_a_worker_that_stops_for_a_while_is_waited_for(worker: LocalWorker) -> None:
    link = Link(worker.address)
    link.wait(link.send([upload(1, torch.zeros(1))]))
    os.kill(serving(worker), signal.SIGSTOP)
    try:
        seq = link.send([_add(1, 10)])
        with pytest.raises(TimeoutError):
            link.wait(seq, 0.5)
    finally:
        os.kill(serving(worker), signal.SIGCONT)
    link.wait(seq, 30)
    assert link.wait(link.send([ask.Fetch(1)])).item() == 1.0
    link.close()
    with pytest.raises(LinkLost):
        link.send([ask.Stats()])


def test_a_tunnel_with_nobody_behind_it_says_so() -> None:
    """It takes connections, and ends them: that is no worker that refuses a key. What comes back is found again."""
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        address = f"tcp://127.0.0.1:{tunnel.getsockname()[1]}"
        ended = threading.Event()

        def hang_up() -> None:
            tunnel.settimeout(0.1)
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    tunnel.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(WorkerLostError, match="nothing answered behind it"):
                Link(address, patience=3.0, timeout=2)
        finally:
            ended.set()
            thread.join()
