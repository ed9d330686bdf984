"""A worker process: what it computes, what it keeps of each session, and what becomes of failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import marid
from marid.errors import AuthenticationError, WireError, WorkerLostError
from marid.remote.client.link import Link
from marid.remote.client.window import LinkLost, RequestFailed
from marid.remote.launch.local import LocalWorker, start_workers
from marid.remote.wire import requests as ask
from marid.remote.wire.codec import SEGMENT_BYTES
from marid.remote.wire.endpoints import ClientKey, endpoint, make_client, make_worker, served_endpoint
from marid.remote.wire.fields import Handle
from marid.remote.wire.program_records import packed
from marid.remote.wire.tensors import CHUNK_BYTES, chunks_of, memory_of
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import Recorded, end, linked, upload, worker_process


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    with worker_process() as one:
        yield one


@pytest.fixture
def link(worker: LocalWorker) -> Iterator[Link]:
    with linked(worker) as one:
        yield one


def _held(link: Link) -> int:
    return link.wait(link.send([ask.Stats()]))["tensors"]


def _fetch(link: Link, handle: int, view: Any = None) -> torch.Tensor:
    return link.wait(link.send([ask.Fetch(handle, view)]))


# --- what is computed ------------------------------------------------------------------------------------------------


def test_a_program_gives_what_it_gives_here(link: Link) -> None:
    x = torch.randn(6, 8, dtype=torch.float32).to(DEVICE)
    w = torch.randn(8, 8).to(DEVICE)
    y = torch.nn.functional.gelu(x @ w)
    y[1:3] += 2.5
    noise = torch.randn(6, 8, device=DEVICE)
    top = torch.topk(y * noise, 3)
    wanted = [y, noise, top.values, top.indices, y.t()]
    arrived = Recorded(*wanted).results(link, 1, 100)
    for one, tensor in zip(arrived, wanted, strict=True):
        assert_same(one, tensor.cpu())


def test_running_again_gives_the_same(link: Link) -> None:
    """The first run goes through a loop, later ones through a table, then planned."""
    x = torch.randn(64, 64).to(DEVICE)
    y = torch.softmax(x @ x.t(), -1) @ x
    for _ in range(8):
        y = torch.softmax(y @ x.t() * 0.5, -1) @ x + 1.0
    recorded = Recorded(y)
    (first,) = recorded.results(link, 1, 100)
    slot = recorded.outputs[0]
    for turn in range(2, 8):
        base = 1000 * turn
        seq = link.send([recorded.run((1,), base), ask.Fetch(base + slot), ask.Free((base + slot,))])
        assert torch.equal(link.wait(seq + 1), first)
    assert_same(first, y.cpu())


def test_a_write_is_seen_by_the_next_run(link: Link) -> None:
    x = torch.zeros(4).to(DEVICE)
    x.add_(1.5)
    recorded = Recorded(x)
    link.send([*recorded.definitions(), *recorded.uploads(1)])
    for turn in range(5):
        link.send([recorded.run((1,), 100 * (turn + 1))])
    assert _fetch(link, 1).tolist() == [7.5] * 4


def test_other_numbers_are_no_other_program(link: Link) -> None:
    x = torch.ones(3).to(DEVICE)
    y = x * 2.0
    recorded = Recorded(y)
    recorded.results(link, 1, 100)
    slot = recorded.outputs[0]
    seq = link.send([recorded.run((1,), 200, (5.0,)), ask.Fetch(200 + slot)])
    assert link.wait(seq + 1).tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("make", "view"),
    [
        pytest.param(lambda: torch.randn(5, 6).t(), None, id="transposed"),
        pytest.param(lambda: torch.randn(5, 6)[:, 2], None, id="a column"),
        pytest.param(lambda: torch.tensor(3.5), None, id="a number"),
        pytest.param(lambda: torch.randn(0, 3), None, id="no elements"),
        pytest.param(lambda: torch.randn(4).to(torch.float8_e5m2), None, id="float8"),
        pytest.param(lambda: torch.randn(4, dtype=torch.complex128), None, id="complex"),
        pytest.param(lambda: torch.arange(100.0), (10, (3, 2), (20, 1)), id="a view"),
    ],
)
def test_what_is_uploaded_is_fetched(link: Link, make: Any, view: Any) -> None:
    tensor = make()
    link.send([upload(1, tensor)])
    expected = tensor if view is None else tensor.as_strided(view[1], view[2], view[0])
    arrived = _fetch(link, 1, view)
    assert arrived.dtype == expected.dtype
    assert arrived.stride() == expected.stride()
    assert arrived.tolist() == expected.tolist()


def test_a_slice_moves_its_own_bytes(link: Link) -> None:
    link.send([upload(1, torch.arange(500_000.0))])
    link.wait(link.send([ask.Stats()]))
    before = link.counts.bytes_down
    assert _fetch(link, 1, (1000, (1000,), (400,)))[3].item() == 2200.0
    assert link.counts.bytes_down - before < 4000 + 500


def test_a_view_beyond_the_memory_is_refused(link: Link) -> None:
    link.send([upload(1, torch.arange(10.0))])
    with pytest.raises(RequestFailed, match="out of bounds"):
        _fetch(link, 1, (8, (3,), (1,)))
    link.resume()
    assert _fetch(link, 1).shape == (10,)


def test_operators_whose_result_depends_on_data(link: Link) -> None:
    x = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    link.send([upload(1, x)])
    seq = link.send(
        [
            ask.Call("aten.nonzero.default", (Handle(1),), (), None, 10),
            ask.Call("aten.view.default", (Handle(1), [4]), (), None, 20),
            ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (("alpha", 2),), None, 30),
            ask.Call("aten._local_scalar_dense.default", (Handle(10),), (), None, 40),
            ask.Call("aten.topk.default", (Handle(1), 1), (), None, 50),
        ][:3]
    )
    assert link.wait(seq)["returned"] == {"t": [10, ["int64", [2, 2], [1, 2], 0], None, None, None]}
    assert link.wait(seq + 1)["returned"] == {"t": [20, ["float32", [4], [1], 0], None, None, 0]}
    assert link.wait(seq + 2)["returned"]["t"][3] == 0  # it is its argument
    assert _fetch(link, 20).tolist() == [2.0, 4.0, 5.0, 2.0]


def test_a_call_draws_where_it_is_told(link: Link) -> None:
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state().numpy().tobytes()
    answer = link.wait(link.send([ask.Call("aten.randperm.generator", (9,), (), state, 5)]))
    assert torch.equal(_fetch(link, 5), torch.randperm(9, generator=generator))
    assert answer["state"] == generator.get_state().numpy().tobytes()


# --- failures --------------------------------------------------------------------------------------------------------


def _failing() -> tuple[Recorded, Any]:
    x = torch.arange(4.0).to(DEVICE)
    index = torch.tensor([9]).to(DEVICE)
    a = x + 1
    x.mul_(2.0)
    b = a.index_select(0, index)  # raises: the index is out of range
    c = b * 3
    return Recorded(a, c, x), (a, b, c)


def test_what_ran_before_a_failure_is_kept(link: Link) -> None:
    recorded, _kept = _failing()
    setup = [*recorded.definitions(), *recorded.uploads(1)]
    seq = link.send([*setup, recorded.run((1, 2), 100), ask.Fetch(1)])
    failing = seq + len(setup)
    with pytest.raises(RequestFailed) as caught:
        link.wait(failing + 1)
    failure = caught.value.failure
    assert caught.value.seq == failing
    assert failure["type"] == "IndexError"
    assert recorded.program.instructions[failure["index"]].op.name == "aten::index_select"
    a = recorded.outputs[0]
    assert a in failure["existing"]
    with pytest.raises(RequestFailed):
        link.send([ask.Fetch(1)])
    assert link.resume() == failing + 1
    assert _fetch(link, 100 + a).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert _fetch(link, 1).tolist() == [0.0, 2.0, 4.0, 6.0]  # written once


def test_what_was_sent_behind_a_failure_is_not_done(link: Link) -> None:
    link.send([upload(1, torch.zeros(2))])
    bad = link.send([ask.Call("aten.mm.default", (Handle(1), Handle(1)), (), None, 50)])
    with contextlib.suppress(RequestFailed):  # the answer may have come by now
        link.send([ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (), None, 60)])
    with pytest.raises(RequestFailed, match="RuntimeError"):
        link.wait(bad)
    link.resume()
    assert _fetch(link, 1).tolist() == [0.0, 0.0]


def test_what_the_worker_does_not_know_is_named(link: Link) -> None:
    digest = b"\1" * 32
    for request in (
        ask.Run(digest, digest, (), (), 0),
        ask.Upload(1, torch.uint8, (100,), (1,), (), (digest,)),
    ):
        with pytest.raises(RequestFailed) as caught:
            link.wait(link.send([request]))
        assert caught.value.failure["type"] == "Missing"
        assert digest in caught.value.failure["missing"]
        link.resume()


def test_requests_that_make_no_sense_are_refused(link: Link) -> None:
    x = torch.ones(3).to(DEVICE)
    y = x * 2.0
    recorded = Recorded(y)
    recorded.results(link, 1, 100)
    slot = recorded.outputs[0]
    link.send([upload(2, torch.ones(4)), upload(3, torch.ones(3, dtype=torch.float64))])
    for request in (
        recorded.run((), 200),
        recorded.run((1, 1), 200),
        recorded.run((99,), 200),
        recorded.run((2,), 200),  # another shape
        recorded.run((3,), 200),  # another dtype
        recorded.run((1,), 200, ()),
        recorded.run((1,), 200, ((1, 2),)),
        recorded.run((1,), 100),  # the handle is taken
        ask.Fetch(12345),
        upload(1, torch.ones(1)),
        ask.Call("aten.from_file.default", ("/etc/passwd",), (), None, 300),
        ask.Program(b"\0" * 32, packed(recorded.body)),
        ask.Program(recorded.digest, recorded.body),
        ask.Program(recorded.digest, packed(recorded.body) + b"x"),
        ask.Program(recorded.digest, packed(recorded.body)[:-1]),
        ask.Chunk(b"\0" * 32, b"abc"),
    ):
        with pytest.raises(RequestFailed) as caught:
            link.wait(link.send([request]))
        assert caught.value.failure["type"] == "WireError", caught.value
        link.resume()
    assert _fetch(link, 100 + slot).tolist() == [2.0] * 3


def test_freeing_twice_is_no_error(link: Link) -> None:
    link.send([upload(1, torch.ones(1)), ask.Free((1, 2)), ask.Free((1,))])
    assert _held(link) == 0


# --- large tensors ---------------------------------------------------------------------------------------------------


def _send_chunked(link: Link, handle: int, tensor: torch.Tensor) -> int:
    """Upload by content; how many chunks were sent."""
    chunks = list(chunks_of(memory_of(tensor)))
    digests = tuple(digest for digest, _ in chunks)
    lacking = link.wait(link.send([ask.Have(digests)]))
    for index in lacking:
        link.send([ask.Chunk(*chunks[index])])
    link.wait(link.send([ask.Upload(handle, tensor.dtype, tuple(tensor.shape), tensor.stride(), (), digests)]))
    return len(lacking)


def test_large_tensors_are_sent_once(worker: LocalWorker) -> None:
    tensor = torch.randn(5 * CHUNK_BYTES // 8 + 3)
    with linked(worker) as one, linked(worker) as another:
        assert _send_chunked(one, 1, tensor) == 3
        before = another.counts.bytes_up
        assert _send_chunked(another, 1, tensor) == 0
        assert another.counts.bytes_up - before < 1000
        assert torch.equal(_fetch(one, 1), tensor)
        assert torch.equal(_fetch(another, 1), tensor)
        one.wait(one.send([ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (), None, 9)]))
        assert torch.equal(_fetch(another, 1), tensor)  # not the same memory


def test_a_tensor_larger_than_a_segment(link: Link) -> None:
    tensor = torch.arange(5_000_000)  # 40 MB
    link.send([upload(1, tensor)])
    assert torch.equal(_fetch(link, 1), tensor)


def test_chunks_are_taken_from_files(link: Link, tmp_path: Any) -> None:
    tensor = torch.randint(0, 256, (CHUNK_BYTES + (64 << 10),), dtype=torch.uint8)
    path = tmp_path / "weights"
    path.write_bytes(b"head" + bytes(memory_of(tensor)))
    digests = tuple(digest for digest, _ in chunks_of(memory_of(tensor)))

    def lacking(path: Any, offset: int = 4, names: tuple[bytes, ...] = digests) -> list[int]:
        return link.wait(link.send([ask.Load(str(path), offset, tensor.nbytes, names)]))

    assert lacking(path, 3) == [0, 1]  # other bytes
    assert lacking(path, 5) == [0, 1]  # behind the end
    for other in (tmp_path, tmp_path / "none", "/dev/zero", "/dev/stdin", "", "a\0b"):
        assert lacking(other) == [0, 1]
    os.mkfifo(tmp_path / "pipe")
    assert lacking(tmp_path / "pipe") == [0, 1]
    assert lacking(path, 4, (digests[1], digests[1])) == [0]  # which is now there
    assert lacking(path) == []
    path.unlink()
    assert lacking(path) == []
    link.send([ask.Upload(1, torch.uint8, tuple(tensor.shape), (1,), (), digests)])
    assert torch.equal(_fetch(link, 1), tensor)


# --- sessions --------------------------------------------------------------------------------------------------------


def test_sessions_are_isolated(worker: LocalWorker) -> None:
    with linked(worker) as one, linked(worker) as another:
        one.wait(one.send([upload(1, torch.ones(2))]))
        another.wait(another.send([upload(1, torch.zeros(3))]))
        assert _fetch(one, 1).tolist() == [1.0, 1.0]
        with pytest.raises(RequestFailed):
            another.wait(another.send([ask.Fetch(2)]))
        assert _fetch(one, 1).tolist() == [1.0, 1.0]  # the failure is the other's


def test_the_session_of_a_client_that_says_good_bye_is_freed(worker: LocalWorker) -> None:
    with linked(worker) as watching:
        with linked(worker) as one:
            one.wait(one.send([upload(1, torch.ones(1000))]))
            assert watching.wait(watching.send([ask.Stats()]))["other_bytes"] == 4000
        until = time.monotonic() + 10
        while watching.wait(watching.send([ask.Stats()]))["other_bytes"]:
            assert time.monotonic() < until


def test_a_lease_ends() -> None:
    with worker_process("--lease", "0.2") as worker, linked(worker) as link:
        link.wait(link.send([upload(1, torch.ones(1))]))
        link._ended.set()  # no heartbeats: nothing is heard of the client
        time.sleep(2.0)
        with pytest.raises(LinkLost, match="no longer has the session"):
            _fetch(link, 1)


def test_many_requests_without_an_answer_in_between(link: Link) -> None:
    link.send([upload(1, torch.zeros(1))])
    for turn in range(2000):
        link.send([ask.Call("aten.add_.Tensor", (Handle(1), 1.0), (), None, 10 + turn)])
    assert _fetch(link, 1).item() == 2000.0


# --- memory ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_it_runs() -> None:
    with worker_process("--memory-limit", "1m") as worker, linked(worker) as link:
        x = torch.ones(1000).to(DEVICE)
        recorded = Recorded((x.view(-1, 1) * x).sum() + 1)  # by way of four megabytes
        link.send([*recorded.definitions(), *recorded.uploads(1)])
        with pytest.raises(RequestFailed) as caught:
            link.wait(link.send([recorded.run((1,), 100)]))
        failure = caught.value.failure
        assert failure["type"] == "TooLarge"
        assert failure["nbytes"] == 4_000_004
        assert failure["available"] == (1 << 20) - 4000
        slot, nbytes = failure["held"][0]
        assert nbytes == 4_000_000
        assert recorded.program.instructions[1].results[0].slot == slot
        link.resume()
        with pytest.raises(RequestFailed, match="TooLarge"):
            link.wait(link.send([upload(2, torch.ones(300_000))]))
        link.resume()
        for request in (
            ask.Upload(2, torch.float32, (2,), (1 << 30,), (b"\0" * 8,)),  # two elements, far apart
            ask.Call("aten.zeros.default", ([300_000],), (), None, 300),
            ask.Call("aten.add.Tensor", (Handle(3), 1.0), (), None, 300),
            ask.Call("aten.nonzero.default", (Handle(3),), (), None, 300),
        ):
            link.send([ask.Upload(3, torch.float32, (1 << 20,), (0,), (b"\0" * 4,))])  # one element, many times
            with pytest.raises(RequestFailed, match="TooLarge"):
                link.wait(link.send([request]))
            link.resume()
            link.send([ask.Free((3,))])
        assert _held(link) == 1


# --- cancelling ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _long_run(link: Link, first: int, length: int) -> Iterator[tuple[Recorded, int]]:
    """A run of many additions in place, begun, and its number: of memory, so that no machine is through soon."""
    x = torch.zeros(12_000_000).to(DEVICE)
    for _ in range(length):
        x.add_(1.0)
    y = x * 1.0
    recorded = Recorded(y)
    link.wait(link.send([*recorded.definitions(), *recorded.uploads(first)]) + 2)
    yield recorded, link.send([recorded.run((first,), first + 100)])


@pytest.mark.parametrize("warm", [False, True])
def test_a_run_is_cancelled_between_operations(link: Link, warm: bool) -> None:
    """In the loop of the first run, and in the table of later ones."""
    length = 1500
    with _long_run(link, 1, length) as (recorded, seq):
        if warm:
            link.wait(seq)
            link.wait(link.send([upload(2, torch.zeros(12_000_000))]))
            seq = link.send([recorded.run((2,), 100_000)])
        time.sleep(0.1)
        start = time.monotonic()
        link.cancel()
        with pytest.raises(RequestFailed) as caught:
            link.wait(seq)
        assert time.monotonic() - start < 2.0
        assert caught.value.failure["type"] == "Cancelled"
        done = caught.value.failure["index"] + caught.value.failure["finished"]
        assert 0 < done < length
        link.resume()
        values = _fetch(link, 2 if warm else 1).unique()
        assert values.tolist() == [float(done)]  # every operation was done once, or not at all


def test_cancelling_what_is_done_does_nothing(link: Link) -> None:
    link.wait(link.send([upload(1, torch.ones(2))]))
    link.cancel()
    assert _fetch(link, 1).tolist() == [1.0, 1.0]


def test_others_are_served_while_one_is_cancelled(worker: LocalWorker) -> None:
    with linked(worker) as one, linked(worker) as another:
        another.send([upload(1, torch.ones(2))])
        with _long_run(one, 1, 1500) as (_, seq):
            asked = another.send([ask.Fetch(1)])
            one.cancel()
            with pytest.raises(RequestFailed, match="Cancelled"):
                one.wait(seq)
            assert another.wait(asked).tolist() == [1.0, 1.0]


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_new_boot_is_noticed() -> None:
    (worker,) = start_workers(1, transport="tcp")
    link = Link(worker.address)
    try:
        link.wait(link.send([upload(1, torch.ones(1))]))
        end(worker)
        address = worker.address.removeprefix("tcp://")
        (again,) = start_workers(1, transport="tcp", options=("--bind", address))
        try:
            with pytest.raises(LinkLost):
                _fetch(link, 1)
        finally:
            again.stop()
    finally:
        link.close()
        worker.stop()


def test_a_worker_that_does_not_come_back_is_lost() -> None:
    with worker_process() as worker, linked(worker, patience=1.0) as link:
        link.wait(link.send([upload(1, torch.ones(1))]))
        end(worker)
        start = time.monotonic()
        with pytest.raises(LinkLost, match="out of reach"):
            _fetch(link, 1)
        assert time.monotonic() - start < 10


def test_a_worker_ends_with_whoever_started_it() -> None:
    (worker,) = start_workers(1)
    assert worker.is_alive
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(10) == 0
    worker.stop()
    assert not os.path.exists(worker.address.removeprefix("ipc://"))


def test_ctrl_c_ends_a_worker() -> None:
    with worker_process() as worker:
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(10) == 0


def test_nobody_there_is_said() -> None:
    with pytest.raises(WorkerLostError, match="marid worker"):
        Link("tcp://127.0.0.1:9", timeout=0.5)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_let_in_who_has_one(tmp_path: Any) -> None:
    make_worker(tmp_path / "keys")
    file = make_client(tmp_path / "keys", "ann")
    make_worker(tmp_path / "other")
    stranger = make_client(tmp_path / "other", "bob")
    with worker_process("--keys", str(tmp_path / "keys")) as worker:
        key = ClientKey.read(file)
        with linked(worker, key) as link:
            link.send([upload(1, torch.ones(2))])
            assert _fetch(link, 1).tolist() == [1.0, 1.0]
        with pytest.raises(AuthenticationError, match="without a key"):
            Link(worker.address, timeout=5)
        with pytest.raises(AuthenticationError, match="with the key"):
            Link(worker.address, ClientKey.read(stranger), timeout=5)
        unknown = ClientKey.read(stranger)
        with pytest.raises(AuthenticationError, match="with the key"):  # the right worker, but not let in
            Link(worker.address, ClientKey(unknown.public, unknown.secret, key.worker), timeout=5)
        (tmp_path / "keys" / "clients" / "bob.pub").write_bytes(unknown.public)
        with linked(worker, ClientKey(unknown.public, unknown.secret, key.worker)) as link:
            link.wait(link.send([upload(1, torch.ones(2))]))


def test_the_longest_segments_fit_behind_keys(tmp_path: Any) -> None:
    """Encryption makes a frame longer: one of 16 MiB ended the connection, again and again."""
    key = ClientKey.read(make_client(tmp_path, "ann"))
    sent = torch.arange((SEGMENT_BYTES * 2 + 4096) // 4, dtype=torch.int32)
    with worker_process("--keys", str(tmp_path)) as worker, linked(worker, key) as link:
        link.wait(link.send([upload(1, sent)]), 20)
        got = link.wait(link.send([ask.Fetch(1)]), 20)
        assert torch.equal(got, sent)
        assert link.counts.reconnects == 0


def test_secret_keys_are_private(tmp_path: Any) -> None:
    file = make_client(tmp_path, "ann")
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "worker.json").stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        ClientKey.read(file)
    with pytest.raises(AuthenticationError, match="already"):
        make_client(tmp_path, "ann")
    for name in ("", "../x", "worker", "a b", "."):
        with pytest.raises(AuthenticationError):
            make_client(tmp_path, name)
    with pytest.raises(AuthenticationError, match="keygen"):
        ClientKey.read(tmp_path / "nobody.json")


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "*:0", "[::]:0", "192.168.0.1:0", "example.org:7070"])
def test_an_address_that_others_reach_needs_keys(bind: str) -> None:
    with pytest.raises(AuthenticationError, match="keygen"):
        served_endpoint(bind, has_keys=False)


def test_addresses() -> None:
    assert endpoint("127.0.0.1:0") == ("tcp://127.0.0.1:*", True)
    assert endpoint("tcp://localhost:7070") == ("tcp://127.0.0.1:7070", True)
    assert endpoint("ipc:///tmp/x") == ("ipc:///tmp/x", True)
    assert endpoint("gpu.example.org:7070") == ("tcp://gpu.example.org:7070", False)
    assert endpoint("127.example.org:7070") == ("tcp://127.example.org:7070", False)  # a name like any other
    assert endpoint("[::1]:7070") == ("tcp://[::1]:7070", True)
    for wrong in ("", "7070", "host", "host:port", "host:65536", "http://host:70"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            endpoint(wrong)
    with pytest.raises(ValueError, match="too long"):
        endpoint(f"ipc:///tmp/{'a' * 110}")
    with pytest.raises(ValueError, match="has no port"):
        marid.connect("tcp://localhost:0", first=4)


@pytest.mark.parametrize(
    "option",
    ["--lease=0", "--lease=nan", "--memory-limit=-5", "--chunk-memory=inf", "--device=nowhere", "--bind=nowhere"],
)
def test_wrong_options(option: str) -> None:
    command = [sys.executable, "-m", "marid", "worker", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Error: " in done.stderr
    assert option.partition("=")[2] in done.stderr


assert WireError is not None
