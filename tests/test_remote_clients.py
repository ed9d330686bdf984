"""Many clients of one worker that come, break off and go: each gets its own right results, and nothing stays behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter

import pytest
import torch

from marid.remote.client.link import Link
from marid.remote.client.window import LinkLost
from marid.remote.launch.local import LocalWorker
from marid.remote.wire import requests as ask
from marid.remote.wire.fields import Handle
from tests.helpers import DEVICE
from tests.relay import Relay
from tests.remote_helpers import Recorded, linked, serving, upload, worker_process

SIZE = 48


class Client(threading.Thread):
    """One session after the other, until ``until``: results are compared, and each add is done once."""

    def __init__(self, address: str, recorded: Recorded, until: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._address = address
        self._recorded = recorded
        self._until = until
        self._rng = random.Random(seed)
        self._data = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                self._session()
        except BaseException as error:
            self.error = error

    def _session(self) -> None:
        link = Link(self._address, patience=20, timeout=60)
        try:
            self._work(link)
            self.counts["sessions"] += 1
        except LinkLost:
            self.counts["lost"] += 1
        if self._rng.random() < 0.5:
            link._torn = True  # it goes without a word: only its lease tells the worker
            self.counts["abandoned"] += 1
        link.close()

    def _work(self, link: Link) -> None:
        total = torch.zeros(8)
        link.send([*self._recorded.definitions(), upload(1, total)])
        add = ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (), None, 2)
        for turn in range(self._rng.randint(1, 30)):
            x, base = torch.randn(SIZE, SIZE, generator=self._data), 1000 * (turn + 1)
            run = self._recorded.run((base,), base + 1)
            seq = link.send(
                [upload(base, x), run, add, ask.Free((2,)), ask.Fetch(base + 1 + self._recorded.outputs[0])]
            )
            total += 1
            assert torch.equal(link.wait(seq + 4, 60), _expected(x))
            if self._rng.random() < 0.5:
                link.send([ask.Free((base, *range(base + 1, base + 9)))])
            self.counts["runs"] += 1
        assert torch.equal(link.wait(link.send([ask.Fetch(1)]), 60), total), "an add was doubled, or lost"


def _expected(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu() + x


def _resident(worker: LocalWorker) -> int:
    with open(f"/proc/{serving(worker)}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _crowd(relay: Relay, recorded: Recorded, clients: int, seconds: float, seed: int) -> Counter[str]:
    """So many clients at once, whose connections break at random; what they did."""
    until = time.monotonic() + seconds
    crowd = [Client(relay.address, recorded, until, seed + index) for index in range(clients)]
    rng = random.Random(seed)
    for client in crowd:
        client.start()
    while time.monotonic() < until:
        relay.reset(rng.randrange(1, 200_000))
        time.sleep(0.05)
    for client in crowd:
        client.join(120)
        assert not client.is_alive()
        if client.error is not None:
            raise client.error
    return sum((client.counts for client in crowd), Counter())


def _is_empty(worker: LocalWorker, lease: float) -> None:
    """Once all leases have ended nothing is left of anybody."""
    deadline = time.monotonic() + 20 + 3 * lease
    with linked(worker) as link:
        while True:
            stats = link.wait(link.send([ask.Stats()]))
            if stats["sessions"] == 1 or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    assert stats["sessions"] == 1
    assert stats["tensors"] == stats["bytes"] == stats["other_bytes"] == 0


def _recorded() -> Recorded:
    x = torch.randn(SIZE, SIZE).to(DEVICE)
    return Recorded(_expected(x))


def _try(clients: int, seconds: float, lease: float) -> Counter[str]:
    recorded = _recorded()
    with worker_process("--lease", str(lease)) as worker:
        relay = Relay(("127.0.0.1", int(worker.address.rpartition(":")[2])))
        try:
            _crowd(relay, recorded, clients, min(seconds, 20) / 4, 1)  # what a first run takes anyway
            _is_empty(worker, lease)
            before = _resident(worker)
            counts = _crowd(relay, recorded, clients, seconds, 1000)
            _is_empty(worker, lease)
            counts["broken"] = relay.fired
            counts["grown KB"] = (_resident(worker) - before) >> 10
        finally:
            relay.close()
    return counts


def test_clients_that_come_and_go() -> None:
    counts = _try(6, 3.0, 2.0)
    assert counts["runs"] > 6
    assert counts["grown KB"] < 64 << 10


@pytest.mark.conformance
def test_32_clients_for_five_minutes() -> None:
    counts = _try(32, float(os.environ.get("MARID_CROWD_SECONDS", "300")), 5.0)
    print(f"\n32 clients: {dict(counts)}")
    assert counts["runs"] > 32
    assert counts["lost"] * 20 < counts["sessions"]
    assert counts["grown KB"] < 64 << 10
