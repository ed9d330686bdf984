"""What several workers reduce together: equal to one device, and never a hang."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid.errors import LazyTensorError, MaterializationError, WorkerLostError
from marid.frontend.engines import engine_of
from marid.remote.client import transfers as exchange
from marid.remote.launch import connect as connecting
from marid.remote.wire import requests as ask
from marid.remote.wire.requests import read_requests
from marid.remote.worker import collectives
from marid.remote.worker.collectives import CollectiveFailed, Groups, Store, WouldBlock
from marid.report.traffic import traffic
from tests.remote_helpers import connected, kill

A, B = "remote_accelerator:3", "remote_accelerator:4"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with connected(3, 4):
        yield


@pytest.fixture(scope="module")
def group() -> Any:
    return marid.process_group([A, B], timeout=30)


def example() -> Any:
    path = Path(__file__).parent.parent / "examples" / "data_parallel.py"
    spec = importlib.util.spec_from_file_location("data_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_reductions_are_those_of_torch(op: str, dtype: torch.dtype, group: Any) -> None:
    if op == "mean" and dtype is torch.int64:
        pytest.skip("a mean of integers is refused")
    a, b = (torch.randn(3, 5) * 10).to(dtype), (torch.randn(3, 5) * 10).to(dtype)
    both = torch.stack([a, b])
    expected = {"sum": both.sum(0), "max": both.amax(0), "min": both.amin(0)}.get(op)
    if expected is None:
        expected = both.mean(0)
    found = marid.all_reduce([a.to(A) * 1, b.to(B) * 1], op, group=group)
    assert [one.device for one in found] == [torch.device(A), torch.device(B)]
    for one in found:
        assert torch.equal(one.cpu(), expected)


def test_what_is_given_stays_as_it_is(group: Any) -> None:
    """Also a transposed slice, of which nothing but its elements is taken."""
    a, b = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)
    on_a, on_b = a.to(A), b.to(B)
    found = marid.all_reduce([on_a.t()[1:], on_b.t()[1:]], group=group)
    found[0].add_(100)
    assert torch.equal(on_a.cpu(), a)
    assert torch.equal(found[1].cpu(), (a + b).t()[1:])
    assert torch.equal(found[0].cpu(), (a + b).t()[1:] + 100)


def test_what_does_not_fit_is_refused(group: Any) -> None:
    a, b = torch.ones(2).to(A), torch.ones(2).to(B)
    for tensors, op, match in (
        ([a], "sum", "2 members"),
        ([b, a], "sum", f"expects a tensor on {A}"),
        ([a, torch.ones(2)], "sum", "got one on cpu"),
        ([a, b.double()], "sum", "alike"),
        ([a, b[:1]], "sum", "alike"),
        ([a, b], "product", "can do sum, mean"),
        ([a.long(), b.long()], "mean", "cannot take the mean of torch.int64"),
    ):
        with pytest.raises(ValueError, match=match):
            marid.all_reduce(tensors, op, group=group)
    for devices in ([], [A, A], ["cpu"], ["remote_accelerator"]):
        with pytest.raises(ValueError, match="process_group"):
            marid.process_group(devices)
    with pytest.raises(LazyTensorError, match="is this process"):
        marid.process_group([A, "remote_accelerator:0"])


def test_an_error_of_one_member_is_raised_and_does_not_hang_the_other(group: Any) -> None:
    bad = torch.arange(3.0).to(A)[torch.tensor([5]).to(A)]
    fine = torch.ones(1).to(B)
    with pytest.raises(MaterializationError, match="out of bounds") as caught:
        marid.all_reduce([bad, fine], group=group)
    traceback.clear_frames(caught.tb)  # the error is kept, and would keep them
    assert marid.all_reduce([fine.to(A), fine], group=group)[1].item() == 2.0
    del bad, fine


# --- training --------------------------------------------------------------------------------------------------------


def train(devices: list[str], steps: int, at: Any = lambda step: None) -> list[torch.Tensor]:
    """Losses and parameters of the first replica, and of the last."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    parallel = example().DataParallel(model, devices, adam)
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x, y = torch.randn(8, 8, generator=data), torch.randn(8, 3, generator=data)
        loss = parallel.step(x, y, torch.nn.functional.mse_loss)
        at(step)
        losses.append(loss.cpu())
    replicas = [[p.detach().cpu() for p in replica.parameters()] for replica in parallel.replicas]
    for one in replicas:
        assert all(torch.equal(a, b) for a, b in zip(one, replicas[0], strict=True))  # they never come apart
    return [*losses, *replicas[0]]


def on_one_device(steps: int) -> list[torch.Tensor]:
    """The same in plain PyTorch, all of the batch at once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 8, generator=data), torch.randn(8, 3, generator=data)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[p.detach() for p in model.parameters()]]


def test_training_on_two_workers_is_training_on_one() -> None:
    marid.reset_stats()
    torch.testing.assert_close(train([A, B], 10), on_one_device(10), rtol=1e-4, atol=1e-5)
    seen = marid.stats().remote
    assert seen is not None
    assert seen.relayed == 0
    torch.testing.assert_close(train([B], 10), on_one_device(10))


def test_training_survives_a_member() -> None:
    """What it had of earlier reductions comes from the other one, and the group is formed anew."""
    expected = train([A, B], 6)
    recoveries = traffic.recoveries
    found = train([A, B], 6, lambda step: kill(4) if step == 3 else None)
    assert traffic.recoveries == recoveries + 1
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.conformance
def test_training_survives_either_member_at_any_step() -> None:
    expected = train([A, B], 5)
    for step in range(5):
        for index in (3, 4):
            found = train([A, B], 5, lambda now, at=step, who=index: kill(who) if now == at else None)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (step, index)


def test_what_all_members_lose_together_is_lost_and_says_so(group: Any) -> None:
    found = marid.all_reduce([torch.ones(7).to(A), torch.ones(7).to(B)], group=group)
    kill(3, 4)
    for one in found:
        with pytest.raises(WorkerLostError, match=r"float32 tensor of shape \[7\].*lost together"):
            one.cpu()
    assert marid.all_reduce([torch.ones(1).to(A), torch.ones(1).to(B)], group=group)[0].item() == 2.0


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_member_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    """Meanwhile the worker does other work."""
    engine: Any = engine_of(3)
    number = os.urandom(16)
    meeting = engine.ask(ask.Meet(number, 2))
    engine.finish(meeting)
    from marid.remote.client.link import Link
    from marid.remote.client.window import RequestFailed

    connection: Any = connecting.connection_of(3)
    link = Link(connection.worker.address)
    try:
        seq = link.send([ask.Join(number, 1, 2, "127.0.0.1", meeting.result, "127.0.0.1", 2)])
        assert (torch.ones(2).to(A) + 1).tolist() == [2.0, 2.0]
        with pytest.raises(RequestFailed, match="CollectiveFailed"):
            link.wait(seq, 60)
    finally:
        link.close()


@pytest.mark.parametrize(
    "data",
    [
        ["meet", b"short", 5],
        ["meet", bytes(16), "5"],
        ["meet", bytes(16), 0],
        ["join", bytes(16), 2, 2, "127.0.0.1", 80, "127.0.0.1", 5],
        ["join", bytes(16), 0, 0, "127.0.0.1", 80, "127.0.0.1", 5],
        ["join", bytes(16), 0, 2, "127.0.0.1", 0, "127.0.0.1", 5],
        ["join", bytes(16), 0, 2, "127.0.0.1", 80, "", 5],
        ["reduce", bytes(16), "product", 1, 2],
        ["reduce", bytes(16), "sum", -1, 2],
        ["leave", None],
    ],
)
def test_malformed_requests_are_refused(data: list[Any]) -> None:
    with pytest.raises(marid.errors.WireError):
        read_requests([data], [])


def test_ctrl_c_between_members_keeps_none_of_them_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was asked, the other was not: the next reduction does not wait for the timeout of this one."""
    group = marid.process_group([A, B], timeout=60)
    given = [torch.ones(2, device=A), torch.ones(2, device=B)]
    assert marid.all_reduce(given, group=group)[0].tolist() == [2.0, 2.0]
    reduce = exchange.reduce
    asked: list[Any] = []

    def interrupted(device: Any, *rest: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(device)
        return reduce(device, *rest)

    monkeypatch.setattr(exchange, "reduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        marid.all_reduce(given, group=group)
    monkeypatch.setattr(exchange, "reduce", reduce)
    started = time.monotonic()
    found = marid.all_reduce([torch.full((2,), 3.0, device=A), torch.full((2,), 4.0, device=B)], group=group)
    assert [one.tolist() for one in found] == [[7.0, 7.0]] * 2
    assert time.monotonic() - started < 30


# --- what a client may do to a worker with groups --------------------------------------------------------------------


def test_groups_that_nobody_joins_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread ends with what it waits for, whoever has left the group."""
    free = threading.BoundedSemaphore(2)
    monkeypatch.setattr(collectives, "_threads", free)
    groups = Groups(torch.device("cpu"), lambda: None)
    holder: Any = None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for number in range(3):
            group = bytes([number] * 16)
            with pytest.raises(WouldBlock if number < 2 else CollectiveFailed):
                groups.do(ask.Join(group, 1, 2, "127.0.0.1", port, "127.0.0.1", 3), holder)
            groups.do(ask.Leave(group), holder)
        assert not groups._jobs
    for _ in range(2):
        assert free.acquire(timeout=60)  # they have ended


def test_no_address_of_a_client_keeps_a_worker_waiting() -> None:
    """Whatever host members are to meet at, the worker where they meet is ready at once."""
    started = time.monotonic()
    assert Store(3600).port
    assert time.monotonic() - started < 30
