"""Operators that users define with ``torch.library``, also after the first use of the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import marid
from marid.errors import MaterializationError
from marid.execute.device_operators import HostOperator
from marid.graph.dispatch_state import concretely
from marid.graph.program import operation_of
from tests.helpers import DEVICE

_names = (f"marid_user_operators_{number}" for number in itertools.count())


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    torch.ones(1, device=DEVICE)
    made = torch.library.Library(next(_names), "DEF")
    yield made
    made._destroy()


def _operator(library: torch.library.Library, name: str = "f") -> Any:
    return getattr(getattr(torch.ops, library.ns), name)


@pytest.mark.parametrize("key", ["", "CompositeImplicitAutograd"])
def test_one_that_is_composed_of_others(library: torch.library.Library, key: str) -> None:
    """Its parts have gradients and are cast by autocast, whatever it was named with."""
    library.define("f(Tensor x) -> Tensor")
    library.define("f.twice(Tensor x, int times) -> Tensor")
    library.impl("f", lambda x: (x @ x.T).sin(), key)
    library.impl(f"{library.ns}::f.twice", lambda x, times: (x * times).cos(), key)

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        for operator, args in ((_operator(library).default, ()), (_operator(library).twice, (3,))):
            x = torch.linspace(-1, 1, 6).reshape(2, 3).to(device).requires_grad_()
            for _ in range(12):  # at once, too
                operator(x, *args).sum().backward()
                assert x.grad is not None
                found.append(x.grad.sum().item())
            with torch.autocast(device, torch.bfloat16):
                found.append(operator(x, *args).dtype)
            found.append(torch.func.vmap(lambda row, of=operator, more=args: of(row[None], *more))(x).tolist())
        return found

    assert run(DEVICE) == run("cpu")


def test_one_without_a_derivative_whose_kernel_is_made_of_others(library: torch.library.Library) -> None:
    """Autograd goes through what the kernel calls."""
    library.define("f(Tensor x, Tensor[] more) -> Tensor")
    library.define("double_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("f", lambda x, more: (x * x).sin() * sum(more), "CompositeExplicitAutograd")
    library.impl("double_", lambda x: x.mul_(2), "CompositeExplicitAutograd")

    def run(device: str) -> list[Any]:
        x, y = (torch.linspace(0, 1, 3).to(device).requires_grad_() for _ in range(2))
        for _ in range(12):
            z = _operator(library)(x * 1, [y, y])
            _operator(library, "double_")(z).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        (second,) = torch.autograd.grad(_operator(library)(x, [y]).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="leaf"):
            _operator(library, "double_")(x)
        with torch.no_grad():
            plain = _operator(library)(x, [y])
        found = [x.grad.tolist(), y.grad.tolist(), torch.autograd.grad(second.sum(), x)[0].tolist()]
        return [*found, plain.tolist(), plain.requires_grad, _operator(library)(x.detach(), []).tolist()]

    assert run(DEVICE) == run("cpu")


def test_one_with_a_kernel_for_the_cpu(library: torch.library.Library) -> None:
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x.clone().fill_(7), "CPU")
    for _ in range(12):
        assert _operator(library)(torch.ones(2, device=DEVICE)).tolist() == [7.0, 7.0]


def test_one_that_draws_and_says_no_shapes() -> None:
    name = f"{next(_names)}::noisy"

    @torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, device=x.device)

    def run(device: str) -> list[list[float]]:
        torch.manual_seed(0)
        return [noisy(torch.zeros(2, device=device)).tolist() for _ in range(4)]

    assert run(DEVICE) == run("cpu")


def test_their_kernels_run_when_they_are_called_only(either_way: None) -> None:
    """Even at sizes that are new: they may count, or draw without saying so."""
    name, calls = f"{next(_names)}::counting", []

    @torch.library.custom_op(name, mutates_args=("into",))
    def counting(x: Tensor, into: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        into.add_(1)
        return x + torch.rand(x.shape)

    @counting.register_fake
    def _(x: Tensor, into: Tensor) -> Tensor:
        return torch.empty_like(x)

    def run(device: str) -> list[Any]:
        calls.clear()
        torch.manual_seed(0)
        into = torch.zeros(2, device=device)
        found = [counting(torch.zeros(size, device=device), into).tolist() for size in (2, 2, 3, 2, 3)]
        return [*found, into.tolist(), *calls]

    assert run(DEVICE) == run("cpu")


def test_one_that_a_compiled_function_calls_first() -> None:
    name = f"{next(_names)}::double"

    @torch.library.custom_op(name, mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    @double.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    function = marid.compile(lambda x: double(x + 1) * 3)
    x = torch.arange(3.0)
    for turn in range(6):
        assert function((x + turn).to(DEVICE)).tolist() == ((x + turn + 1) * 6).tolist()
    assert function.stats().replays > 0
    with marid.no_sync():
        y = double(torch.ones(4, device=DEVICE))
    assert y.tolist() == [2.0] * 4


def _doubled_by_vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * 2)(x)


def _gradient_of_squares(x: Tensor) -> Tensor:
    return torch.func.grad(lambda point: (point * point).sum())(x)


def _doubled_with_one_thread(x: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return x * 2
    finally:
        torch.set_num_threads(threads)


def _doubled_on_the_device(x: Tensor) -> Tensor:
    return torch.zeros(3, device=DEVICE).add_(2) * x.to(DEVICE)


_DOUBLING = [_doubled_by_vmap, _gradient_of_squares, _doubled_with_one_thread, _doubled_on_the_device]


@pytest.mark.parametrize("kernel", _DOUBLING)
@pytest.mark.parametrize("compiled", [False, True], ids=["called", "replayed"])
def test_their_kernels_may_call_anything(
    library: torch.library.Library, kernel: Callable[[Tensor], Tensor], compiled: bool, either_way: None
) -> None:
    """Transforms, settings, and the device itself, in the middle of a program."""
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", kernel, "CPU")
    library.impl("f", torch.empty_like, "Meta")
    operator = _operator(library)

    def run(given: Tensor) -> Tensor:
        return operator(operator(given + 1) + 1).cos()

    called = marid.compile(run) if compiled else run
    for turn in range(4):
        given = torch.arange(3.0) + turn
        assert torch.equal(called(given.to(DEVICE)).cpu(), (((given + 1) * 2 + 1) * 2).cos())


def test_their_kernels_may_call_anything_for_a_device_that_has_none(library: torch.library.Library) -> None:
    """Where the host does the work of another device, as of CUDA, which the CPU plays here."""
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", _doubled_by_vmap, "CPU")
    operation = operation_of(_operator(library).default)
    with concretely():
        made = HostOperator(operation, torch.device("cpu")).call(torch.arange(3.0))
    assert torch.equal(made, torch.arange(3.0) * 2)


@pytest.mark.parametrize("returned", ["Tensor", "Tensor[]", "(Tensor, Tensor)"])
def test_their_kernels_may_return_tensors_of_the_device(
    library: torch.library.Library, returned: str, either_way: None
) -> None:
    library.define(f"f(Tensor x) -> {returned}")
    kept = torch.tensor(3.0, device=DEVICE)
    kernels = {"Tensor": lambda x: kept * 2, "Tensor[]": lambda x: [kept * 2], "(Tensor, Tensor)": lambda x: (kept, x)}
    library.impl("f", kernels[returned], "CPU")
    for _ in range(3):
        found = _operator(library)(torch.ones(2, device=DEVICE) + 1)
        first = found if returned == "Tensor" else found[0]
        assert torch.equal(first + kept, torch.tensor(6.0 if returned[0] == "(" else 9.0, device=DEVICE))


def test_a_kernel_that_reads_its_own_result(library: torch.library.Library) -> None:
    """It is told so, where it would wait for itself."""
    written = torch.zeros(3, device=DEVICE)
    library.define("f(Tensor(a!) x) -> ()")
    library.impl("f", lambda x: [x.copy_(written + 1), None][1], "CPU")
    library.impl("f", lambda x: None, "Meta")
    _operator(library)(written)
    with pytest.raises(MaterializationError, match=r"reads a tensor that marid_user_operators_\d+::f has yet to"):
        written.tolist()


def test_what_lies_between_their_calls_is_freed(
    library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x + 1, "CPU")
    library.impl("f", torch.empty_like, "Meta")
    x = torch.ones(1 << 20, device=DEVICE)
    x.sum().item()
    marid.reset_stats()
    for _ in range(4):
        for _ in range(8):
            x = x * 1.5 - 0.5
        x = _operator(library)(x)
    x.sum().item()
    assert marid.stats().peak_memory < 8 * x.nbytes


@pytest.mark.parametrize("types", [None, "cpu"], ids=["of any device", "of the CPU"])
def test_their_kernels_find_autocast_on(types: str | None, either_way: None) -> None:
    """As on the CPU, and are called once."""
    called: list[str] = []

    @torch.library.custom_op(f"{next(_names)}::f", mutates_args=(), device_types=types)
    def operator(x: Tensor) -> Tensor:
        called.append(x.device.type)
        with torch.autocast("cpu", enabled=False):
            exact = x @ x
        return (x @ x).float() + exact

    operator.register_fake(torch.empty_like)
    given = torch.linspace(-1, 1, 9).reshape(3, 3)
    for number in range(1, 4):
        with torch.autocast("cpu", torch.bfloat16):
            expected = operator(given)
        with torch.autocast(DEVICE, torch.bfloat16):
            found = operator(given.to(DEVICE))
        assert torch.equal(found.cpu(), expected)
        assert called == ["cpu"] * 2 * number
    assert torch.equal(operator(given.to(DEVICE)).cpu(), operator(given))


def test_their_kernels_write_to_tensors_of_inference_mode(either_way: None) -> None:
    @torch.library.custom_op(f"{next(_names)}::f", mutates_args=("out",))
    def operator(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    operator.register_fake(lambda x, out: None)
    with torch.inference_mode():
        x, out = torch.ones(3).to(DEVICE), torch.zeros(3).to(DEVICE)
        operator(x, out)
    assert out.tolist() == [1.0] * 3


def test_calls_run_before_a_kernel_takes_the_place_of_another(library: torch.library.Library, either_way: None) -> None:
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x * 2, "CPU")
    library.impl("f", torch.empty_like, "Meta")
    given = torch.ones(2, device=DEVICE)
    before = _operator(library)(given)
    with torch.library._scoped_library(library.ns, "IMPL") as other:
        other.impl("f", lambda x: x * 5, "CPU", allow_override=True)
        inside = _operator(library)(given)
    assert [before.tolist(), inside.tolist(), _operator(library)(given).tolist()] == [[2.0] * 2, [5.0] * 2, [2.0] * 2]


def test_calls_run_before_an_operator_is_defined_anew(either_way: None) -> None:
    """As a cell of a notebook that is run again does."""
    name = next(_names)
    given, results = torch.ones(3, device=DEVICE), []
    for factor in (2, 3):
        defined = torch.library.custom_op(
            f"{name}::f", lambda x, factor=factor: x * factor, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        defined.register_fake(torch.empty_like)
        results.append(defined(given))
    assert [result.tolist() for result in results] == [[2.0] * 3, [3.0] * 3]


def test_calls_run_before_their_library_ends(either_way: None) -> None:
    given, written = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    with torch.library._scoped_library(next(_names), "DEF") as library:
        library.define("f(Tensor x, Tensor(a!) out) -> ()")
        library.impl("f", lambda x, out: [out.copy_(x + 1), None][1], "CompositeExplicitAutograd")
        _operator(library)(given, written)
    assert written.tolist() == [2.0] * 3


@pytest.mark.mispredicts
def test_one_whose_meta_kernel_is_wrong(either_way: None) -> None:
    """Values are right, and from the second call on strides, too."""
    name = f"{next(_names)}::turned"

    @torch.library.custom_op(name, mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    @turned.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def run(device: str) -> list[Any]:
        x = torch.arange(6.0).view(2, 3).to(device)
        found: list[Any] = [turned(x).tolist()]
        for one in (x, x, x.repeat(2, 2)):
            made = turned(one)
            found += [made.stride(), made.tolist()]
        return found

    assert run(DEVICE) == run("cpu")


def test_observers_of_channels_that_resize_their_state() -> None:
    """In a loop that reads, so that it runs at once."""
    from torch.ao.quantization import default_fused_per_channel_wt_fake_quant as observer

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        for _ in range(14):
            one = observer().to(device)
            seen = one(torch.linspace(-1, 1, 12).view(3, 4).to(device))
            state: Callable[[str], Any] = one.state_dict().__getitem__
            found += [seen.sum().item(), tuple(state("scale").shape), state("zero_point").tolist()]
        return found

    assert run(DEVICE) == run("cpu")
