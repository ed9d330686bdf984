"""Copies from worker to worker: right values, a few KB at the client, nothing without a ticket, and killed workers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

import marid
from marid.errors import MaterializationError, WorkerLostError
from marid.frontend.engines import engine_of
from marid.remote.client import transfers as exchange
from marid.remote.client.journal import take_checkpoint
from marid.remote.client.link import Link
from marid.remote.launch import connect as connecting
from marid.remote.launch.local import start_workers
from marid.remote.wire import codec as wire
from marid.remote.wire import requests as ask
from marid.remote.wire.endpoints import ClientKey, make_client
from marid.remote.wire.requests import read_requests
from marid.remote.worker.copies import Arrival, Collectors, Copies, PeerAddress
from marid.report.traffic import traffic
from tests.remote_helpers import connected, kill, within

A, B = "remote_accelerator:3", "remote_accelerator:4"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with connected(3, 4):
        yield


def remote() -> marid.RemoteStats:
    found = marid.stats().remote
    assert found is not None
    return found


def test_a_large_copy_costs_the_client_nothing() -> None:
    """80 MB, of which the client sees requests only."""
    x = torch.arange(20_000_000, device=A, dtype=torch.float32) % 1000
    marid.materialize(x)
    x.sum().item()
    marid.reset_stats()
    y = x.to(B)
    assert y.sum().item() == x.sum().item()
    seen = remote()
    assert (seen.copies, seen.copied_bytes, seen.relayed) == (1, 80_000_000, 0)
    assert seen.bytes_up < 8 << 10
    assert seen.bytes_down < 4 << 10
    assert y.device == torch.device(B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_values_and_strides_are_those_of_a_copy(dtype: torch.dtype) -> None:
    base = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    on_a = base.to(A)
    for look in (
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:],
        lambda t: t[1],
        lambda t: t[..., ::2],
        lambda t: t[:, :1].expand(2, 5, 4),
        lambda t: t[:0],
        lambda t: t[0, 0, 0],
    ):
        expected, copied = look(base).clone(), look(on_a).to(B)
        eager = torch.ops.aten._to_copy.default(look(base))
        assert copied.device == torch.device(B)
        assert torch.equal(copied.cpu(), expected)
        assert copied.stride() == eager.stride()


def test_dtypes_change_on_the_way_and_conjugates_arrive() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(x.to(A).to(B, torch.float16).cpu(), x.half())
    channels = torch.randn(2, 3, 4, 4).to(A).to(B, memory_format=torch.channels_last)
    assert channels.is_contiguous(memory_format=torch.channels_last)
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(z.to(A).conj().to(B).cpu(), z.conj().resolve_conj())


def test_a_copy_is_a_snapshot() -> None:
    """Writes before it are seen, writes behind it are not, on either side."""
    x = torch.zeros(4).to(A)
    x.add_(1)
    y = x.to(B)
    x.add_(10)
    y.mul_(3)
    z = torch.empty(4, device=B)
    z[1:3].copy_(x[1:3])
    assert x.tolist() == [11.0] * 4
    assert y.tolist() == [3.0] * 4
    assert z[1:3].tolist() == [11.0] * 2


def test_gradients_flow_across() -> None:
    w = torch.randn(3, 3)
    a, b = w.clone().requires_grad_(), w.clone().to(A).requires_grad_()
    (a * 2).sin().sum().backward()
    (b * 2).to(B).sin().sum().backward()
    assert b.grad is not None
    assert b.grad.device == torch.device(A)
    assert torch.equal(b.grad.cpu(), a.grad)


def test_an_error_is_raised_where_the_copy_needs_it_and_spoils_nothing_else() -> None:
    x = torch.arange(3.0).to(A)
    bad = x[torch.tensor([7]).to(A)]
    fine = x * 2
    with pytest.raises(MaterializationError, match="out of bounds") as caught:
        bad.to(B)
    traceback.clear_frames(caught.tb)  # the error is kept, and would keep them
    assert fine.to(B).tolist() == [0.0, 2.0, 4.0]
    other = torch.arange(3.0).to(B)
    wrong = other[torch.tensor([9]).to(B)]
    assert fine.to(B).tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(MaterializationError, match="out of bounds") as caught:
        wrong.cpu()
    traceback.clear_frames(caught.tb)
    del x, bad, fine, other, wrong


# --- two stages ------------------------------------------------------------------------------------------------------


def train(first: str, second: str, steps: int, at: Callable[[int], None] = lambda step: None) -> list[torch.Tensor]:
    """Losses and parameters of two stages, each with its optimizer, on two devices."""
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16)).to(first)
    two = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)).to(second)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2), torch.optim.SGD(two.parameters(), 0.1, momentum=0.9)]
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x, y = torch.randn(6, 8, generator=data).to(first), torch.randn(6, 3, generator=data).to(second)
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = one(x).to(second)
        loss = (two(hidden) - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        at(step)
        losses.append(loss.detach().cpu())
    return [*losses, *[p.detach().cpu() for p in (*one.parameters(), *two.parameters())]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_stages_train_as_on_one_device() -> None:
    """Activations go one way and gradients the other."""
    marid.reset_stats()
    found = train(A, B, 5)
    assert remote().copies == 10
    assert same(found, train("cpu", "cpu", 5))


def test_two_stages_survive_both_workers() -> None:
    """Copies are made again by the successor of the one, and collected again by that of the other."""
    recoveries = traffic.recoveries
    found = train(A, B, 6, lambda step: kill(3, 4) if step == 3 else None)
    assert traffic.recoveries == recoveries + 2
    assert same(found, train("cpu", "cpu", 6))


def test_two_stages_survive_both_workers_with_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each successor is to do again is more than it may be sent at once, and waits for what the other one has not
    been sent yet."""
    welcomed = Link._welcomed

    def with_little_room(self: Link, header: dict[str, Any]) -> None:
        welcomed(self, {**header, "limits": {**header["limits"], "messages": 3}})

    monkeypatch.setattr(Link, "_welcomed", with_little_room)
    started = time.monotonic()
    with within(100):
        found = train(A, B, 6, lambda step: kill(3, 4) if step == 3 else None)
    assert time.monotonic() - started < 25  # no worker was given up as out of reach, which takes 30 seconds
    assert same(found, train("cpu", "cpu", 6))


@pytest.mark.conformance
def test_copies_survive_a_checkpoint_of_either_side() -> None:
    def at(step: int) -> None:
        if step == 2:
            for index in (3, 4):
                engine: Any = engine_of(index)
                take_checkpoint(engine.delivery)
        if step == 4:
            kill(3, 4)

    assert same(train(A, B, 6, at), train("cpu", "cpu", 6))


@pytest.mark.conformance
def test_two_stages_killed_at_every_step() -> None:
    expected = train("cpu", "cpu", 8)
    for step in range(8):
        for killed in ((3,), (4,), (3, 4)):
            assert same(train(A, B, 8, lambda now, at=step, who=killed: kill(*who) if now == at else None), expected)


def test_kept_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers keep for copies that may be needed again makes for a checkpoint, and is freed by it."""
    from marid.remote.client import journal as checkpoint

    monkeypatch.setattr(checkpoint, "_EVERY", 0.0)
    monkeypatch.setattr(marid.settings, "copies_bytes", 1 << 20)
    total, before = torch.zeros(100_000).to(B), traffic.checkpoints
    for number in range(12):
        total.add_((torch.ones(100_000, device=A) * number).to(B))
        assert total[0].item() == sum(range(number + 1))
    assert traffic.checkpoints > before
    marid.settings.copies_bytes = 1 << 30
    torch.zeros(1, device=A).item()
    held = remote().workers[3]["bytes"]
    assert held < 3 << 20


@pytest.fixture
def small() -> Iterator[tuple[str, str]]:
    """Two workers of 24 MB."""
    workers = start_workers(2, options=("--memory-limit", "24m"))
    marid.connect(*[worker.address for worker in workers], first=5)
    try:
        yield "remote_accelerator:5", "remote_accelerator:6"
    finally:
        connecting.disconnect(5, 6, force=True)
        for worker in workers:
            worker.stop()


def test_copies_do_not_fill_a_memory_limit(small: tuple[str, str]) -> None:
    """Of a loop of copies nothing is left on a worker but what lives, however quick it is."""
    first, second = small
    for number in range(40):  # of which none is needed
        copied = torch.full((250_000,), float(number), device=first).to(second) * 2
        assert copied[0].item() == 2 * number
    x = torch.zeros(250_000, device=first)
    for number in range(30):  # of which each needs the one before
        x = ((x + 1).to(second) * 1.0).to(first)
        if number % 5 == 4:
            assert x[0].item() == number + 1
    del x, copied
    assert torch.zeros(3_000_000, device=first).sum().item() == 0.0


def test_reductions_do_not_fill_a_memory_limit(small: tuple[str, str]) -> None:
    group = marid.process_group(small)
    for number in range(30):
        mine, its = torch.full((250_000,), float(number), device=small[0]), torch.ones(250_000, device=small[1])
        results = marid.all_reduce([mine, its], "sum", group=group)
        assert [result[0].item() for result in results] == [number + 1.0] * 2


def test_what_is_done_again_fits_where_it_did(small: tuple[str, str]) -> None:
    """Of a chain of steps only one result lives at a time, also on a replacement."""
    x = torch.zeros(250_000, device=small[0])
    for number in range(40):
        x = x + 1
        assert x[0].item() == number + 1
    os.kill(engine_of(5).link.welcome["pid"], signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    assert x.sum().item() == 40 * 250_000


# --- who may collect -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two workers with keys of their own, and the same client's keys for each."""
    workers: list[Any] = []
    files = []
    tmp_path = tmp_path_factory.mktemp("keys")
    try:
        for name in ("one", "two"):
            files.append(make_client(tmp_path / name, "me"))
            workers += start_workers(1, transport="tcp", options=("--keys", str(tmp_path / name)))
        for index, (worker, file) in enumerate(zip(workers, files, strict=True)):
            marid.connect(worker.address, key=file, first=1 + index)
        yield [*workers, *files]
    finally:
        connecting.disconnect(*[index for index in (1, 2) if index in connecting._connected], force=True)
        for worker in workers:
            worker.stop()


def test_workers_with_keys_prove_them_to_each_other(keyed: list[Any]) -> None:
    x = torch.randn(100_000)
    marid.reset_stats()
    assert torch.equal((x.to("remote_accelerator:1") * 1).to("remote_accelerator:2").cpu(), x)
    assert (remote().copies, remote().relayed) == (1, 0)
    assert remote().workers[1]["offered_bytes"] >= 400_000


class Thief:
    """Somebody who speaks the protocol to a worker, with a key or without one."""

    def __init__(self, address: str, key: ClientKey | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            key.put_on(self.socket)
        self.socket.connect(address)

    def ask(self, milliseconds: int = 2000, **fields: Any) -> tuple[dict[str, Any], list[bytes]] | None:
        self.socket.send(wire.encode({"v": wire.VERSION, "session": bytes(16), **fields}))
        if not self.socket.poll(milliseconds):
            return None
        header, *segments = self.socket.recv_multipart()
        return wire.decode(header), segments

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def offered(index: int, peer: bytes) -> tuple[bytes, bytes]:
    """A ticket for 4,000 bytes on a worker, for whoever proves that key; and the worker's boot."""
    engine: Any = engine_of(index)
    tensor = torch.arange(1000, dtype=torch.int32).to(f"remote_accelerator:{index}")
    marid.materialize(tensor)
    packed = exchange.pack(engine, tensor._value.concrete)  # pyright: ignore[reportAttributeAccessIssue]
    ticket = os.urandom(32)
    engine.link.notify({"kind": "offer", "ticket": ticket, "handle": packed.handle, "peer": peer})
    engine.kept = packed
    engine.worker_stats()
    return ticket, engine.link.boot


def test_a_ticket_is_bound_to_a_key_and_used_once(keyed: list[Any]) -> None:
    """Its owner gets what it is for, once; another one with a key that the worker admits gets nothing."""
    from zmq.utils import z85

    key = ClientKey.read(keyed[2])
    public, secret = zmq.curve_keypair()
    ticket, boot = offered(1, z85.decode(public))
    owner = Thief(keyed[0].address, ClientKey(public, secret, key.worker))
    other = Thief(keyed[0].address, key)
    try:
        about = {"boot": boot, "ticket": ticket}
        stolen = other.ask(kind="collect", start=0, **about)
        assert stolen is not None
        assert stolen[0]["kind"] == "later"
        assert stolen[1] == []
        assert other.ask(200, kind="collected", **about) is not None  # and it cannot use it up
        given = owner.ask(kind="collect", start=0, **about)
        assert given is not None
        assert given[1] == [bytes(torch.arange(1000, dtype=torch.int32).view(torch.uint8).tolist())]
        assert owner.ask(200, kind="collected", **about) is None
        again = owner.ask(kind="collect", start=0, **about)
        assert again is not None
        assert again[0]["kind"] == "later"
        hello = owner.ask(kind="hello", boot=None)
        assert hello is not None
        assert hello[0]["kind"] == "refused"
    finally:
        owner.close()
        other.close()


def test_nobody_else_is_let_in(keyed: list[Any]) -> None:
    key = ClientKey.read(keyed[2])
    public, secret = zmq.curve_keypair()
    ticket, boot = offered(1, bytes(32))
    stranger = Thief(keyed[0].address, ClientKey(public, secret, key.worker))
    try:
        assert stranger.ask(500, kind="collect", boot=boot, ticket=ticket, start=0) is None
    finally:
        stranger.close()


def test_malformed_requests_of_other_workers_are_refused() -> None:
    connection: Any = connecting.connection_of(3)
    ticket, boot = offered(3, bytes(32))
    thief = Thief(connection.worker.address)
    try:
        for fields in (
            {"ticket": b"short", "start": 0},
            {"start": 0},
            {"ticket": ticket, "start": -1},
            {"ticket": ticket, "start": 4001},
            {"ticket": ticket, "start": "0"},
            {"ticket": [ticket] * 3, "start": 0},
        ):
            answer = thief.ask(kind="collect", boot=boot, **fields)
            assert answer is not None
            assert answer[0]["kind"] == "refused", fields
        unknown = thief.ask(kind="collect", boot=boot, ticket=os.urandom(32), start=0)
        assert unknown is not None
        assert unknown[0]["kind"] == "later"
        assert thief.ask(200, kind="collect", boot=bytes(8), ticket=ticket, start=0) is None
    finally:
        thief.close()
    assert (torch.ones(2, device=A) + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "data",
    [
        ["pack", 1],
        ["pack", -1, 2],
        ["pack", 1, "2"],
        ["take", 1, b"short", "float32", [1], [1]],
        ["take", 1, bytes(32), "float33", [1], [1]],
        ["take", 1, bytes(32), "float32", [1], []],
        ["take", 1, bytes(32), "float32", [1 << 50], [1]],
    ],
)
def test_malformed_requests_are_refused(data: list[Any]) -> None:
    with pytest.raises(marid.errors.WireError):
        read_requests([data], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "tcp://nowhere"},
        {"address": "inproc://x"},
        {"address": "ipc://relative"},
        {"address": "tcp://a b:1"},
        {"address": 5},
        {"address": "tcp://h:1", "of": b"short"},
        {"address": "tcp://h:1", "key": b"short"},
    ],
)
def test_places_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(marid.errors.WireError):
        PeerAddress.read({"of": bytes(8), **fields})


def test_pieces_are_checked() -> None:
    """Of the right size, each once; a tensor of another size is an error."""
    arrival = Arrival(bytes(32), 10)
    with pytest.raises(marid.errors.WireError):
        arrival.take({"nbytes": 10, "start": 0}, [b"short"])
    arrival.take({"nbytes": 10, "start": 3}, [b"x" * 7])
    assert not arrival.has_ended
    arrival.take({"nbytes": 10, "start": 0}, [b"0123456789"])
    assert arrival.is_complete
    assert arrival.data.numpy().tobytes() == b"0123456789"
    wrong = Arrival(bytes(32), 10)
    wrong.take({"nbytes": 11, "start": 0}, [b"0123456789x"])
    assert wrong.error is not None


# --- workers that do not reach each other ----------------------------------------------------------------------------


def test_the_client_relays_where_workers_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy finds out, the next ones know."""
    from marid.remote.client import transfers

    monkeypatch.setattr(transfers, "_FIRST", 1)
    source: Any = engine_of(3)
    target: Any = engine_of(4)
    target.reached.clear()
    monkeypatch.setattr(type(source.link), "peer_address", property(lambda link: {**_nowhere, "of": link.boot}))
    marid.reset_stats()
    x = torch.randn(1000)
    for number in range(3):
        assert torch.equal((x.to(A) * number).to(B).cpu(), x * number)
    seen = remote()
    target.reached.clear()
    assert (seen.copies, seen.relayed) == (0, 3)


_nowhere = {"address": "tcp://127.0.0.1:9", "key": None}


def test_a_client_that_goes_while_its_worker_waits_leaves_nothing() -> None:
    """A request that waits for another worker keeps neither other clients waiting nor its memory."""
    from marid.remote.client.link import Link

    connection: Any = connecting.connection_of(4)
    link = Link(connection.worker.address)
    link.send([ask.Take(1, os.urandom(32), torch.uint8, (1 << 20,), (1,))])
    engine: Any = engine_of(4)
    engine.worker_stats()
    assert (torch.ones(2, device=B) + 1).tolist() == [2.0, 2.0]
    until = time.monotonic() + 40
    while engine.worker_stats()["other_bytes"] != 1 << 20:  # until it has come
        assert time.monotonic() < until
        time.sleep(0.01)
    link.close()
    while engine.worker_stats()["other_bytes"]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_source_that_was_disconnected_is_missed_only_when_its_copies_are_needed_again() -> None:
    """The copy lives on; once its worker is lost too, it is lost, and says so at once."""
    marid.connect(workers=1, first=5)
    copied = (torch.arange(3.0).to("remote_accelerator:5") * 2).to(B)
    assert copied.tolist() == [0.0, 2.0, 4.0]
    connecting.disconnect(5)
    assert copied.sum().item() == 6.0
    kill(4)
    with pytest.raises(WorkerLostError, match=r"float32 tensor of shape \[3\].*is disconnected"):
        copied.cpu()
    assert (torch.ones(2, device=B) + 1).tolist() == [2.0, 2.0]


# --- what clients may do to a worker that collects -------------------------------------------------------------------


@contextlib.contextmanager
def collecting() -> Iterator[Copies]:
    collectors = Collectors(lambda: None)
    yield Copies(collectors)
    collectors.close()


def told(copies: Copies, ticket: bytes, address: str) -> None:
    copies.locate({"ticket": ticket, "address": address, "key": None, "of": bytes(8), "patience": 60})


def test_an_address_that_cannot_be_connected_to_ends_what_was_to_come_from_there() -> None:
    with collecting() as copies:
        told(copies, bytes(32), "ipc:///" + "x" * 190)
        arrival = copies.expect(bytes(32), 100)
        until = time.monotonic() + 20
        while not arrival.has_ended and time.monotonic() < until:
            time.sleep(0.01)
        assert "cannot be connected to" in str(arrival.error)
        copies.clear()


def test_a_worker_collects_from_a_bounded_number_of_others() -> None:
    before = threading.active_count()
    with collecting() as copies:
        arrival = copies.expect(bytes(32), 100)
        for port in range(1000, 1300):
            told(copies, bytes(32), f"tcp://127.0.0.1:{port}")
        assert "as many others" in str(arrival.error)
        assert threading.active_count() - before < 100
        copies.clear()


def test_what_is_missing_may_be_asked_for_again_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marid.remote.worker.copies._PIECE", 1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            arrival = Arrival(bytes(32), 3000)
            taking = threading.Thread(target=_take_all, args=(arrival,))
            taking.start()
            while taking.is_alive():
                arrival.restart()
                arrival.due(time.monotonic())
                arrival.later(time.monotonic())
            assert arrival.is_complete
    finally:
        sys.setswitchinterval(interval)


def _take_all(arrival: Arrival) -> None:
    for start in range(3000):
        arrival.take({"nbytes": 3000, "start": start}, [b"x"])
