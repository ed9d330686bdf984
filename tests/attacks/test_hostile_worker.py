"""A worker that answers wrongly: the client says so, and does not wait for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

import marid
from marid.errors import LazyTensorError, WireError
from marid.remote.launch import connect as connecting
from marid.remote.wire import codec as wire
from tests.remote_helpers import within

INDEX = 5
DEVICE = f"remote_accelerator:{INDEX}"
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class Impostor:
    """Somebody who greets as a worker does, and answers as ``work`` says."""

    def __init__(self, work: Answer, welcome: dict[str, Any] | None = None) -> None:
        self._work = work
        self._welcome = welcome or {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._boot = os.urandom(8)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping:
            if not self._socket.poll(50):
                continue
            route, *frames = self._socket.recv_multipart()
            header = wire.decode(frames[0])
            fields: dict[str, Any] | None = None
            if header["kind"] == "hello":
                limits = {"in_flight": 1 << 28, "messages": 512, "lease": 300.0, "memory": 0, "spill": 0}
                fields = {"kind": "welcome", "limits": limits, "device": "cpu", "torch": torch.__version__, "pid": 1}
                fields |= {"peer": bytes(32), "applied": 0, "epoch": 0, **self._welcome}
            elif header["kind"] == "work":
                fields = self._work(header)
            if fields is not None:
                known = {"v": wire.VERSION, "boot": self._boot, "session": header["session"]}
                self._socket.send_multipart([route, wire.encode({**known, **fields})])

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._socket.close()
        self._context.term()


def _reply(header: dict[str, Any], value: Any = None, **fields: Any) -> dict[str, Any]:
    last = header["seq"] + len(header["requests"]) - 1
    results = [[last, value]] if value is not None else []
    return {"kind": "reply", "epoch": header["epoch"], "applied": last, "results": results, **fields}


def _failure(header: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return _reply(
        header, applied=header["seq"] - 1, error={"seq": header["seq"], "type": "RuntimeError", "text": "", **fields}
    )


ANSWERS: dict[str, Answer] = {
    "an int64 for a float32": lambda h: _reply(h, {"tensor": ["int64", [], [], bytes(8)]}),
    "another shape": lambda h: _reply(h, {"tensor": ["float32", [2], [1], bytes(8)]}),
    "too few bytes": lambda h: _reply(h, {"tensor": ["float32", [], [], bytes(3)]}),
    "segments that are not there": lambda h: _reply(h, {"tensor": ["float32", [100], [1], 0, 5]}),
    "no tensor": lambda h: _reply(h, {"tensor": 5}),
    "a map": lambda h: _reply(h, {"x": 1}),
    "nothing": lambda h: _reply(h),
    "a number": lambda h: _reply(h, 7),
    "results that are none": lambda h: _reply(h, results=[1, 2]),
    "results of texts": lambda h: _reply(h, results=[["a", "b"]]),
    "no results": lambda h: _reply(h, results=5),
    "more than was asked": lambda h: _reply(h, applied=1 << 50),
    "less than nothing": lambda h: _reply(h, applied=-1),
    "no epoch": lambda h: _reply(h, epoch=None),
    "a later epoch": lambda h: _reply(h, epoch=7),
    "warnings that are none": lambda h: _reply(h, warnings=[1]),
    "mispredictions that are none": lambda h: _reply(h, mispredictions=[5]),
    "an error that is none": lambda h: _reply(h, error=5),
    "an error of nothing": lambda h: _reply(h, error={}),
    "an error without a type": lambda h: _failure(h, type=None),
    "stopped unasked": lambda h: _failure(h, type="Cancelled"),
    "slots that are none": lambda h: _failure(h, index=0, existing=["x"]),
    "slots that are not there": lambda h: _failure(h, index=0, existing=[1 << 40]),
    "always missing": lambda h: _failure(h, missing=[bytes(32)], type="Missing"),
    "missing nonsense": lambda h: _failure(h, missing=5, type="Missing"),
    "always gone": lambda _h: {"kind": "gone"},
    "always refused": lambda _h: {"kind": "refused", "reason": "x", "text": 5},
    "always expecting": lambda h: _reply(h, applied=0, expected=1),
}


@pytest.fixture
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    one = Impostor(ANSWERS[request.param])
    marid.connect(one.address, first=INDEX)
    yield one
    connecting.disconnect(INDEX, force=True)
    one.close()


@pytest.mark.parametrize("impostor", ANSWERS, indirect=True)
@pytest.mark.usefixtures("impostor")
def test_a_wrong_answer_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "worker_patience", 2)
    x = torch.ones((), device=DEVICE) * 3
    with within(30), pytest.raises((LazyTensorError, RuntimeError)) as caught:
        x.item()
    assert not isinstance(caught.value, (KeyError, AttributeError, RecursionError, NotImplementedError))
    del x, caught


@pytest.mark.parametrize(
    "welcome",
    [
        {"limits": None},
        {"limits": {}},
        {"limits": {"in_flight": "x", "messages": 1, "lease": 1, "memory": 0, "spill": 0}},
        {"limits": {"in_flight": 0, "messages": 0, "lease": 1, "memory": 0, "spill": 0}},
        {"limits": {"in_flight": 9, "messages": 9, "lease": 0, "memory": 0, "spill": 0}},
        {"peer": None},
        {"device": 5},
        {"torch": None},
        {"pid": "x"},
    ],
)
def test_a_wrong_greeting_is_said_to_be_one(welcome: dict[str, Any]) -> None:
    one = Impostor(lambda _h: None, welcome)
    try:
        with within(30), pytest.raises(WireError):
            marid.connect(one.address, first=INDEX)
    finally:
        one.close()
