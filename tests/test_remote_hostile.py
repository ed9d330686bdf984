"""What a worker is sent by somebody who means it no good: refused and counted, and the worker goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from marid.errors import WireError
from marid.frontend import handles
from marid.remote.client.link import Link
from marid.remote.launch.local import LocalWorker
from marid.remote.wire import codec as wire
from marid.remote.wire import requests as ask
from marid.remote.wire.fields import Handle
from marid.remote.wire.kernel_settings import KernelSettings
from marid.remote.wire.program_records import changes_between, digest_of, geometry_of
from marid.remote.worker import collectives as groups_of
from marid.remote.worker import executor as machines
from marid.remote.worker.chunk_store import ChunkStore
from marid.remote.worker.collectives import Groups, Job
from marid.remote.worker.connections import ServerSocket
from marid.remote.worker.copies import Collectors, Copies, Tickets
from marid.remote.worker.executor import Executor
from marid.remote.worker.server import Limits, Worker
from marid.remote.worker.session import Message, Session
from marid.remote.worker.workspace import Workspace
from tests.helpers import DEVICE
from tests.remote_helpers import Recorded, linked, serving, upload, worker_process

Frames = list[bytes]


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    with worker_process("--memory-limit", "256m") as one:
        yield one


class Attacker:
    """Somebody with a socket of their own."""

    def __init__(self, worker: LocalWorker) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(worker.address)
        self.session = os.urandom(16)
        self.epoch, self.seq = 0, 1
        self.send([wire.encode({"v": wire.VERSION, "kind": "hello", "session": self.session, "boot": None})])
        self.boot = self.answer()["boot"]

    def send(self, frames: Frames) -> None:
        self.socket.send_multipart(frames)

    def answer(self, milliseconds: int = 10_000) -> dict[str, Any]:
        assert self.socket.poll(milliseconds), "no answer"
        return wire.decode(self.socket.recv_multipart()[0])

    def drain(self) -> None:
        """Take what has come, and go on where the worker expects it."""
        while self.socket.poll(0):
            answer = wire.decode(self.socket.recv_multipart()[0])
            if answer["kind"] == "reply":
                failed = answer.get("error")
                self.epoch = answer["epoch"] + (failed is not None)
                self.seq = (answer["applied"] if failed is None else failed["seq"]) + 1

    def work(self, requests: list[Any], segments: list[Any] | None = None, **fields: Any) -> Frames:
        header = {"v": wire.VERSION, "kind": "work", "session": self.session, "boot": self.boot}
        header |= {"epoch": self.epoch, "seq": self.seq, "acked": self.seq - 1, "requests": requests, **fields}
        return [wire.encode(header), *[bytes(segment) for segment in segments or []]]

    def cancel(self) -> None:
        header = {"v": wire.VERSION, "kind": "cancel", "session": self.session, "boot": self.boot}
        self.send([wire.encode({**header, "epoch": self.epoch, "through": 1 << 50})])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def attacker(worker: LocalWorker) -> Iterator[Attacker]:
    one = Attacker(worker)
    yield one
    one.close()


def _resident(worker: LocalWorker) -> int:
    """Bytes of memory of the worker's process."""
    with open(f"/proc/{serving(worker)}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _is_well(worker: LocalWorker) -> dict[str, Any]:
    """The worker does what it should for somebody else; what it has counted."""
    with linked(worker) as link:
        link.send([upload(1, torch.arange(3.0))])
        assert link.wait(link.send([ask.Fetch(1)])).tolist() == [0.0, 1.0, 2.0]
        return link.wait(link.send([ask.Stats()]))


def _valid() -> list[tuple[list[Any], list[Any]]]:
    """Requests, with their segments, as a client would send them."""
    x = torch.arange(12.0).view(3, 4).to(DEVICE)
    y = torch.cat([x, x * 2.5]).sum(dim=0).clamp(min=1)
    recorded = Recorded(y)
    sent: list[list[ask.Request]] = [
        [*recorded.definitions(), *recorded.uploads(1), recorded.run((1,), 100), ask.Fetch(100 + recorded.outputs[0])],
        [*recorded.definitions(), *recorded.uploads(4), *_repeated(recorded, 4, 300)],
        [ask.Call("aten.topk.default", (Handle(1), 2), (), None, 200), ask.Free((1, 2, 3, 4))],
        [
            ask.Chunk(b"\0" * 32, b"abc"),
            ask.Have((b"\0" * 32,)),
            ask.Stats(),
            ask.Load("/nothing", 9, 1, (b"\0" * 32,)),
        ],
        [upload(1, torch.arange(100)), ask.Pack(2, 1), *_together(3)],
        [ask.Take(1, bytes(32), torch.float32, (2, 3), (3, 1))],  # which waits for a piece that nobody has
        [ask.Meet(bytes(16), 5), ask.Join(bytes(16), 0, 1, "127.0.0.1", 9, "127.0.0.1", 1)],
    ]
    return [ask.write_requests(requests) for requests in sent]


def _messages(attacker: Attacker, valid: list[tuple[list[Any], list[Any]]]) -> list[Frames]:
    """They and the other kinds of messages, as the worker would take them next."""
    base = {"v": wire.VERSION, "session": attacker.session, "boot": attacker.boot}
    others = [{"kind": "ping"}, {"kind": "cancel", "epoch": 0, "through": 0}, {"kind": "hello"}, *_between_workers()]
    return [
        *[attacker.work(data, segments) for data, segments in valid],
        *[[wire.encode({**base, **fields})] for fields in others],
    ]


def _between_workers() -> list[dict[str, Any]]:
    """What is said of copies, to the worker that has a tensor and to the one that is to have it."""
    known = {"ticket": bytes(32), "session": bytes(16)}
    return [
        {"kind": "offer", "ticket": bytes(32), "handle": 2, "peer": bytes(32)},
        {**known, "kind": "collect", "start": 0},
        {**known, "kind": "collected"},
        {"kind": "source", "ticket": bytes(32), "address": None},
        {
            "kind": "source",
            "ticket": bytes(32),
            "address": "tcp://127.0.0.1:9",
            "key": bytes(32),
            "of": bytes(8),
            "patience": 1,
        },
    ]


def _together(handle: int) -> list[ask.Request]:
    """Copies and reductions that need nobody else."""
    group = b"together".ljust(16)
    return [
        ask.Take(handle, bytes(32), torch.float32, (0, 3), (3, 1)),
        ask.Meet(group, 5),
        ask.Join(group, 0, 1, "127.0.0.1", 9, "127.0.0.1", 5),
        ask.Reduce(group, "mean", handle + 1, handle),
        ask.Leave(group),
    ]


def _repeated(recorded: Recorded, handle: int, base: int) -> list[ask.Request]:
    """A run, and what is said of a second one: what is other, other sizes, up to where, and under other switches."""
    other = tuple(
        [spec and handles.spec((*spec.shape, 2), (*spec.stride, 1), 0, spec.dtype, 0) for spec in recorded.specs]
    )
    changes = changes_between(recorded.specs, other)
    assert changes is not None
    run = recorded.run((handle,), base)
    return [
        run,
        ask.Again(run.program, run.geometry, ((0, handle),), ((0, recorded.params[0]),), base + 50),
        ask.Run(run.program, run.geometry, run.inputs, run.params, base + 100, 1, (1,)),
        ask.Sizes(run.program, run.geometry, digest_of(geometry_of(other)), changes),
        ask.Roles(((handle, "weight"), (base + 7, "kv cache"))),
        ask.Configure(KernelSettings(torch.float64, 1, False, "high", False, "bf16", "tf32")),
        ask.Configure(KernelSettings()),
        ask.Free(tuple(range(base, base + 150))),
    ]


def _damaged(frames: Frames, choose: random.Random) -> Frames:
    """The message with something wrong."""
    damaged = [bytearray(frame) for frame in frames]
    kind = choose.randrange(7)
    victim = choose.choice(damaged)
    if kind == 0 and victim:
        for _ in range(choose.randint(1, 4)):
            victim[choose.randrange(len(victim))] ^= 1 << choose.randrange(8)
    elif kind == 1:
        del victim[choose.randint(0, len(victim)) :]
    elif kind == 2:
        at = choose.randint(0, len(victim))
        victim[at:at] = choose.randbytes(choose.randint(1, 40))
    elif kind == 3:
        victim[:] = choose.randbytes(choose.randint(0, 300))
    elif kind == 4:
        damaged.insert(choose.randint(0, len(damaged)), bytearray(choose.randbytes(choose.randint(0, 50))))
    elif kind == 5 and len(damaged) > 1:
        damaged.pop(choose.randrange(len(damaged)))
    elif victim:
        victim[choose.randrange(len(victim))] = choose.choice([0xC1, 0xDD, 0xDF, 0xC6, 0xC9, 0xD9, 0x90, 0x80, 0xFF])
    return [bytes(frame) for frame in damaged]


def _attack(worker: LocalWorker, count: int, seed: int) -> None:
    choose = random.Random(seed)
    attacker = Attacker(worker)
    valid = _valid()
    try:
        before = _is_well(worker)
        for number in range(count):
            if number % 4 == 0:
                attacker.drain()
            if number % 40 == 0:  # so that it goes on where it waits for others
                attacker.cancel()
            attacker.send(_damaged(choose.choice(_messages(attacker, valid)), choose))
            if number % 500 == 499:
                attacker.send([wire.encode({"v": wire.VERSION, "kind": "hello", "session": attacker.session})])
                attacker.answer()
        until, refused = time.monotonic() + 30, 0
        while refused <= count // 20:  # the rest does no harm, or is dropped by sockets that are full
            assert time.monotonic() < until, refused
            refused = sum(_is_well(worker)["refused"].values()) - sum(before["refused"].values())
    finally:
        attacker.close()


def test_damaged_messages_do_no_harm(worker: LocalWorker) -> None:
    _attack(worker, 1000, 1)  # what a first run takes anyway
    before = _resident(worker)
    _attack(worker, 3000, 2)
    assert _resident(worker) - before < 64 << 20


@pytest.mark.conformance
def test_a_hundred_thousand_damaged_messages_do_no_harm() -> None:
    with worker_process("--memory-limit", "256m") as worker:
        _attack(worker, 2000, 3)
        before = _resident(worker)
        for seed in range(10, 20):
            _attack(worker, 10_000, seed)
        assert _resident(worker) - before < 64 << 20


def _fuzz_session(count: int, seed: int) -> None:
    """Valid headers around damaged requests, applied in this process: every answer is an answer."""
    choose = random.Random(seed)
    machine = Executor(torch.device("cpu"), 64 << 20, 64 << 20)
    x = torch.arange(12.0).view(3, 4).to(DEVICE)
    a, b = torch.split(torch.cat([x, x * 2.5]).relu(), 3)
    y = (a @ b.t()).to(torch.float64) + torch.rand(3, 3, device=DEVICE)
    recorded = Recorded(a, y)
    good = [
        *recorded.definitions(),
        *recorded.uploads(1),
        recorded.run((1,), 100),
        ask.Fetch(1, (0, (2,), (3,))),
        ask.Call("aten.add.Tensor", (Handle(1), 2.0), (("alpha", 1),), None, 300),
        *_repeated(recorded, 1, 400),
        ask.Pack(600, 1),
        *_together(610),
        ask.Free((*range(100, 109), 300, *range(600, 620))),
    ]
    data, segments = ask.write_requests(good)
    collectors = Collectors(lambda: None)
    groups = Groups(machine.device, lambda: None)
    workspace = Workspace(b"", machine, ChunkStore(1 << 20), Copies(collectors), groups, 1 << 20)
    session = Session(b"\0" * 16, workspace)
    assert session.answer(Message(0, 1, 0, wire.unpack_plain(wire.pack_plain(data), 1 << 14), segments, 100)).fields[
        "applied"
    ] == len(good), "not one of these fails as long as nothing is damaged"
    failed = 0
    for number in range(count):
        if number % 200 == 0:
            workspace.tensors.clear()
        damaged = [_mutated(one, choose) if choose.random() < 0.3 else one for one in data]
        pieces = [_damaged([bytes(one)], choose)[0] if choose.random() < 0.1 else one for one in segments]
        packed = wire.unpack_plain(wire.pack_plain(damaged), 1 << 14)
        epoch = session.epoch + (session.failure is not None)
        seq = session.applied + 1 if session.failure is None else session.failure["seq"] + 1
        message = Message(epoch, seq, seq - 1, packed, pieces, 100)
        answer = session.answer(message)
        if answer is None:
            assert session.waiting is not None
            session.cancel(session.epoch, session.applied + 1)
            assert session.may_go_on
            answer = session.answer(message)
            assert answer is not None
        wire.encode({"v": wire.VERSION, **answer.fields})
        failed += session.failure is not None
        assert len(workspace.tensors) < 10_000
    assert failed > count // 4
    session.clear()
    collectors.close()


class _Alone:
    """A group with one member and without a thread, and where it meets."""

    port = 9

    def __init__(self, *_: Any) -> None:
        self.is_closed = False

    def join(self, *_: Any) -> Job:
        return self._done()

    def reduce(self, *_: Any) -> Job:
        assert not self.is_closed
        return self._done()

    def close(self) -> None:
        self.is_closed = True

    def _done(self) -> Job:
        job = Job(lambda: None)
        job.run()
        return job


@pytest.fixture(autouse=True)
def _no_groups_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_of, "Group", _Alone)
    monkeypatch.setattr(groups_of, "Store", _Alone)


def _fuzz_copies(count: int, seed: int) -> None:
    """Damaged messages about copies, understood in this process: they are right, or a ``WireError``."""
    choose = random.Random(seed)
    collectors = Collectors(lambda: None)
    copies, tickets = Copies(collectors), Tickets(lambda _ticket, _key: None)
    machine = Executor(torch.device("cpu"))
    groups = Groups(machine.device, lambda: None)
    workspace = Workspace(b"", machine, ChunkStore(1 << 20), copies, groups, 1 << 20)
    workspace.tensors[2] = torch.arange(100, dtype=torch.uint8)
    copies.expect(bytes(32), 6)
    refused = 0
    for number in range(count):
        header = choose.choice(_between_workers())
        name = choose.choice(list(header))
        if number % 4:
            header[name] = _mutated(header[name], choose)
        plain = wire.unpack_plain(wire.pack_plain(header), 1 << 14)
        try:
            if plain["kind"] == "offer":
                tickets.offer(workspace, plain)
            elif plain["kind"] == "source":
                copies.locate(plain)
            else:
                answer = tickets.answer(plain, choose.choice([None, bytes(32).hex(), "other"]))
                wire.encode({"v": wire.VERSION, **answer[0]} if answer else {})
        except WireError:
            refused += 1
    assert refused > count // 4
    workspace.clear()
    collectors.close()


def test_damaged_messages_about_copies_do_no_harm() -> None:
    _fuzz_copies(5000, 1)


def _mutated(value: Any, choose: random.Random) -> Any:
    """Plain data with something else somewhere in it."""
    if isinstance(value, list) and value and choose.random() < 0.85:
        at = choose.randrange(len(value))
        return [*value[:at], _mutated(value[at], choose), *value[at + 1 :]]
    if isinstance(value, int) and choose.random() < 0.5:
        return value + choose.choice([-1, 1, 7, -1000, 1 << 31, 1 << 62])
    if isinstance(value, str) and value and choose.random() < 0.5:
        return choose.choice(["aten.cat.default", "aten.mm.default", "aten.as_strided.default", "int64", "p", "g", "x"])
    odd = [
        None,
        True,
        -1,
        0,
        1 << 63,
        0.5,
        float("nan"),
        "",
        b"",
        b"\0" * 32,
        [],
        [[]],
        {},
        {"h": 1},
        {"c": [1.0, 2.0]},
    ]
    return choose.choice(odd)


def test_damaged_requests_do_no_harm() -> None:
    _fuzz_session(3000, 1)


@pytest.mark.conformance
def test_a_hundred_thousand_damaged_requests_do_no_harm() -> None:
    for seed in range(10):
        _fuzz_session(10_000, seed)


@pytest.mark.conformance
def test_a_hundred_thousand_damaged_messages_about_copies_do_no_harm() -> None:
    _fuzz_copies(100_000, 2)


# --- messages that are well made -------------------------------------------------------------------------------------


def test_another_version_is_refused(worker: LocalWorker, attacker: Attacker) -> None:
    attacker.send([wire.pack_plain({"v": wire.VERSION + 1, "kind": "hello", "session": b"\0" * 16, "boot": None})])
    answer = attacker.answer()
    assert answer["kind"] == "refused"
    assert f"version {wire.VERSION + 1}" in answer["text"]
    assert _is_well(worker)["refused"]["malformed"] >= 1


def test_a_message_that_comes_again_is_not_done_again(attacker: Attacker) -> None:
    x = torch.zeros(2)
    attacker.send(attacker.work(*ask.write_requests([upload(1, x)])))
    attacker.answer()
    add = ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (), None, 10)
    message = attacker.work(*ask.write_requests([add, ask.Fetch(1)]), seq=2)
    for _ in range(5):
        attacker.send(message)
        answer = attacker.answer()
        assert answer["applied"] == 3
        assert [seq for seq, _ in answer["results"]] == [2, 3]
    total = ask.Call("aten.sum.default", (Handle(1),), (), None, 20)
    number = ask.Call("aten._local_scalar_dense.default", (Handle(20),), (), None, 30)
    attacker.send(attacker.work(*ask.write_requests([total]), seq=4))
    attacker.answer()
    attacker.send(attacker.work(*ask.write_requests([number]), seq=5))
    assert attacker.answer()["results"][0][1]["returned"] == 2.0


def test_requests_that_are_too_early_are_refused(attacker: Attacker) -> None:
    attacker.send(attacker.work(*ask.write_requests([upload(1, torch.ones(1))]), seq=7))
    answer = attacker.answer()
    assert answer["expected"] == 1
    assert answer["applied"] == 0


def test_switches_that_no_process_can_have(attacker: Attacker, worker: LocalWorker) -> None:
    """They fail, and what comes next is done under those before."""
    for name in ("float32", -1, 4, True):
        attacker.send(attacker.work([["configure", [name]]]))
        assert attacker.answer()["error"]["type"] == "WireError"
        attacker.epoch += 1
        attacker.seq += 1
        attacker.send(
            attacker.work(*ask.write_requests([ask.Call("aten.ones.default", ([2],), (), None, attacker.seq)]))
        )
        assert attacker.answer()["results"][0][1]["returned"]["t"][1][0] == "float32"
        attacker.seq += 1
    _is_well(worker)


def test_another_epoch_is_refused(attacker: Attacker) -> None:
    attacker.send(attacker.work(*ask.write_requests([upload(1, torch.ones(1))]), epoch=5))
    assert attacker.answer()["applied"] == 0


def test_a_session_that_is_not_there(attacker: Attacker) -> None:
    for fields in ({"session": b"\1" * 16}, {"boot": b"\0" * 8}):
        attacker.send(attacker.work(*ask.write_requests([upload(1, torch.ones(1))]), **fields))
        assert attacker.answer()["kind"] == "gone"


def test_too_much_in_flight_is_refused() -> None:
    """A client that does not wait: what it sends beyond the limit is dropped and counted."""
    with worker_process() as worker:
        attacker = Attacker(worker)
        x = torch.zeros(2000, 2000)
        attacker.send(attacker.work(*ask.write_requests([upload(1, x[:1000])])))
        attacker.answer()
        product = ask.Call("aten.mm.default", (Handle(1), Handle(1)), (), None, 10)
        attacker.send(attacker.work(*ask.write_requests([upload(2, x), product]), seq=2))
        for number in range(3000):
            attacker.send(attacker.work(*ask.write_requests([ask.Stats()]), seq=4 + number))
        kinds = set()
        with contextlib.suppress(AssertionError):
            while True:
                kinds.add(attacker.answer(2000)["kind"])
        attacker.close()
        assert kinds <= {"reply", "refused"}
        assert _resident(worker) < 2 << 30
        _is_well(worker)


def test_headers_count_as_in_flight() -> None:
    """Requests without segments wait in a worker that does nothing: as many as fit, headers and all."""
    worker = Worker(ServerSocket("tcp://127.0.0.1:*", None), torch.device("cpu"), Limits(in_flight=1 << 20))
    context = zmq.Context()
    try:
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.connect(worker.address)
        session = {"v": wire.VERSION, "session": b"s" * 16}
        one.send(wire.encode({**session, "kind": "hello", "boot": None}))
        worker._take(5000)
        fields = {**session, "kind": "work", "boot": worker.boot, "epoch": 0, "acked": 0}
        requests = ask.write_requests([ask.Load("x" * 200_000, 0, 1, ())])[0]
        for number in range(20):
            one.send(wire.encode({**fields, "seq": 1 + number, "requests": requests}))
        until = time.monotonic() + 10
        while worker.refusals.counts.get("in flight", 0) < 15 and time.monotonic() < until:
            worker._take(100)
        (waiting,) = worker._sessions.values()
        assert len(waiting.inbox) == 5
        assert worker.refusals.counts == {"in flight": 15}
        one.close()
    finally:
        context.term()
        worker._collectors.close()
        worker._socket.close()


def test_a_client_counts_its_headers_too(worker: LocalWorker) -> None:
    """What it has in flight is what went over the socket, and nothing when all is answered."""
    with linked(worker) as link:
        with link._window.changed:  # no answer is taken meanwhile
            before = link.counts.bytes_up
            link.send([ask.Stats()] * 500)
            assert link._window._in_flight == link.counts.bytes_up - before > 500
        link.wait(link.send([ask.Stats()]))
        assert link._window._in_flight == 0


def test_many_sessions_are_refused() -> None:
    with worker_process() as worker:
        context = zmq.Context()
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.connect(worker.address)
        kinds = []
        for _ in range(300):
            one.send(wire.encode({"v": wire.VERSION, "kind": "hello", "session": os.urandom(16), "boot": None}))
            assert one.poll(10_000)
            kinds.append(wire.decode(one.recv())["kind"])
        assert kinds == ["welcome"] * 256 + ["refused"] * 44
        one.close()
        context.term()


def test_large_results_that_nobody_takes_are_refused(worker: LocalWorker) -> None:
    """Numbers that claim huge tensors, in programs and calls."""
    with linked(worker) as link:
        for request in (
            ask.Call("aten.zeros.default", ([1 << 45],), (), None, 10),
            ask.Call("aten.empty.memory_format", ([1 << 62, 1 << 62],), (), None, 10),
            ask.Call("aten.full.default", ([-5], 1.0), (), None, 10),
            ask.Call("aten.arange.default", (1e15,), (), None, 10),
        ):
            with pytest.raises(Exception, match=r".+"):
                link.wait(link.send([request]))
            link.resume()
    _is_well(worker)


def test_what_is_small_counts_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a byte, instructions of a few, and geometries, of which a digest names many slots at once."""
    store = ChunkStore(1 << 20)
    for number in range(3000):
        data = number.to_bytes(4, "big")
        store.put(b"", digest_of(data), data)
    assert len(store) < 1100
    monkeypatch.setattr(machines, "_PROGRAM_BYTES", 10 << 20)
    machine = Executor(torch.device("cpu"))
    for number in range(20):
        instructions = [[0, [i, i], [], [i + 1, []]] for i in range(1000 + number)]
        body = wire.pack_plain([["aten.add.Tensor"], [0], [len(instructions)], instructions])
        machine.define(digest_of(body), body)
    assert machine.programs < 11
    first = digest_of(body)
    for size in range(400):
        geometry = wire.pack_plain([[["float32", [size], [1], 0]], [0] * 1020])
        machine.describe(first, digest_of(geometry), geometry)
    assert machine.has_program(first)
    assert machine.programs < 5
    assert machine._bytes <= 10 << 20


# --- below messages --------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_zeromq(worker: LocalWorker) -> None:
    host, port = worker.address.removeprefix("tcp://").split(":")
    choose = random.Random(5)
    before = _resident(worker)
    for number in range(200):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(choose.randbytes(choose.randint(1, 2000)) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
    time.sleep(0.2)
    _is_well(worker)
    assert _resident(worker) - before < 64 << 20


@contextlib.contextmanager
def _shaken_hands(worker: LocalWorker) -> Iterator[socket.socket]:
    """A connection on which ZMTP 3 (RFC 23) without security has been agreed."""
    host, port = worker.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 5) as raw:
        raw.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        raw.settimeout(5)
        _receive(raw, b"READY")  # a message that comes sooner is taken for a part of the handshake
        yield raw


def _receive(raw: socket.socket, text: bytes) -> None:
    """Read until something has come."""
    received = b""
    while text not in received:
        received += raw.recv(1000) or pytest.fail(f"the connection has ended before {text!r} came")


def test_a_frame_that_claims_a_terabyte(worker: LocalWorker) -> None:
    before = _resident(worker)
    with _shaken_hands(worker) as raw:
        raw.sendall(b"\x02" + (1 << 40).to_bytes(8, "big") + b"x" * 1000)
        with contextlib.suppress(OSError):
            while raw.recv(1000):  # until the worker hangs up
                pass
    assert _resident(worker) - before < 16 << 20
    _is_well(worker)


def test_a_message_that_never_ends(worker: LocalWorker) -> None:
    """ZeroMQ holds the segments of a message until its last one has come, however many they are."""
    ping = wire.encode({"v": wire.VERSION, "kind": "ping"})
    segment = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # more of the message follows
    resident = []
    for _ in range(4):
        sent = 0
        with _shaken_hands(worker) as raw, contextlib.suppress(OSError):
            raw.sendall(b"\0" + bytes([len(ping)]) + ping)  # a whole message comes first: it is no pending connection
            _receive(raw, b"kind")
            while sent < 8 << 30:
                raw.sendall(segment)
                sent += len(segment)
                if sent % (32 * len(segment)) == 0:
                    time.sleep(0.05)
        assert 100 << 20 < sent < 2 << 30
        _is_well(worker)
        resident.append(_resident(worker))
    assert resident[-1] - resident[0] < 512 << 20, "what was held is free again"


def test_a_header_that_is_too_long(worker: LocalWorker, attacker: Attacker) -> None:
    attacker.send([b"\0" * (wire.HEADER_BYTES + 1)])
    assert attacker.answer()["kind"] == "refused"
    _is_well(worker)


def test_too_many_segments(worker: LocalWorker, attacker: Attacker) -> None:
    attacker.send([wire.encode({"v": wire.VERSION, "kind": "ping"}), *[b""] * (wire.SEGMENTS + 5)])
    assert attacker.answer()["kind"] == "refused"
    _is_well(worker)


def test_another_owner_cannot_use_a_session(tmp_path: Any) -> None:
    from marid.remote.wire.endpoints import ClientKey, make_client

    keys = [ClientKey.read(make_client(tmp_path, name)) for name in ("ann", "bob")]
    with worker_process("--keys", str(tmp_path)) as worker, linked(worker, keys[0]) as ann:
        ann.wait(ann.send([upload(1, torch.ones(2))]))
        with linked(worker, keys[1]) as bob:
            bob.wait(bob.send([upload(1, torch.zeros(2))]))
            bob.session = ann.session
            with pytest.raises(Exception, match="no longer has the session"):
                bob.wait(bob.send([ask.Fetch(1)]))
        assert ann.wait(ann.send([ask.Fetch(1)])).tolist() == [1.0, 1.0]


assert Link is not None
