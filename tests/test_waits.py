"""Waiting for values: ``await tensor`` (source document 002) and ``marid.would_sync``."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import marid
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import connected

_open = threading.Event()
_reached = threading.Event()
_library = torch.library.Library("marid_test_waits", "DEF")
_library.define("gated(Tensor x) -> Tensor")


def _gated(x: torch.Tensor) -> torch.Tensor:
    _reached.set()
    if not _open.wait(10):
        raise RuntimeError("nobody opened the gate")
    return x + 1


_library.impl("gated", _gated, "CPU")
_library.impl("gated", torch.empty_like, "Meta")


@pytest.fixture
def gated() -> Iterator[torch.Tensor]:
    """A one and a two, which are not made before ``_open`` is set."""
    _open.set()  # recording an unknown operator tries it
    x = torch.ops.marid_test_waits.gated(torch.tensor([0.0, 1.0], device=DEVICE))
    assert not x.materialized
    _open.clear()
    _reached.clear()
    yield x
    _open.set()
    torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]


async def _reaches_the_gate() -> None:
    while not _reached.is_set():
        await asyncio.sleep(0.001)


@pytest.mark.in_process("has an operator that waits for the test")
def test_document_002_the_event_loop_goes_on_while_a_tensor_is_awaited(gated: torch.Tensor) -> None:
    """Another coroutine opens the gate that the program waits at; then the value is there, and reading waits for
    nothing."""

    async def read() -> torch.Tensor:
        return await gated

    async def main() -> torch.Tensor:
        reading = asyncio.create_task(read())
        await asyncio.wait_for(_reaches_the_gate(), 5)
        assert not reading.done()
        _open.set()
        return await reading

    assert asyncio.run(main()) is gated
    [sync] = marid.stats().syncs
    assert sync.reason == "await"
    assert "test_waits.py" in sync.source
    with marid.no_sync():
        assert_same(gated, torch.tensor([1.0, 2.0]))


@pytest.mark.in_process("has an operator that waits for the test")
def test_a_cancelled_await_ends_at_once_and_the_value_is_made(gated: torch.Tensor) -> None:
    """What is cancelled is the waiting."""

    async def read() -> torch.Tensor:
        return await gated

    async def main() -> None:
        reading = asyncio.create_task(read())
        await _reaches_the_gate()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.01)
        assert not gated.materialized
        _open.set()

    asyncio.run(main())
    assert gated.materialized
    assert gated.tolist() == [1.0, 2.0]


def test_a_failure_is_raised_at_the_await_and_at_each_later_read() -> None:
    """With the line of the operation in its message, and without frames of Marid."""
    failing = torch.ones(3, device=DEVICE)[torch.tensor([7], device=DEVICE)]

    async def read() -> None:
        with pytest.raises(marid.errors.MaterializationError, match=r"test_waits\.py") as caught:
            await failing
        assert str(caught.value).count("test_waits.py") == 2  # where it was written, and where it was awaited
        assert not [entry for entry in caught.traceback if Path(marid.__file__).parent in Path(entry.path).parents]
        with pytest.raises(marid.errors.MaterializationError):
            await failing

    asyncio.run(read())
    with pytest.raises(marid.errors.MaterializationError):
        failing.sum().item()


def test_several_tensors_are_gathered() -> None:
    """``asyncio.gather`` gives the tensors, each with its value."""
    tensors = [torch.full((2,), float(i), device=DEVICE) + 1 for i in range(4)]

    async def main() -> list[torch.Tensor]:
        return list(await asyncio.gather(*tensors))

    for index, (made, asked) in enumerate(zip(asyncio.run(main()), tensors, strict=True)):
        assert made is asked
        assert made.materialized
        assert made.tolist() == [index + 1.0] * 2


def test_await_keeps_to_no_sync_and_capture() -> None:
    """Inside ``no_sync`` it is an error at its line; inside ``capture`` only what is awaited runs."""

    async def forbidden(x: torch.Tensor) -> None:
        with marid.no_sync():
            await x

    x = torch.ones(3, device=DEVICE) * 2
    with pytest.raises(marid.errors.SyncForbiddenError, match=r"await at .*test_waits\.py"):
        asyncio.run(forbidden(x))
    assert not x.materialized

    async def captured() -> tuple[torch.Tensor, torch.Tensor]:
        with marid.capture():
            asked, other = x + 1, x + 2
            await asked
        return asked, other

    asked, other = asyncio.run(captured())
    assert asked.materialized
    assert not other.materialized


def test_await_without_an_event_loop_waits_here() -> None:
    """A coroutine that is driven by hand, or by another library, never has to be resumed."""

    async def read(x: torch.Tensor) -> torch.Tensor:
        return await x

    x = torch.ones(3, device=DEVICE) * 2
    with pytest.raises(StopIteration) as ended:
        read(x).send(None)
    assert ended.value.value is x
    assert x.materialized


@pytest.mark.in_process("reads from this process")
def test_would_sync_says_what_is_recorded() -> None:
    """How many operations, of how many bytes, up to which line; and runs none of them."""
    x = torch.arange(1024.0, device=DEVICE)
    y = x * 2 + 1
    wait = marid.would_sync(y)
    assert wait
    assert (wait.operations, wait.nbytes, wait.running, wait.failure) == (3, 3 * 4096, False, None)
    assert "test_waits.py" in (wait.source or "")
    assert "3 recorded operations (12.0 KiB, the last one of " in str(wait)
    assert marid.would_sync(x).operations == 1
    assert marid.stats().ops_executed == 0
    assert not y.materialized
    with pytest.raises(dataclasses.FrozenInstanceError):
        wait.operations = 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.in_process("connects a worker of its own")
def test_a_worker_is_asked_once_for_what_is_awaited() -> None:
    """The value is brought, for the next read; not for a ``repr``, which asyncio calls."""

    async def read(x: torch.Tensor) -> torch.Tensor:
        return await x

    def work() -> None:
        x = torch.arange(1000.0, device=f"{DEVICE}:6") * 2
        wait = marid.would_sync(x)
        assert (wait.operations, wait.worker, wait.running) == (2, "local worker (cpu)", False)
        asyncio.run(read(x))
        repr(x)
        assert not marid.would_sync(x)
        with marid.budget(round_trips=0):
            assert_same(x, torch.arange(1000.0) * 2)
        assert str(marid.would_sync(x)) == "an answer of local worker (cpu)"

    with connected(6):
        work()


@pytest.mark.in_process("reads from this process")
def test_would_sync_agrees_with_no_sync() -> None:
    """A write that is pending is waited for, though the value that it writes over is there."""
    x = torch.arange(1024.0, device=DEVICE)
    x.tolist()
    assert not marid.would_sync(x)
    assert str(marid.would_sync(x)) == "nothing: the value is there"
    with marid.no_sync():
        x.tolist()
    x.add_(1)
    assert marid.would_sync(x).operations == 1
    with marid.no_sync(), pytest.raises(marid.errors.SyncForbiddenError):
        x.tolist()


@pytest.mark.in_process("has an operator that waits for the test")
def test_would_sync_says_what_runs(gated: torch.Tensor) -> None:
    """While another thread runs it, and without waiting for that thread."""
    there = torch.ones(3, device=DEVICE) + 1
    there.tolist()
    reader = threading.Thread(target=gated.tolist)
    reader.start()
    assert _reached.wait(5)
    for tensor in (gated, there):
        wait = marid.would_sync(tensor)
        assert wait
        assert wait.running
        assert "what is running already" in str(wait)
    repr(there)  # waits for nothing either
    _open.set()
    reader.join()
    assert not marid.would_sync(gated)


def test_would_sync_says_what_failed() -> None:
    """Reading does not wait then: it raises."""
    failing = torch.ones(3, device=DEVICE)[torch.tensor([7], device=DEVICE)]
    with pytest.raises(marid.errors.MaterializationError):
        failing.tolist()
    wait = marid.would_sync(failing + 1)
    assert not wait
    assert wait.failure is not None
    assert "MaterializationError" in str(wait)


def test_would_sync_takes_lazy_tensors_only() -> None:
    """A tensor of the CPU is an error, as for the other functions that look at what is recorded."""
    with pytest.raises(TypeError, match="would_sync"):
        marid.would_sync(torch.ones(3))
