"""``marid.default_device`` and ``marid.default_dtype``: context variables (source document 002)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import marid
from tests.helpers import DEVICE

ON = torch.device(DEVICE, 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = _get_current_function_mode_stack()
    yield
    assert _get_current_function_mode_stack() == before
    assert torch.ones(1).device == CPU
    assert torch.ones(1).dtype == torch.float32


def _made() -> tuple[torch.device, torch.dtype]:
    made = torch.ones(1)
    return made.device, made.dtype


def test_factories_make_lazy_tensors_inside() -> None:
    """Parameters too; what is told another device stays there, and nothing runs."""
    with marid.default_device(DEVICE):
        assert torch.get_default_device().type == DEVICE
        made = [torch.ones(2), torch.tensor([1, 2]), torch.nn.Linear(2, 2).weight, torch.arange(3), torch.randn(2)]
        assert {one.device for one in made} == {ON}
        assert torch.zeros(2, device="cpu").device == CPU
    assert torch.get_default_device() == CPU
    assert marid.stats().ops_executed == 0


def test_document_002_tasks_have_defaults_of_their_own() -> None:
    """Their blocks begin and end in any order, and a task without one has PyTorch's default."""

    async def task(device: Any, dtype: torch.dtype, enter: int, leave: int, seen: list[Any]) -> None:
        for _ in range(enter):
            await asyncio.sleep(0)
        with marid.default_device(device), marid.default_dtype(dtype):
            for _ in range(leave):
                seen.append(_made())
                await asyncio.sleep(0)
            seen.append(_made())
        assert _made() == (CPU, torch.float32)

    async def plain(seen: list[Any]) -> None:
        for _ in range(12):
            seen.append(_made())
            await asyncio.sleep(0)

    async def main() -> None:
        first: list[Any] = []
        second: list[Any] = []
        third: list[Any] = []
        await asyncio.gather(
            task(DEVICE, torch.float64, 0, 4, first),
            task("cpu", torch.bfloat16, 2, 8, second),
            plain(third),
        )
        assert set(first) == {(ON, torch.float64)}
        assert set(second) == {(CPU, torch.bfloat16)}
        assert set(third) == {(CPU, torch.float32)}

    asyncio.run(main())


def test_tasks_that_are_begun_inside_have_the_default_until_the_block_ends() -> None:
    """Also those that outlive it, and while another block is open."""

    async def main() -> None:
        ended = asyncio.Event()

        async def child() -> list[Any]:
            inside = _made()
            await ended.wait()
            return [inside, _made()]

        with marid.default_device(DEVICE):
            begun = asyncio.create_task(child())
            await asyncio.sleep(0)
        with marid.default_device(f"{DEVICE}:1"):
            ended.set()
            assert await begun == [(ON, torch.float32), (CPU, torch.float32)]

    asyncio.run(main())


def test_threads_have_defaults_of_their_own() -> None:
    """A block is of the thread that enters it."""
    seen: dict[str, Any] = {}
    meet = threading.Barrier(2)

    def work(name: str, device: Any) -> None:
        seen[f"{name} before"] = _made()
        with marid.default_device(device):
            meet.wait(5)
            seen[name] = _made()
            meet.wait(5)
        seen[f"{name} after"] = _made()

    with marid.default_device(f"{DEVICE}:1"):
        threads = [threading.Thread(target=work, args=args) for args in (("a", DEVICE), ("b", "cpu"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _made()[0] == torch.device(DEVICE, 1)
    assert {name: device for name, (device, _) in seen.items()} == {
        **{f"{name} {when}": CPU for name in "ab" for when in ("before", "after")},
        "a": ON,
        "b": CPU,
    }


def test_the_innermost_block_counts() -> None:
    """Also among PyTorch's own, which have one mode in the stack at most."""
    with marid.default_device(DEVICE), marid.default_dtype(torch.float64):
        with torch.device("cpu"):
            assert _made() == (CPU, torch.float64)
            with marid.default_device(f"{DEVICE}:1"):
                assert _made()[0] == torch.device(DEVICE, 1)
            assert _made() == (CPU, torch.float64)
        assert _made() == (ON, torch.float64)
        with marid.default_device("cpu"), marid.default_dtype(torch.float16):
            assert _made() == (CPU, torch.float16)
        assert _made() == (ON, torch.float64)
        with marid.capture(2):
            assert _made()[0] == torch.device(DEVICE, 2)
            with marid.default_device("cpu"):
                assert _made()[0] == CPU
    with torch.device("meta"):
        with marid.default_device(DEVICE):
            assert _made()[0] == ON
        with marid.default_dtype(torch.float64):
            assert _made() == (torch.device("meta"), torch.float64)
        assert _made()[0] == torch.device("meta")


def test_blocks_end_in_any_order_with_pytorchs() -> None:
    """A mode is taken out from wherever it is."""
    ours, theirs = marid.default_device(DEVICE), torch.device("meta")
    ours.__enter__()
    theirs.__enter__()
    ours.__exit__(None, None, None)
    assert _made()[0] == theirs
    theirs.__exit__(None, None, None)
    torch.set_default_device("meta")
    with marid.default_device(DEVICE):
        assert _made()[0] == ON
    assert _made()[0] == theirs
    torch.set_default_device(None)
    with marid.default_device(DEVICE):
        torch.set_default_device("meta")
        assert _made()[0] == theirs
    assert _made()[0] == torch.get_default_device() == theirs
    torch.set_default_device(None)


def test_an_exception_ends_the_block() -> None:
    """And a decorated function has the default at each call."""

    @marid.default_device(DEVICE)
    def make() -> torch.Tensor:
        return torch.ones(1)

    assert make().device == make().device == ON
    with pytest.raises(ZeroDivisionError), marid.default_device(DEVICE), marid.default_dtype(torch.float64):
        1 / 0  # pyright: ignore
    assert _made() == (CPU, torch.float32)


def test_a_context_that_outlives_the_block_is_no_block() -> None:
    """Copied contexts see that it has ended."""
    with marid.default_device(DEVICE):
        context = contextvars.copy_context()
        assert context.run(_made)[0] == ON
    with marid.default_dtype(torch.float64):
        assert context.run(_made) == (CPU, torch.float32)


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(2),
    "zeros": lambda: torch.zeros(2),
    "eye": lambda: torch.eye(2),
    "rand": lambda: torch.rand(2),
    "randint": lambda: torch.randint(3, (2,)),
    "normal": lambda: torch.normal(0.0, 1.0, (2,)),
    "normal of tensors": lambda: torch.normal(torch.zeros(2, dtype=torch.float32), 1.0),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "scalar_tensor": lambda: torch.scalar_tensor(3),
    "hann_window": lambda: torch.hann_window(4),
    "fftfreq": lambda: torch.fft.fftfreq(4),
    "tensor of a float": lambda: torch.tensor(1.5),
    "tensor of an integer": lambda: torch.tensor(1),
    "tensor of booleans": lambda: torch.tensor([True]),
    "tensor of both": lambda: torch.tensor([[1, 2.0]]),
    "tensor of nothing": lambda: torch.tensor([[], []]),
    "tensor by name": lambda: torch.tensor(device="cpu", data=[1.0]),
    "tensor of an array": lambda: torch.tensor(np.ones(2, np.float32)),
    "tensor of a NumPy number": lambda: torch.tensor([np.float64(1)]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "asarray": lambda: torch.asarray(obj=1.0),
    "full": lambda: torch.full((2,), 1.0),
    "full of an integer": lambda: torch.full(size=(2,), fill_value=1),
    "full of a tensor": lambda: torch.full((2,), torch.tensor(1.0, dtype=torch.float32)),
    "arange": lambda: torch.arange(3, requires_grad=False),
    "arange of floats": lambda: torch.arange(0, end=3.0),
    "parameter": lambda: torch.nn.Linear(2, 2).weight,
    "buffer": lambda: torch.nn.BatchNorm1d(2).running_mean,  # pyright: ignore[reportReturnType]
    "told": lambda: torch.ones(2, dtype=torch.float32),
    "like": lambda: torch.ones_like(torch.ones(2, dtype=torch.float32)),
    "out": lambda: torch.rand(2, out=torch.empty(2, dtype=torch.float32)),
}
COMPLEX: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([1.0, 2j]),
    "full": lambda: torch.full((2,), 1j),
    "linspace": lambda: torch.linspace(0, 1j, 3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_those_under_pytorchs_own_default(dtype: torch.dtype) -> None:
    """``torch.set_default_dtype`` is the judge."""
    calls = {**CALLS, **({f"complex {name}": call for name, call in COMPLEX.items()} if dtype.itemsize > 2 else {})}
    torch.set_default_dtype(dtype)
    try:
        expected = {name: call().dtype for name, call in calls.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    with marid.default_dtype(dtype):
        assert {name: call().dtype for name, call in calls.items()} == expected
        with marid.default_device(DEVICE):
            lazy = {name: call() for name, call in calls.items() if name not in ("out", "normal of tensors")}
    assert {name: one.dtype for name, one in lazy.items()} == {name: expected[name] for name in lazy}


def test_values_are_not_rounded_on_the_way() -> None:
    """A number that has no ``float32`` is taken as it is."""
    with marid.default_dtype(torch.float64), marid.default_device(DEVICE):
        assert torch.tensor(0.1).item() == 0.1
        assert torch.full((1,), 0.1).tolist() == [0.1]


def test_what_is_no_default_is_an_error() -> None:
    """Before the block begins."""
    with pytest.raises(TypeError, match="floating-point"):
        marid.default_dtype(torch.int64)
    with pytest.raises(RuntimeError, match="nothing"):
        marid.default_device("nothing")
