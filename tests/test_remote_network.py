"""A network that breaks, falls silent or loses the worker at any byte: results are those of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.remote.launch import connect as connecting
from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.wire import endpoints as sockets
from marid.report.traffic import traffic
from tests.relay import Relay
from tests.remote_runs import decode, same, train

DEVICE = "remote_accelerator:4"
STEPS = 25
BYTES = 6000  # of a step, within which it happens


class Site:
    """A worker behind a relay; when it is killed, there is another one behind it."""

    def __init__(self) -> None:
        self._worker = self._start()
        self.relay = Relay(self._place())

    def _start(self) -> LocalWorker:
        (worker,) = start_workers(1, transport="tcp")
        return worker

    def _place(self) -> tuple[str, int]:
        host, port = self._worker.address.removeprefix("tcp://").split(":")
        return host, int(port)

    def kill(self) -> None:
        """SIGKILL."""
        self._worker.process.kill()
        self._worker.process.wait()
        self._worker.stop()
        self._worker = self._start()
        self.relay.target = self._place()

    def close(self) -> None:
        self.relay.close()
        self._worker.stop()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(sockets, "_BEATS", 100)  # a half-open connection is found after 0.3 s
    one = Site()
    marid.connect(one.relay.address, first=4)
    yield one
    connecting.disconnect(4, force=True)
    one.close()


def disturbed(site: Site, work: Callable[..., list[torch.Tensor]], points: dict[int, str], rng: random.Random) -> Any:
    """What ``work`` gives while the network fails in these steps, each time at some byte."""

    def at(step: int) -> None:
        kind, after = points.get(step), rng.randrange(1, BYTES)
        if kind == "reset":
            site.relay.reset(after)
        elif kind == "stall":
            site.relay.stall(after)
        elif kind == "kill":
            site.relay.call(after, site.kill)

    return work(DEVICE, STEPS, at)


def _try(site: Site, work: Callable[..., list[torch.Tensor]], kinds: list[str], seed: int) -> int:
    """Run with these failures at random steps, compare; how many have happened."""
    rng = random.Random(seed)
    points = dict(zip(rng.sample(range(STEPS), len(kinds)), rng.sample(kinds, len(kinds)), strict=True))
    before = site.relay.fired
    assert same(disturbed(site, work, points, rng), work("cpu", STEPS)), (seed, points)
    return site.relay.fired - before


@pytest.mark.parametrize("work", [train, decode])
def test_a_network_that_fails(site: Site, work: Callable[..., list[torch.Tensor]]) -> None:
    assert _try(site, work, ["reset", "stall", "reset", "kill"], 1) >= 2


@pytest.mark.conformance
@pytest.mark.parametrize("work", [train, decode])
def test_a_network_that_fails_at_many_points(
    site: Site, work: Callable[..., list[torch.Tensor]], record_property: Callable[[str, object], None]
) -> None:
    """Some 200 of each, 30 of them with the worker's death. Those that did not come to pass in time do not count."""
    marid.reset_stats()
    happened = seed = 0
    while happened < 200:
        happened += _try(site, work, ["reset"] * 6 + ["stall"] * 2 + ["kill"] * (seed % 3 != 2), seed)
        seed += 1
    counts = {name: getattr(traffic, name) for name in ("reconnects", "resent", "recoveries", "replays")}
    print(f"\n{work.__name__}: {happened} failures, {counts}, {traffic.recovery_seconds:.1f} s of recovery")
    record_property("failures", happened)
    assert traffic.reconnects + traffic.recoveries > 100
