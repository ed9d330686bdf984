"""Calls that run at once without their arguments being boxed: what is made of nothing, what draws, methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import marid
from tests.helpers import DEVICE

pytestmark = pytest.mark.usefixtures("either_way")

MADE: dict[str, Callable[..., Tensor]] = {
    "zeros": lambda **to: torch.zeros(3, 2, **to),
    "ones of whole numbers": lambda **to: torch.ones(3, dtype=torch.int32, **to),
    "full": lambda **to: torch.full((2, 3), 2.5, **to),
    "full of bools": lambda **to: torch.full((2,), True, **to),
    "scalar_tensor": lambda **to: torch.scalar_tensor(3, **to),
    "arange": lambda **to: torch.arange(5, **to),
    "arange of fractions": lambda **to: torch.arange(1, 2, 0.25, **to),
    "arange backwards": lambda **to: torch.arange(5, 1, -2, **to),
    "arange that never ends": lambda **to: torch.arange(1, 2, -1, **to),
    "linspace": lambda **to: torch.linspace(0, 1, 4, **to),
    "eye": lambda **to: torch.eye(3, **to),
    "eye of two sizes": lambda **to: torch.eye(2, 4, dtype=torch.float64, **to),
    "that require gradients": lambda **to: torch.ones(2, requires_grad=True, **to),
    "of a negative size": lambda **to: torch.zeros(-1, **to),
    "rand": lambda **to: torch.rand(5, **to),
    "rand of doubles": lambda **to: torch.rand(5, dtype=torch.float64, **to),
    "randn": lambda **to: torch.randn(3, 4, **to),
    "randn of many": lambda **to: torch.randn(300, **to),
    "randint": lambda **to: torch.randint(7, (5,), **to),
    "randint from": lambda **to: torch.randint(-3, 7, (5,), **to),
    "randperm": lambda **to: torch.randperm(9, **to),
    "bernoulli_": lambda **to: torch.zeros(9, **to).bernoulli_(0.3),
    "bernoulli": lambda **to: torch.full((9,), 0.3, **to).bernoulli(),
    "uniform_": lambda **to: torch.zeros(4, **to).uniform_(1, 2),
    "normal_": lambda **to: torch.zeros(4, **to).normal_(1, 2),
    "normal_ of many": lambda **to: torch.zeros(40, **to).normal_(1, 2),
    "exponential_": lambda **to: torch.zeros(4, **to).exponential_(),
    "multinomial": lambda **to: torch.arange(1.0, 6.0, **to).multinomial(3),
    "normal_ of a bad deviation": lambda **to: torch.zeros(4, **to).normal_(1, -2),
    "dropout": lambda **to: torch.dropout(torch.ones(20, **to), 0.5, True),
    "rand_like": lambda **to: torch.rand_like(torch.zeros(2, 5, **to)),
    "rand_like of doubles": lambda **to: torch.rand_like(torch.zeros(5, **to), dtype=torch.float64),
    "rand_like of turned memory": lambda **to: torch.rand_like(torch.zeros(2, 5, **to).t()),
    "randn_like": lambda **to: torch.randn_like(torch.zeros(3, 4, **to)),
    "randn_like in a format": lambda **to: torch.randn_like(
        torch.zeros(2, 3, 4, 4, **to), memory_format=torch.channels_last
    ),
    "randn_like of whole numbers": lambda **to: torch.randn_like(torch.zeros(3, dtype=torch.int64, **to)),
    "randint_like": lambda **to: torch.randint_like(torch.zeros(6, **to), 9),
    "randint_like from": lambda **to: torch.randint_like(torch.zeros(6, **to), -3, 9, dtype=torch.int32),
    "logspace": lambda **to: torch.logspace(0, 2, 5, **to),
    "tril_indices": lambda **to: torch.tril_indices(3, 4, 1, **to),
    "triu_indices": lambda **to: torch.triu_indices(3, 4, **to),
    "fftfreq": lambda **to: torch.fft.fftfreq(9, 0.5, **to),
    "fftfreq of doubles": lambda **to: torch.fft.fftfreq(8, dtype=torch.float64, **to),
    "fftfreq of whole numbers": lambda **to: torch.fft.fftfreq(8, dtype=torch.int64, **to),
    "rfftfreq": lambda **to: torch.fft.rfftfreq(9, **to),
    "hann_window": lambda **to: torch.hann_window(8, **to),
    "hamming_window": lambda **to: torch.hamming_window(8, False, **to),
    "randn of a generator": lambda **to: torch.randn(
        3, generator=torch.Generator(to.get("device", "cpu")).manual_seed(1), **to
    ),
    "bernoulli_ of a generator": lambda **to: torch.zeros(9, **to).bernoulli_(
        0.3, generator=torch.Generator(to.get("device", "cpu")).manual_seed(1)
    ),
}


def _outcome(of: Callable[..., Tensor], **to: str) -> Any:
    try:
        return of(**to)
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:GetGeneratorForPrivateuse1")
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_nothing_and_draws(name: str) -> None:
    """The same tensors, and the generator stands where the CPU's stands."""
    torch.manual_seed(5)
    wanted = [_outcome(MADE[name]) for _ in range(4)]
    behind = torch.rand(2)
    torch.manual_seed(5)
    for want in wanted:
        found = _outcome(MADE[name], device=DEVICE)
        if isinstance(want, str):
            assert found == want
            continue
        assert isinstance(found, marid.LazyTensor)
        assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype)
        assert found.requires_grad == want.requires_grad
        assert torch.equal(found.detach().cpu(), want.detach())
    assert torch.equal(torch.rand(2, device=DEVICE).cpu(), behind)


def test_the_default_dtype_is_followed() -> None:
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            made = [torch.zeros(2, device=DEVICE), torch.rand(2, device=DEVICE), torch.full((2,), 1.0, device=DEVICE)]
            made += [torch.fft.fftfreq(4, device=DEVICE), torch.fft.rfftfreq(4, device=DEVICE)]
            assert {one.dtype for one in made} == {dtype}
    finally:
        torch.set_default_dtype(torch.float32)


METHODS: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: lambda x, name=name: getattr(x, name)()
        for name in (
            *("abs", "all", "any", "clone", "cos", "erf", "exp", "floor", "isnan", "log", "max", "mean", "min", "relu"),
            *("reciprocal", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "sum", "t", "tanh"),
        )
    },
    "sum of a dimension": lambda x: x.sum(-1),
    "sum of dimensions": lambda x: x.sum((0, 1)),
    "sum of a keyword": lambda x: x.sum(dim=0, keepdim=True),
    "sum of a dtype": lambda x: x.sum(dtype=torch.float64),
    "sum of a bool": lambda x: x.sum(True),  # pyright: ignore[reportCallIssue, reportArgumentType]
    "sum out of range": lambda x: x.sum(3),
    "mean of a dimension": lambda x: x.mean(1),
    "mean of whole numbers": lambda x: x.long().mean(),
    "all of a dimension": lambda x: x.all(0),
    "any of a dimension": lambda x: x.any(-2),
    "max of a dimension": lambda x: x.max(1),
    "exp of something": lambda x: x.exp(1),  # pyright: ignore[reportCallIssue]
    "clone in a format": lambda x: x[None, None].clone(memory_format=torch.channels_last),
    "histc": lambda x: x.histc(4, -1, 1),
    "histc of whole numbers": lambda x: (x * 9).int().float().histc(4),
    "to another dtype": lambda x: x.to(torch.float64),
    "to whole numbers": lambda x: x.long(),
    "to a format": lambda x: x[None, None].to(memory_format=torch.channels_last),
    "to the same": lambda x: x.to(x.dtype, copy=True),
    "to another dtype, not blocking": lambda x: x.to(x.device, torch.float16, non_blocking=True),
    "equal": lambda x: torch.equal(x, x.clone()),
    "equal to other values": lambda x: torch.equal(x, x + 1),
    "equal to another shape": lambda x: torch.equal(x, x[0]),
    "equal to whole numbers": lambda x: torch.equal(x, x.long()),
    "equal to a conjugate": lambda x: torch.equal(torch.complex(x, x).conj(), torch.complex(x, -x)),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "allclose to nan": lambda x: torch.allclose(x / 0 * 0, x / 0 * 0),
    "allclose to nan as equal": lambda x: torch.allclose(x / 0 * 0, x / 0 * 0, equal_nan=True),
    "allclose to whole numbers": lambda x: torch.allclose(x, x.long()),
    "t of three dimensions": lambda x: x[None].t(),
    "by the function": lambda x: torch.Tensor.exp(x),
}


def _called(of: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return of(x)
    except Exception as error:  # an error is an outcome to compare
        return type(error), str(error).split("\n")[0]


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "with_gradients"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_return_what_pytorchs_return(name: str, grad: bool) -> None:
    source = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", DEVICE):
        x = source.to(device).requires_grad_(grad)
        made = _called(METHODS[name], x)
        if isinstance(made, Tensor):
            assert device == "cpu" or isinstance(made, marid.LazyTensor)
            seen = [made.shape, made.stride(), made.dtype, made.requires_grad, made.detach().cpu()]
            if made.requires_grad:
                (gradient,) = torch.autograd.grad(made.sum(), x)
                seen.append(gradient.cpu())
            found.append(seen)
        elif isinstance(made, tuple) and isinstance(made[0], Tensor):
            found.append([one.detach().cpu() for one in made])
        else:
            found.append([made])
    for expected, one in zip(*found, strict=True):
        same = (
            torch.allclose(one, expected, rtol=0, atol=0, equal_nan=True)
            if isinstance(one, Tensor)
            else one == expected
        )
        assert same


def test_function_modes_see_the_methods() -> None:
    class Functions(TorchFunctionMode):
        seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    own = torch.ones(2, 3, device=DEVICE)
    with Functions() as mode:
        own.view(6).unsqueeze(0).transpose(0, 1).exp().sum(0)
    assert mode.seen == ["view", "unsqueeze", "transpose", "exp", "sum"]


@pytest.mark.parametrize("name", ["exp", "sum", "unsqueeze"])
def test_methods_that_somebody_replaces_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = torch.ones(2, 3, device=DEVICE), []
    usual = getattr(torch.Tensor, name)

    def replaced(self: Tensor, *args: Any) -> Tensor:
        seen.append(name)
        return usual(self, *args)

    getattr(own, name)(*([0] if name == "unsqueeze" else []))
    monkeypatch.setattr(torch.Tensor, name, replaced)
    assert isinstance(getattr(own, name)(*([0] if name == "unsqueeze" else [])), marid.LazyTensor)
    assert seen == [name]


def test_methods_say_what_pytorchs_say() -> None:
    assert marid.LazyTensor.exp.__doc__ == torch.Tensor.exp.__doc__


@pytest.mark.parametrize("of", [torch.sigmoid, torch.tanh, torch.exp, torch.relu, lambda x: torch.softmax(x, -1)])
def test_results_that_autograd_saves(of: Callable[[Tensor], Tensor]) -> None:
    """They are the device's tensors to Python, and know when their result was written to."""
    for _ in range(3):
        x = torch.ones(2, 3, device=DEVICE, requires_grad=True)
        y = of(x)
        saved = y.grad_fn._saved_result  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        assert isinstance(saved, marid.LazyTensor)
        assert torch.equal(saved, y)
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64])
def test_to_the_device_and_back(dtype: torch.dtype | None, blocking: bool) -> None:
    source = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).t()
    for host in (source, source.contiguous(), torch.nn.Parameter(source)):
        own = host.to(DEVICE, dtype, non_blocking=not blocking)
        back = own.to("cpu", dtype, non_blocking=not blocking)
        expected = host.to(dtype) if dtype else host
        assert isinstance(own, marid.LazyTensor)
        assert type(back) is Tensor
        assert (own.stride(), own.requires_grad) == (expected.stride(), expected.requires_grad)
        assert torch.equal(back, expected)
        back.data.zero_()  # its memory is its own
        assert torch.equal(own.cpu(), expected)


def test_what_another_thread_writes_to_the_host_is_not_seen() -> None:
    host = torch.ones(3)
    own = host.to(DEVICE, non_blocking=True)
    host.zero_()
    assert own.tolist() == [1, 1, 1]


OUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Any]]] = {
    "of its shape": (lambda x: torch.empty_like(x), lambda x, out: torch.add(x, 1, out=out)),
    "laid out otherwise": (lambda x: x.new_empty(4, 3).t(), lambda x, out: torch.mul(x, x, out=out)),
    "of another shape": (lambda x: x.new_empty(2), lambda x, out: torch.mul(x, 2, out=out)),
    "empty": (lambda x: x.new_empty(0), lambda x, out: torch.exp(x, out=out)),
    "of another dtype": (lambda x: x.new_empty(3, 4, dtype=torch.float64), lambda x, out: torch.div(x, 3, out=out)),
    "of a dtype that loses": (lambda x: x.new_zeros(3, 4, dtype=torch.int64), lambda x, out: torch.div(x, 3, out=out)),
    "itself": (lambda x: x, lambda x, out: torch.neg(x, out=out)),
    "overlapping": (lambda x: x.flatten()[1:], lambda x, out: torch.exp(x.flatten()[:-1], out=out)),
    "a view": (lambda x: x.new_zeros(5, 4)[1:4], lambda x, out: torch.sub(x, 1, out=out)),
    "of a product": (lambda x: x.new_empty(3, 3), lambda x, out: torch.mm(x, x.t(), out=out)),
    "two": (
        lambda x: x.new_empty(3),
        lambda x, out: torch.max(x, 1, out=(out, torch.empty(3, dtype=torch.int64, device=x.device)))[1],
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OUTS)
def test_results_go_where_they_are_wanted(name: str) -> None:
    make, of = OUTS[name]
    seen: list[list[Any]] = []
    for device in ("cpu", DEVICE):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device)
        out, turns = make(x), []
        for _ in range(3):
            returned = _called(functools.partial(of, out=out), x)
            turns.append(returned[1].split(". This")[0] if isinstance(returned, tuple) else returned.cpu().clone())
            turns += [out.cpu().clone(), x.cpu().clone(), out.shape, out.stride(), out._version]
        seen.append(turns)
    for expected, found in zip(*seen, strict=True):
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected


def test_results_in_place_of_what_requires_gradients() -> None:
    own = torch.ones(3, device=DEVICE, requires_grad=True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.exp(own, out=torch.empty(3, device=DEVICE))
