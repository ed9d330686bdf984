"""Kernels for small tensors (``native/small/``) give what ATen gives: bits, strides, shared memory, and errors."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from marid.errors import MaterializationError
from marid.native import module
from tests.helpers import DEVICE

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("at_once"),
]

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.1, -3.5, 1e-40, 1e38, -1e38, math.inf, -math.inf, math.nan, 2.0**-149, 7.0)
NUMBERS = (2, -1, 0.5, 1e-8, 0.1, 0, -0.0, math.inf, math.nan, 1e300, 2**60 + 1, 2**53, True, 1e-46)
EXPONENTS = (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, 2.0, True)

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")},
    **{name: getattr(torch, name) for name in ("bitwise_and", "bitwise_or", "logical_and", "logical_or")},
    "add with a factor": lambda x, y: torch.add(x, y, alpha=3),
    "add with a fraction": lambda x, y: torch.add(x, y, alpha=-0.1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp from the end": lambda x, y: torch.lerp(x, y, 0.7),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.1),
    "addcmul of three": lambda x, y: torch.addcmul(x, y, x + y, value=-3),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=0.7),
    "sub with a factor of one": lambda x, y: torch.sub(x, y, alpha=1.0),
}
WITH_NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne")},
    "number - x": lambda x, number: number - x,
    "number * x": lambda x, number: number * x,
    "rsub": torch.rsub,
    "aten.mul.Scalar": torch.ops.aten.mul.Scalar,
    "aten.div.Scalar": torch.ops.aten.div.Scalar,
    "aten.add.Scalar": torch.ops.aten.add.Scalar,
    "aten.sub.Scalar": torch.ops.aten.sub.Scalar,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "sqrt", "rsqrt", "reciprocal", "clone", "detach", "t")},
    "contiguous copy": lambda x: x.clone(memory_format=torch.contiguous_format),
    **{f"to the power of {number}": lambda x, number=number: x**number for number in EXPONENTS},
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(Tensor, f"{name}_") for name in ("add", "sub", "mul", "div")},
    "add with a factor": lambda x, y: x.add_(y, alpha=-2),
    "add with a fraction": lambda x, y: x.add_(y, alpha=0.3),
    "lerp": lambda x, y: x.lerp_(y, 0.1),
    "lerp from the end": lambda x, y: x.lerp_(y, 0.9),
    "addcmul": lambda x, y: x.addcmul_(y, y, value=0.1),
    "addcdiv": lambda x, y: x.addcdiv_(y, y, value=-0.7),
    "addcmul of itself": lambda x, y: x.addcmul_(x, y, value=0.1),
    "copy": lambda x, y: x.copy_(y),
}
# Of lists of the same length: by a number, by one number each, with other lists, in place and not.
LISTS: dict[str, Callable[..., Any]] = {
    **{
        f"{name} number": lambda x, _y, _z, n, name=name: _each(name)(x, n[0])
        for name in ("add_", "sub_", "mul_", "div_")
    },
    **{f"{name} number": lambda x, _y, _z, n, name=name: _each(name)(x, n[0]) for name in ("add", "mul", "div")},
    **{
        f"{name} numbers": lambda x, _y, _z, n, name=name: _each(name)(x, n) for name in ("add_", "mul_", "div_", "add")
    },
    **{f"{name} list": lambda x, y, _z, _n, name=name: _each(name)(x, y) for name in ("add_", "mul_", "div_", "sub_")},
    **{f"{name} list": lambda x, y, _z, _n, name=name: _each(name)(x, y) for name in ("add", "mul", "div", "maximum")},
    "add_ scaled": lambda x, y, _z, n: _each("add_")(x, y, alpha=n[0]),
    "add scaled": lambda x, y, _z, n: _each("add")(x, y, alpha=n[0]),
    "lerp_": lambda x, y, _z, n: _each("lerp_")(x, y, n[0]),
    "addcmul_": lambda x, y, z, n: _each("addcmul_")(x, y, z, n[0]),
    "addcdiv_": lambda x, y, z, n: _each("addcdiv_")(x, y, z, n[0]),
    "addcmul_ numbers": lambda x, y, z, n: _each("addcmul_")(x, y, z, n),
    "addcdiv_ numbers": lambda x, y, z, n: _each("addcdiv_")(x, y, z, n),
    "mul_ tensor": lambda x, _y, _z, _n: _each("mul_")(x, x[0].sum()),
    "mul_ tensor of more than one": lambda x, y, _z, _n: _each("mul_")(x, y[0]),
    "neg": lambda x, _y, _z, _n: _each("neg")(x),
    "sqrt": lambda x, _y, _z, _n: _each("sqrt")(x),
    "norm": lambda x, _y, _z, _n: _each("norm")(x, 2),
    "copy_": lambda x, y, _z, _n: _each("copy_")(x, y),
    "zero_": lambda x, _y, _z, _n: _each("zero_")(x),
    "cat": lambda x, y, _z, _n: torch.cat([*x, *y], dim=-1),
    "stack": lambda x, y, _z, _n: torch.stack([*x, *y], dim=-1),
}
SELECTIONS: dict[str, Callable[[Tensor, Any, bool], Any]] = {
    name: getattr(torch, name) for name in ("argmax", "argmin", "max", "min")
}
IN_PLACE_WITH_NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    name: getattr(Tensor, f"{name}_") for name in ("add", "sub", "mul", "div")
}


def _each(name: str) -> Callable[..., Any]:
    return getattr(torch, f"_foreach_{name}")


def _outcome(function: Callable[..., Tensor], *args: Any) -> Tensor | str:
    try:
        return function(*args)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _compare(found: Tensor | str, expected: Tensor | str, what: object) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, what
        return
    assert (found.dtype, found.shape, found.stride(), found.storage_offset()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
        expected.storage_offset(),
    ), what
    if any(size < 0 for size in expected.shape):  # PyTorch lets `expand` make such a one
        return
    on_host = found.detach().cpu()
    same = on_host == expected.detach()
    if expected.is_floating_point():
        same = (same & (on_host.signbit() == expected.signbit())) | (on_host.isnan() & expected.isnan())
    assert bool(same.all()), (what, on_host, expected)


def _check(function: Callable[..., Tensor], on_cpu: tuple[Any, ...], on_device: tuple[Any, ...], what: object) -> None:
    """That a function gives the same on both, whether that is a tensor or an error."""
    _compare(_outcome(function, *on_device), _outcome(function, *on_cpu), what)


class _Both:
    """The same random tensors on the CPU and on the device: of two types, of any strides, with special values."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def sizes(self) -> list[int]:
        return [self.random.choice((1, 1, 2, 3, 5, 17)) for _ in range(self.random.randrange(5))]

    def tensors(self, sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Views of the same kind of the same numbers, of these sizes."""
        draw = self.random
        order = list(range(len(sizes)))
        if draw.random() < 0.2:
            draw.shuffle(order)
        steps = [draw.choice((1, 1, 1, 1, 2)) for _ in sizes]
        more = [draw.choice((0, 0, 0, 0, 3)) for _ in sizes]
        expanded = [draw.random() < 0.1 for _ in sizes]
        whole = [1 if expanded[i] else sizes[i] * steps[i] + more[i] for i in order]
        numbers = SPECIAL if dtype.is_floating_point else (0, 1, 2, -3, 2**62) if dtype == torch.int64 else (0, 1, 3)
        values = torch.tensor([draw.choice(numbers) for _ in range(math.prod(whole))], dtype=dtype).reshape(whole)

        def view(x: Tensor) -> Tensor:
            x = x.permute([order.index(i) for i in range(len(order))])
            for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
                if not expanded[i] and x.shape[i] != size:
                    x = x[(slice(None),) * i + (slice(0, size * step, step),)]
            return x.expand(sizes)

        on_cpu, on_device = view(values), view(values.to(DEVICE))
        _compare(on_device, on_cpu, "the arguments")
        return on_cpu, on_device

    def other_sizes(self, sizes: list[int]) -> list[int]:
        """Sizes that most often broadcast with these."""
        draw = self.random
        kept = sizes[draw.randrange(len(sizes) + 1) :] if draw.random() < 0.3 else sizes
        return [1 if draw.random() < 0.15 else size for size in kept] if draw.random() < 0.9 else self.sizes()


@pytest.mark.parametrize("part", range(4))
def test_pointwise(part: int) -> None:
    before = module.performed_small()
    for seed in range(part * 400, (part + 1) * 400):
        both = _Both(seed)
        draw, sizes = both.random, both.sizes()
        dtype = draw.choice(
            (torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.int32)
        )
        left = both.tensors(sizes, dtype)
        right = both.tensors(both.other_sizes(sizes), dtype if draw.random() < 0.9 else torch.float64)
        number = draw.choice(NUMBERS)
        for name, function in BINARY.items():
            _check(function, (left[0], right[0]), (left[1], right[1]), (seed, name))
        for name, function in WITH_NUMBERS.items():
            _check(function, (left[0], number), (left[1], number), (seed, name, number))
        for name, function in UNARY.items():
            _check(function, left[:1], left[1:], (seed, name))
    assert module.performed_small() - before > 7_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_numbers(dtype: torch.dtype) -> None:
    """Of all magnitudes, as many as ATen's vectorised loops and their rests need."""
    before = module.performed_small()
    for seed, count in enumerate((1, 3, 8, 17, 1000, 20_000)):
        torch.manual_seed(seed)
        x, y = (torch.randn(count, dtype=dtype) * torch.randn(count, dtype=dtype).mul(6).exp() for _ in range(2))
        on_device = x.to(DEVICE), y.to(DEVICE)
        for name, function in BINARY.items():
            _check(function, (x, y), on_device, (count, name))
        for name, function in WITH_NUMBERS.items():
            _check(function, (x, 3.3), (on_device[0], 3.3), (count, name))
        for name, function in UNARY.items():
            _check(function, (x,), on_device[:1], (count, name))
    assert module.performed_small() - before > 6 * 30


@pytest.mark.parametrize("part", range(2))
def test_in_place(part: int) -> None:
    before = module.performed_small()
    for seed in range(part * 300, (part + 1) * 300):
        both = _Both(seed)
        draw, sizes = both.random, both.sizes()
        dtype = draw.choice((torch.float32, torch.float64, torch.int64))
        other_sizes = both.other_sizes(sizes)
        for name, function in IN_PLACE.items():
            left, right = both.tensors(sizes, dtype), both.tensors(other_sizes, dtype)
            _check(function, (left[0], right[0]), (left[1], right[1]), (seed, name))
            _compare(left[1], left[0], (seed, name))
        for name, function in IN_PLACE_WITH_NUMBERS.items():
            left, number = both.tensors(sizes, dtype), draw.choice(NUMBERS)
            _check(function, (left[0], number), (left[1], number), (seed, name, number))
            _compare(left[1], left[0], (seed, name, number))
    assert module.performed_small() - before > 1_000


@pytest.mark.parametrize("part", range(2))
def test_selections(part: int) -> None:
    """Equal numbers, zeros of both signs and NaN, in rows of all lengths and along all dimensions."""
    before = module.performed_small()
    for seed in range(part * 300, (part + 1) * 300):
        both = _Both(seed)
        draw, sizes = both.random, both.sizes()
        if sizes and draw.random() < 0.6:
            sizes[draw.randrange(len(sizes))] = draw.choice((31, 32, 33, 64, 100, 257))
        dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16))
        on_cpu, on_device = both.tensors(sizes, dtype)
        for name, select in SELECTIONS.items():
            dims = [*range(-len(sizes) - 1, len(sizes) + 1), *([None] if name.startswith("arg") else [])]
            dim, keep = draw.choice(dims), draw.random() < 0.5
            found, expected = (_outcome(select, of, dim, keep) for of in (on_device, on_cpu))
            if isinstance(expected, tuple) and isinstance(found, tuple):
                for one, other in zip(found, expected, strict=True):
                    _compare(one, other, (seed, name, dim, keep))
            else:
                _compare(found, expected, (seed, name, dim, keep))
    assert module.performed_small() - before > 400


@pytest.mark.parametrize("part", range(2))
def test_rows(part: int) -> None:
    """Indices of one dimension and of several, of any shape and strides, that count from the end too."""
    before = module.performed_small()
    for seed in range(part * 300, (part + 1) * 300):
        both = _Both(seed)
        draw, sizes, shape = both.random, [*both.sizes(), 3][:4], both.sizes()[:3]
        dtype = draw.choice((torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64))
        x = torch.randn(sizes).mul(3).to(dtype)
        indices = [torch.tensor([draw.randrange(-n, n) for _ in range(math.prod(shape))]).reshape(shape) for n in sizes]
        indices = indices[: draw.randint(1, len(sizes))]
        order = draw.sample(range(len(shape)), len(shape))
        turned = draw.random() < 0.3

        def index(x: Tensor, *indices: Tensor, turned=turned, order=order) -> Tensor:
            return x[tuple(i.permute(order) for i in indices) if turned else indices]

        def select(x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(0, (index % x.shape[0]).flatten())

        def embed(x: Tensor, index: Tensor) -> Tensor:
            return torch.nn.functional.embedding(index % x.shape[0], x.flatten(1))

        on_device = [tensor.to(DEVICE) for tensor in (x, *indices)]
        _check(index, (x, *indices), tuple(on_device), (seed, "index"))
        _check(select, (x, indices[0]), tuple(on_device[:2]), (seed, "index_select"))
        if len(sizes) > 1:
            _check(embed, (x, indices[0]), tuple(on_device[:2]), (seed, "embedding"))
    assert module.performed_small() - before > 300


def test_rows_by_threads() -> None:
    """Many rows, and few that are long."""
    for sizes, count in (((700, 100), 900), ((3, 300_000), 5), ((50_000,), 70_000), ((3, 50_000, 2), 4)):
        x, index = torch.randn(sizes), torch.randint(0, sizes[0], (count,))
        _compare(x.to(DEVICE)[index.to(DEVICE)], x[index], sizes)


@pytest.mark.parametrize("outside", [3, -4, 2**63 - 1, -(2**63)])
def test_rows_that_do_not_exist(outside: int) -> None:
    x, index = torch.randn(3, 2).to(DEVICE), torch.tensor([0, outside]).to(DEVICE)
    for find in (lambda: x[index], lambda: x.index_select(0, index), lambda: torch.nn.functional.embedding(index, x)):
        with pytest.raises((IndexError, MaterializationError), match="index"):
            find().cpu()


@pytest.mark.parametrize("part", range(2))
def test_lists(part: int) -> None:
    before = module.performed_small()
    for seed in range(part * 60, (part + 1) * 60):
        both = _Both(seed)
        draw, sizes = both.random, both.sizes()
        dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.int64))
        alike, count = draw.random() < 0.5, draw.randrange(4)
        numbers = [draw.choice(NUMBERS) for _ in range(count if draw.random() < 0.95 else 3)] or [0.5]
        for name, function in LISTS.items():
            lists: list[list[tuple[Tensor, Tensor]]] = []
            for _ in range(3):
                of = count if draw.random() < 0.97 else 2
                shapes = [sizes if alike else both.other_sizes(sizes) for _ in range(of)]
                lists.append([both.tensors(shape, dtype) for shape in shapes])
            on_cpu, on_device = ([[pair[on] for pair in each] for each in lists] for on in (0, 1))
            versions = [x._version for x in on_device[0]]
            expected, found = (_outcome(function, *given, numbers) for given in (on_cpu, on_device))
            if isinstance(expected, str) or isinstance(found, str) or expected is None:
                assert found == expected, (seed, name)
            else:
                for one, other in zip(
                    [found] if isinstance(found, Tensor) else found,
                    [expected] if isinstance(expected, Tensor) else expected,
                    strict=True,
                ):
                    _compare(one, other, (seed, name))
            for x, y in zip(on_device[0], on_cpu[0], strict=True):
                _compare(x, y, (seed, name, "in place"))
            if found is None:
                assert all(x._version > was for x, was in zip(on_device[0], versions, strict=True)), (seed, name)
    assert module.performed_small() - before > 800


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=str)
@pytest.mark.parametrize("count", [1, 5, 12])
def test_optimizers(make: Any, count: int) -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(7, size + 1).to(device).requires_grad_() for size in range(count)]
        optimizer = make(params, lr=0.01, weight_decay=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
        for step in range(20):
            loss = torch.stack([(p * (step + 1)).sin().square().sum() for p in params]).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            assert math.isfinite(loss.item())
        return [p.detach() for p in params]

    for found, expected in zip(trained(DEVICE), trained("cpu"), strict=True):
        _compare(found, expected, make)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(x),
        lambda x: x.mul_(x[0]),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[:, 1:].sub_(x[:, :-1]),
        lambda x: x.div_(x[0, 0]),
        lambda x: x[:1].expand(4, 4).add_(1),
        lambda x: x.t().add_(x),
    ],
)
def test_writing_over_what_is_read(write: Callable[[Tensor], Tensor]) -> None:
    values = torch.arange(1.0, 17).reshape(4, 4)
    on_cpu, on_device = values.clone(), values.to(DEVICE)
    _check(write, (on_cpu,), (on_device,), "what is returned")
    _compare(on_device, on_cpu, "what is written")


def test_zeros_without_memory() -> None:
    """As derivatives are that do not depend on what they are taken of."""
    x = torch.arange(1.0, 5, device=DEVICE)
    zero = torch._efficientzerotensor(4, device=DEVICE)
    for found in (x + zero, zero + x, x - zero, x.clone().add_(zero)):
        assert found.tolist() == [1, 2, 3, 4]
    assert (x * zero).tolist() == (zero / x).tolist() == (-zero).abs().tolist() == [0, 0, 0, 0]
    _, tangent = torch.func.jvp(lambda y: torch.stack([y * 0 + 1, torch.ones_like(y)]) * y, (x,), (x,))
    assert tangent.tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("part", range(2))
def test_views(part: int) -> None:
    before = module.performed_small()
    for seed in range(part * 1000, (part + 1) * 1000):
        both = _Both(seed)
        draw, sizes = both.random, both.sizes()
        on_cpu, on_device = both.tensors(sizes, draw.choice((torch.float32, torch.int64, torch.bool, torch.float16)))
        some = [draw.randrange(-len(sizes) - 2, len(sizes) + 2) for _ in range(2)]
        limits = [draw.choice((None, 0, 1, 2, -1, -2, 40, -40)) for _ in range(2)]
        permutation = random.Random(seed).sample(range(len(sizes)), len(sizes))
        count = math.prod(sizes)
        divisor = draw.choice([size for size in range(1, count + 1) if count % size == 0])
        step = draw.choice((1, 1, 2, 3))
        views: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
            "t": (Tensor.t, ()),
            "transpose": (Tensor.transpose, tuple(some)),
            "permute": (Tensor.permute, (permutation,)),
            "permute wrongly": (Tensor.permute, (some,)),
            "view": (Tensor.view, (divisor, -1)),
            "view as one dimension": (Tensor.view, (count,)),
            "view wrongly": (Tensor.view, (some,)),
            "unsafe view": (torch.ops.aten._unsafe_view, ([-1, divisor],)),
            "expand": (Tensor.expand, (2, *(3 if size == 1 else -1 for size in sizes))),
            "expand wrongly": (Tensor.expand, (some,)),
            "unsqueeze": (Tensor.unsqueeze, (some[0],)),
            "squeeze": (Tensor.squeeze, (some[0],)),
            "select": (Tensor.select, tuple(some)),
            "slice": (torch.ops.aten.slice, (some[0], *limits, step)),
            "slice wrongly": (torch.ops.aten.slice, (0, 0, 3, some[0])),
            "detach": (Tensor.detach, ()),
        }
        for name, (view, how) in views.items():
            found, expected = _outcome(view, on_device, *how), _outcome(view, on_cpu, *how)
            _compare(found, expected, (seed, name))
            if isinstance(found, Tensor) and isinstance(expected, Tensor) and expected.numel():
                first = (0,) * expected.dim()
                for x in (found, expected):
                    x[first] = 1
                _compare(on_device, on_cpu, (seed, name, "written through the view"))
    assert module.performed_small() - before > 5_000
