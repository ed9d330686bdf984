"""Rules for new sizes: derived, as exact as inferred ones, and only where a probe has agreed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import marid
from marid.frontend import derive, handles, infer, record
from marid.frontend.rules import rules, same_as
from marid.native import module
from tests.conformance import derived
from tests.helpers import DEVICE, assert_same, on_both

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    record._recorders.clear()
    module.use(record._recorders)


def _attention(n: int, device: str, **options: Any) -> Any:
    q, k, v = (torch.randn(n, 2, 5 + i, 8, device=device, requires_grad=True) for i in (0, 1, 1))
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return out, torch.autograd.grad(out.sum(), (q, k, v))


def _norm(n: int, device: str, dtype: torch.dtype = torch.float32) -> Any:
    x, w, b = (torch.randn(*s, device=device, dtype=dtype, requires_grad=True) for s in ((n, 3, 4), (4,), (4,)))
    out = F.layer_norm(x, (4,), w, b)
    return out, torch.autograd.grad(out.square().sum(), (x, w, b))


def _batch_norm(n: int, device: str) -> Any:
    x, w, b, mean = (torch.randn(*s, device=device) for s in ((4, n, 3, 2), (n,), (n,), (n,)))
    variance = torch.rand(n, device=device) + 1
    shapes = x, x.flatten(2), x.sum((2, 3))
    trained = [F.batch_norm(t, mean.clone(), variance.clone(), w, b, True) for t in shapes]
    evaluated = [F.batch_norm(t, mean, variance, w, None) for t in shapes]
    return trained, evaluated, F.batch_norm(x, None, None, None, b, True)


def _embedding(n: int, device: str) -> Any:
    table = torch.randn(7, 4, device=device, requires_grad=True)
    out = F.embedding(torch.arange(n * 2, device=device).view(n, 2) % 7, table)
    return out, torch.autograd.grad(out.sum(), table)


def _pointwise(n: int, device: str) -> Any:
    x, y = torch.randn(n, 3, 4, device=device), torch.randn(4, n, 3, device=device).permute(1, 2, 0)
    z = torch.randn(1, 1, 4, device=device)
    return x + y, y * y, y.sin(), x.t() if n < 0 else x.mul(2), (x + z).relu(), y > 0, x.expand(2, n, 3, 4) + 1


def _views(n: int, device: str) -> Any:
    x = torch.randn(n, 6, 4, device=device)
    flat = x.view(n * 6, 4), x.reshape(n, 24), x.transpose(1, 2).reshape(n * 4, 6)
    turned = x.transpose(0, 2), x.permute(2, 0, 1), x.unsqueeze(1).expand(n, 5, 6, 4)
    return flat, turned, x[:, 1], x[1:, ::2], x.split(2, 1)[1], x.chunk(2, 2)[1], x.unbind(1)[2]


def _reductions(n: int, device: str) -> Any:
    x = torch.randn(n, 5, 3, device=device)
    return x.sum(), x.mean(), x.mean(-1, keepdim=True), x.sum((0, 2)), x.softmax(1), x.max(0), x.argmax(1)


def _products(n: int, device: str) -> Any:
    x, w, b = torch.randn(n, 4, device=device), torch.randn(6, 4, device=device), torch.randn(6, device=device)
    y = torch.randn(n, 3, 4, device=device)
    layers = F.linear(x, w, b), F.linear(y, w, b), F.linear(y[..., ::2], w[:, ::2])
    return x @ w.t(), layers, torch.bmm(y, y.transpose(1, 2)), torch.addmm(b, x, w.t(), beta=0.5), y @ w.t()


def _losses(n: int, device: str) -> Any:
    x, y = torch.randn(n, 3, device=device, requires_grad=True), torch.rand(n, 3, device=device)
    losses = F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y, reduction="sum")
    more = F.binary_cross_entropy_with_logits(x, y), F.mse_loss(x, y, reduction="none")
    return losses, more, [torch.autograd.grad(loss.sum(), x) for loss in (*losses, *more)]


def _copies_and_spreads(n: int, device: str) -> Any:
    x = torch.randn(n, 3, 4, device=device, requires_grad=True)
    like = torch.ones_like(x), torch.full_like(x.transpose(0, 2), 2.0), torch.ones_like(x, dtype=torch.float64)
    copies = x.expand(2, n, 3, 4).clone(), x[:, ::2].clone(), x.transpose(0, 1).contiguous()
    copies = *copies, x[:, :, None, ::2].clone(), x.t().contiguous() if n < 0 else x.permute(2, 0, 1).clone()
    stacks = torch.stack([x, x], -1), torch.stack([x[0], x[1]]) if n > 1 else x, torch.stack([x.transpose(0, 1)] * 3, 1)
    spreads = x.std(), x.var((0, -1), keepdim=True), torch.std(x, 1, correction=0)
    return like, copies, stacks, spreads, torch.autograd.grad(x[:, 1].sum() + x.select(-1, -1).sum(), x)


def _trained_norm(n: int, device: str) -> Any:
    shapes = (5, n, 3, 2), (5, n, 4), (5, n)
    xs = [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
    w, b = (torch.randn(n, device=device, requires_grad=True) for _ in range(2))
    made = [F.batch_norm(x, None, None, w, b, True) for x in xs]
    images = xs[0].to(memory_format=torch.channels_last)
    made.append(F.batch_norm(images, torch.zeros_like(w), torch.ones_like(w), w, None, False))
    return made, torch.autograd.grad(sum(y.square().sum() for y in made), (*xs, w, b))  # pyright: ignore


def _in_place(n: int, device: str) -> Any:
    x, y = torch.randn(n, 4, device=device), torch.randn(4, device=device)
    x.add_(y).mul_(2)
    x[:, 1:3].copy_(y[:2])
    torch.add(x, y, out=torch.empty(n, 4, device=device))
    torch._foreach_mul_([x, y], 2.0)
    x.div_(2.0), torch.ops.aten.add_.Scalar(x, 1), y.sub_(1)
    return (
        x,
        y,
        torch.ops.aten.mul.Scalar(x, 2.5),
        x.masked_fill(x > 1, 0.0),
        torch.cat([x, x[:1]]),
        x.clone(),
        x.double(),
    )


PROGRAMS = [_attention, _norm, _batch_norm, _embedding, _pointwise, _views, _reductions, _products, _in_place]
PARTLY_INFERRED = [_losses, _copies_and_spreads, _trained_norm]


@pytest.mark.parametrize("program", [*PROGRAMS, *PARTLY_INFERRED], ids=lambda p: p.__name__)
def test_new_sizes_give_what_eager_gives(program: Callable[[int, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, shapes, dtypes and strides, for sizes 1 and 0 too; and what is derived is what a probe says."""
    with derived.checked(monkeypatch) as found:
        for n in (3, 5, 2, 9, 1):
            on_both(lambda device, n=n: program(n, device))
    assert not found, "\n".join(found)
    assert sum(found.compared.values()) > 10


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_new_sizes_are_not_inferred(program: Callable[[int, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a run of a meta kernel nor by a probe."""
    program(3, DEVICE)
    program(4, DEVICE)
    inferred: list[str] = []
    original = infer._run

    def spy(request: infer.Request, device: str, *rest: Any) -> Any:
        if request.tensors:  # others make new tensors
            inferred.append(f"{request.func} on {device}")
        return original(request, device, *rest)

    monkeypatch.setattr(infer, "_run", spy)
    program(7, DEVICE)
    assert not inferred


def test_new_sizes_do_not_reach_torch_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def spy(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return record.dispatch(cls, func, types, args, kwargs)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((x @ w).relu(), (4,)).transpose(0, 1).sum(1)

    w, *xs = (torch.randn(n, 4, device=DEVICE) for n in (4, 3, 6))
    run(xs[0], w)
    monkeypatch.setattr(marid.LazyTensor, "__torch_dispatch__", classmethod(spy))
    run(xs[1], w)
    assert not seen


def test_first_large_sizes_are_judged_by_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer norm that is too large to be tried is tried with small sizes."""
    tried: list[list[int]] = []
    original = infer._run

    def spy(request: infer.Request, device: str, *rest: Any) -> Any:
        tried.append([value.spec.numel for value in request.tensors])  # pyright: ignore[reportOptionalMemberAccess]
        return original(request, device, *rest)

    monkeypatch.setattr(infer, "_run", spy)
    x = torch.randn(300, 200, device=DEVICE)
    tried.clear()
    aten.native_layer_norm.default(x, [200], None, None, 1e-5)
    assert tried == [[6 * 7]]


_REFUSED: list[Callable[[int, str], Any]] = [
    lambda n, device: torch.ones(n, 3, device=device) @ torch.ones(n + (n > 2), 4, device=device)[: 3 if n == 2 else n],
    lambda n, device: torch.ones(n, 3, device=device).view(6, -1, n // 2 * 2),
    lambda n, device: torch.ones(n, 3, device=device) + torch.ones(2, 1, 2, device=device),
    lambda n, device: F.layer_norm(torch.ones(2, n, device=device), (2,)),
    lambda n, device: torch.cat([torch.ones(2, 2, device=device), torch.ones(n, n, device=device)]),
    lambda n, device: F.linear(torch.ones(3, n, device=device), torch.ones(4, 2, device=device)),
    lambda n, device: F.linear(
        torch.ones(3, 2, device=device), torch.ones(n, 2, device=device), torch.ones(2, device=device)
    ),
    lambda n, device: torch.addmm(torch.ones(2, n, device=device), *torch.ones(2, 2, 2, device=device)),
    lambda n, device: torch.ones(2, device=device).add_(torch.ones(n, 1, device=device).squeeze(1)),
    lambda n, device: torch.ones(3, n, device=device).index_select(n - 1, torch.zeros(1, 1, dtype=int, device=device)),
    lambda n, device: torch.ones(2, 2, device=device).masked_fill_(torch.ones(2, n, device=device) > 0, 2),
    lambda n, device: torch.ones(2, 2, device=device).masked_scatter_(
        torch.ones(2, n, device=device) > 0, torch.ones(2, 2, device=device)
    ),
    lambda n, device: torch.ones(2, 2, device=device).floor_divide_(torch.ones(2, n, device=device)),
    lambda n, device: torch.ones(2, 2, device=device).addbmm_(
        torch.ones(3, 2, n, device=device), torch.ones(3, 2, 2, device=device)
    ),
    lambda n, device: torch.ones(3, n, device=device).index_put_(
        (torch.zeros(1, dtype=int, device=device),), torch.ones(2, device=device)
    ),
]


@pytest.mark.parametrize("call", _REFUSED, ids=range(len(_REFUSED)))
@pytest.mark.parametrize("n", [4, 5, 7])
def test_new_sizes_are_refused_as_by_eager(call: Callable[[int, str], Any], n: int) -> None:
    """At the call, with the same type and message, after the call was right with other sizes."""

    def attempt(size: int, device: str) -> Any:
        try:
            return call(size, device)
        except (RuntimeError, IndexError) as error:
            return type(error), str(error)

    for size in (2, 2, n):
        on_lazy, on_cpu = attempt(size, DEVICE), attempt(size, "cpu")
        if isinstance(on_cpu, torch.Tensor):
            assert_same(on_lazy, on_cpu)
        else:
            assert on_lazy == on_cpu


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.fft.rfft2(x),
        lambda x: torch.fft.hfft2(x + 0j).sign(),
        lambda x: torch.linalg.eig(torch.eye(len(x), device=x.device))[1],
        lambda x: torch.nonzero_static(x, size=3),
    ],
)
def test_large_calls_lie_in_memory_as_those_of_eager(call: Callable[[torch.Tensor], Any]) -> None:
    """Also where the meta kernel says something else: it is not believed where it was wrong about small sizes."""
    for rows, columns in ((200, 300), (3, 4), (256, 128)):
        x = torch.ones(rows, columns)
        expected, found = call(x), call(x.to(DEVICE))
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    "layouts",
    [
        [((0, 0), (1, 1)), ((0, 0), (2, 1)), ((0, 0), (6, 1))],
        [((2, 0), (1, 1)), ((2, 0), (2, 1)), ((3, 0), (6, 1))],
        [((1, 2, 3), (2, 1, 2)), ((1, 2, 2), (3, 1, 2))],
        [((2, 1, 3), (1, 6, 2)), ((3, 1, 3), (1, 6, 3)), ((3, 1, 3), (1, 9, 3))],
        [((2, 2, 1), (1, 2, 1)), ((3, 2, 1), (1, 3, 0))],
        [((2, 1, 3), (6, 5, 2)), ((2, 1, 2), (4, 5, 2)), ((2, 1, 2), (5, 3, 2))],
    ],
)
def test_strides_that_mean_nothing_are_those_of_eager(layouts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Where a dimension has one element or none, kernels differ in whether they keep its stride."""

    def strides(device: str) -> list[Any]:
        tensors = [torch.empty_strided(*layout, device=device) for layout in layouts]
        return [[y.stride() for y in (torch.zeros_like(x), *x.sort(0), x + x, x.clone(), x.sin())] for x in tensors]

    assert strides(DEVICE) == strides("cpu")


_CHANNELS_LAST = (
    ((400, 1, 7, 7), (49, 1, 7, 1)),
    ((90, 200, 1, 1), (200, 1, 200, 200)),
    ((40, 30, 3, 3), (270, 1, 90, 30)),
)


def _foreach(device: str, layouts: Any) -> list[Any]:
    """Operators of optimizers, on tensors that lie so, and a vector."""
    xs, ys = ([torch.empty_strided(*layout, device=device).fill_(2) for layout in layouts] for _ in range(2))
    xs, ys = [*xs, torch.ones(3, device=device)], [*ys, torch.ones(3, device=device)]
    factors = [0.5 + index for index in range(len(xs))]
    written = [x.clone() for x in xs]
    torch._foreach_mul_(written, 0.5)
    torch._foreach_add_(written, ys, alpha=0.1)
    torch._foreach_lerp_(written, xs, 0.5)
    torch._foreach_addcdiv_(written, xs, ys, factors)
    torch._foreach_sqrt_(written)
    return [
        written,
        torch._foreach_add(xs, ys, alpha=0.1),
        torch._foreach_add(xs, 2),
        torch._foreach_mul(xs, torch.ones((), device=device)),
        torch._foreach_div(xs, factors),
        torch._foreach_sqrt(xs),
        torch._foreach_lerp(xs, ys, 0.5),
        torch._foreach_addcdiv(xs, xs, ys, factors),
        torch._foreach_addcmul(xs, xs, ys, 0.5),
        torch._foreach_addcmul(xs, xs, ys, value=0.5),
        torch._foreach_maximum(xs, ys),
    ]


@pytest.mark.parametrize("count", [1, 3, 300], ids=["small", "large", "many"])
def test_operators_for_lists_lay_each_result_out_as_the_operator_for_one(count: int) -> None:
    """Strides of dimensions of size one too, which PyTorch's own stand-ins for these operators get wrong."""
    small = (4, 1, 3, 3), (9, 1, 3, 1)
    layouts = [small] if count == 1 else [*_CHANNELS_LAST, *[small] * (count - 3)]
    on_both(lambda device: _foreach(device, layouts))
    assert marid.stats().mispredictions == []
    assert marid.stats().fallbacks == {}


@pytest.mark.parametrize("shape", [(400, 1, 7, 7), (90, 200, 1, 1), (1, 300, 1, 60)])
def test_layouts_with_sizes_of_one_are_the_same_small_and_large(shape: tuple[int, ...]) -> None:
    """What a large call is judged by has strides that are equal where its own are."""

    def results(device: str) -> list[Any]:
        x = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
        sums = x + x, x.sin(), x * 2, x.contiguous() + x, torch.where(x > 0, x, x)
        return [x, *sums, *torch._foreach_neg([x, x.contiguous()]), *torch._foreach_ceil([x, x])]

    on_both(results)
    assert marid.stats().mispredictions == []


def test_a_derivation_that_a_probe_contradicts_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gets strides wrong is asked no more for that pattern; what is recorded is right."""
    asked = 0

    def wrong(x: Any) -> Any:
        nonlocal asked
        asked += 1
        shape = tuple(reversed(x.spec.shape))
        return shape, (1, shape[0]), 0, x.spec.dtype, False, False

    monkeypatch.setitem(rules, aten.tril.default, wrong)
    for n in (3, 4, 5):
        on_both(lambda device, n=n: torch.randn(n, n, device=device).tril())
    assert asked == 1


def test_operators_with_a_rule_exist_on_this_version() -> None:
    for func in (*rules, *same_as):
        assert derive.deriver_of(record.recorder_of(func)) is not None


def test_patterns_tell_apart_what_kernels_branch_on() -> None:
    """Sizes do not matter, but for 0 and 1; order, gaps and expansion of strides do, and so do dtypes."""

    def kind(tensor: torch.Tensor) -> Any:
        return derive._kind(handles.spec_of(tensor, 0))

    x = torch.empty(3, 4, 5)
    assert kind(x) == kind(torch.empty(7, 2, 2))
    others = [
        *(torch.empty(1, 4, 5), torch.empty(3, 0, 5), torch.empty(3, 4), x.double(), x.transpose(0, 1), x[:, :, ::2]),
        *(x[:, 1:], torch.empty(3, 1, 5).expand(3, 4, 5), torch.empty(3, 4, 5, dtype=torch.complex64)),
        *(torch.empty(3, 4, 5, dtype=torch.complex64).conj(), torch.empty(3, 4, 5, dtype=torch.complex64).conj().imag),
    ]  # fmt: skip
    kinds = [kind(x), *map(kind, others)]
    assert len(set(kinds)) == len(kinds)


def test_sizes_among_the_arguments_may_change_and_other_numbers_not() -> None:
    """The size that ``view`` is given is one; the dimension that ``transpose`` is given is none."""
    x, y = torch.randn(2, 3, 4, device=DEVICE), torch.randn(5, 3, 4, device=DEVICE)
    x.view(6, 4), y.view(15, 4)
    x.transpose(0, 1), y.transpose(0, 1), y.transpose(1, 2)
    assert len(record.recorder_of(aten.view.default).deriver._trusted) == 1  # pyright: ignore
    assert len(record.recorder_of(aten.transpose.int).deriver._trusted) == 2  # pyright: ignore
