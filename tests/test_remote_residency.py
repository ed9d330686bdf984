"""A worker that cannot hold everything: what waits on the host goes by role, comes back when used, and is right."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

import marid
from marid.errors import MemoryLimitError
from marid.execute.residency import ROLES, Residency
from marid.frontend.engines import engine_of
from marid.remote.client.link import Link
from marid.remote.launch import connect as connecting
from marid.remote.wire import codec as wire
from marid.remote.wire import requests as ask
from tests.remote_helpers import linked, upload, worker_process
from tests.remote_runs import decode, same, train

DEVICE = "remote_accelerator:3"
CPU = torch.device("cpu")
MEGABYTE = 1 << 20


@contextlib.contextmanager
def limited(limit: str, spill: str) -> Iterator[Any]:
    """A device of which so much is on the worker's device; its engine."""
    with worker_process("--memory-limit", limit, "--spill", spill) as worker:
        marid.connect(worker.address, first=3)
        try:
            yield engine_of(3)
        finally:
            gc.collect()
            connecting.disconnect(3, force=True)


def filled(count: int, size: int = MEGABYTE // 4) -> list[torch.Tensor]:
    """So many tensors on the device, made one at a time: what is pending runs together."""
    tensors = []
    for i in range(count):
        tensors.append(torch.full((size,), float(i), device=DEVICE))
        tensors[-1].sum().item()
    return tensors


def held(residency: Residency, *tensors: torch.Tensor) -> list[bool]:
    """Which of these tensors are here."""
    return [tensor.untyped_storage().nbytes() > 0 for tensor in tensors]


def test_the_least_precious_goes_first_then_the_least_recently_used() -> None:
    residency = Residency(CPU, MEGABYTE)
    weight, cache, old, new = (torch.arange(1000.0) + i for i in range(4))
    for tensor, role in ((weight, "weight"), (cache, "kv cache"), (old, "activation"), (new, "activation")):
        residency.note(tensor, ROLES.index(role))
    assert residency.bring([old], 0)  # so that it is the newer one
    for gone in ([True, True, True, False], [True, True, False, False], [True, False, False, False], [False] * 4):
        assert residency.bring([], -1)
        assert held(residency, weight, cache, old, new) == gone
    assert residency.spilled == 16_000
    assert not residency.bring([], -1)
    assert residency.bring([weight, cache], 8000)
    assert weight.tolist() == list(range(1000))
    assert cache.sum().item() == sum(range(1, 1001))
    assert residency.spilled == 8000
    del old, new, tensor
    residency.forget()
    assert residency.spilled == 0


def test_what_is_used_stays_and_views_go_with_their_memory() -> None:
    residency = Residency(CPU, MEGABYTE)
    base = torch.arange(1000.0)
    view, other = base[10:20], torch.ones(1000)
    for tensor in (base, view, other):
        residency.note(tensor)
    assert residency.bring([view], -1)
    assert held(residency, base, other) == [True, False]
    assert not residency.bring([view], -5000)
    assert residency.bring([other], 0)  # in the place of the other one
    assert held(residency, view, other) == [False, True]
    assert residency.bring([view], 4000)
    view.add_(1)
    assert base[9:12].tolist() == [9.0, 11.0, 12.0]


def test_no_more_waits_on_the_host_than_may() -> None:
    residency = Residency(CPU, 5000)
    first, second = torch.ones(1000), torch.ones(1000)
    for tensor in (first, second):
        residency.note(tensor)
    assert not residency.bring([], -8000)
    assert residency.spilled <= 5000


def test_more_than_the_worker_holds() -> None:
    """Twice the memory, each tensor right whenever it is read; what no spilling makes room for is refused."""
    with limited("8m", "64m") as engine:
        kept = filled(16)
        stats = engine.worker_stats()
        assert stats["bytes"] <= 8 * MEGABYTE
        assert stats["spilled_bytes"] >= 8 * MEGABYTE
        for i, tensor in enumerate(kept):
            tensor.add_(1)
            assert tensor[5].item() == i + 1
            assert torch.nonzero(tensor[:1]).tolist() == [[0]]
        with pytest.raises(MemoryLimitError):
            torch.stack(kept).sum().item()
        assert kept[3].sum().item() == 4 * MEGABYTE // 4
        del kept, tensor
        gc.collect()
        assert engine.worker_stats()["spilled_bytes"] == 0


def test_weights_stay_and_activations_go() -> None:
    with limited("20m", "64m") as engine:
        model = torch.nn.Linear(1024, 1024, bias=False).to(DEVICE)  # 4 MB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 1024, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.sum().item()
        kept = filled(20)
        before = engine.worker_stats()
        assert before["spilled_bytes"] >= 3 * MEGABYTE
        model.weight[0, 0].item()
        after = engine.worker_stats()
        assert after["spill_moved"] == before["spill_moved"]  # it was here all the time
        assert kept[0].sum().item() == 0


@pytest.mark.parametrize("hint", [None, "activation", "weight", "kv cache"])
def test_hints_change_speed_only(hint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, absent and wrong ones, under a limit that lets memory go out and in all the time."""
    from marid.remote.client import engine as remote_engine

    if hint is not None:
        monkeypatch.setattr(remote_engine, "note_roles", lambda task, step: _all_are(task, hint))
    with limited("600k", "64m") as engine:
        others = filled(50, 4096)

        def at(step: int) -> None:
            assert others[4 * step].sum().item() == 4 * step * 4096

        assert same(train(DEVICE, 12, at), train("cpu", 12))
        assert same(decode(DEVICE, 12, at), decode("cpu", 12))
        assert engine.worker_stats()["spill_moved"] > 20 * 4096 * 4


def _all_are(task: Any, role: str) -> None:
    for value in task.outputs:
        value.concrete.block.role = role
    for buffer in task.inputs:
        buffer.block.role = role


def test_what_others_may_collect_stays_on_the_host() -> None:
    """The bytes of a copy are collected again, when its receiver was lost, from a worker that is full by then."""
    with limited("8m", "64m"):
        marid.connect(workers=1, first=4)
        try:
            x = torch.arange(MEGABYTE // 2, device=DEVICE, dtype=torch.float32)
            y = x.to("remote_accelerator:4")
            expected = y.sum().item()
            kept = filled(12)
            os.kill(connecting.connection_of(4).worker.process.pid, signal.SIGKILL)
            assert y.sum().item() == expected
            assert torch.equal(y.cpu(), torch.arange(MEGABYTE // 2, dtype=torch.float32))
            assert [tensor.mean().item() for tensor in kept] == list(range(12))
            del x, y, kept
        finally:
            gc.collect()
            connecting.disconnect(4, force=True)


# --- what others have of it ------------------------------------------------------------------------------------------


def crowded(link: Link, count: int = 10) -> None:
    """Upload so much that what was there before waits on the host."""
    for handle in range(1000, 1000 + count):
        link.wait(link.send([upload(handle, torch.full((4 * MEGABYTE,), 1.0))]))


def test_what_waits_on_the_host_is_packed_and_reduced() -> None:
    with worker_process("--memory-limit", "64m", "--spill", "512m") as worker, linked(worker) as link:
        x = torch.arange(4.0 * MEGABYTE)
        group = bytes(16)
        meeting = link.send([ask.Meet(group, 30)])
        link.wait(link.send([ask.Join(group, 0, 1, "127.0.0.1", link.wait(meeting), "127.0.0.1", 30)]))
        link.wait(link.send([upload(1, x)]))
        crowded(link)
        assert torch.equal(link.wait(link.send([ask.Pack(2, 1), ask.Fetch(2)]) + 1).view(torch.float32), x)
        crowded_again = link.send([ask.Free(tuple(range(1000, 1010))), ask.Free((2,))])
        link.wait(crowded_again + 1)
        crowded(link)
        assert torch.equal(link.wait(link.send([ask.Reduce(group, "sum", 3, 1), ask.Fetch(3)]) + 1), x)


def test_what_others_may_collect_comes_back_for_them() -> None:
    """Also tensors that were not packed, whatever they are: the worker lives on."""
    with worker_process("--memory-limit", "64m", "--spill", "512m") as worker, linked(worker) as link:
        data = torch.arange(16 * MEGABYTE).to(torch.uint8)
        link.wait(link.send([upload(1, data), upload(2, data[:100:2]), upload(3, data[:1].expand(100))]))
        crowded(link)
        context = zmq.Context()
        with context.socket(zmq.DEALER) as other:
            other.linger = 0
            other.connect(worker.address)
            ends = {1: "piece", 2: "later", 3: "later"}
            for handle, kind in ends.items():
                ticket = bytes([handle] * 32)
                link.notify({"kind": "offer", "ticket": ticket, "handle": handle, "peer": link.welcome["peer"]})
                link.wait(link.send([ask.Stats()]))
                collect = {"v": wire.VERSION, "kind": "collect", "session": bytes(16), "boot": link.boot}
                other.send(wire.encode({**collect, "ticket": ticket, "start": 4 * MEGABYTE}))
                assert other.poll(10_000)
                header, *segments = other.recv_multipart()
                assert wire.decode(header)["kind"] == kind
                assert not segments or segments[0] == bytes(data[4 * MEGABYTE : 8 * MEGABYTE].tolist())
        context.term()
        assert link.wait(link.send([ask.Fetch(1, (16 * MEGABYTE - 3, (3,), (1,)))])).tolist() == [253, 254, 255]
