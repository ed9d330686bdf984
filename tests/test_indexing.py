"""Indexing of the device's tensors with numbers and slices: views made in C++, as ``torch.Tensor`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from tests.helpers import DEVICE

SHAPE = (4, 3, 5, 2)

INDICES: list[Any] = [
    0,
    -4,
    None,
    ...,
    (),
    slice(None),
    slice(1, 3),
    slice(-3, None),
    slice(3, 1),
    slice(0, 100, 2),
    slice(10, 20),
    slice(0, 4, 1),
    (1, 2),
    (1, -1, 4, 1),
    (slice(None), 1),
    (slice(None), slice(None)),
    (slice(None), slice(1, None), slice(None, None, 2)),
    (..., 0),
    (0, ..., 1),
    (..., None),
    (None, ..., None, 1),
    (1, None, 2),
    (1, ..., slice(None, 1)),
    (0, 1, 2, 1, ...),
    (slice(-2, -1), ..., slice(-100, 100)),
    (True, 0),
    (False,),
    [0, 2],
    (0, [1, 2]),
    ([1], slice(None), 2),
    (..., ...),
]
WRONG: list[Any] = [
    4,
    -5,
    (0, 3),
    (0, 0, 0, 0, 0),
    (0, ..., ..., 1),
    slice(None, None, 0),
    slice(None, None, -1),
    1.5,
    "a",
    (0, "a"),
    1 << 70,
    (slice(1.5, None),),
]


def _both() -> tuple[Tensor, Tensor]:
    on_cpu = torch.arange(120.0).reshape(SHAPE).clone()
    return on_cpu, on_cpu.to(DEVICE)


def _geometry(of: Tensor) -> tuple[Any, ...]:
    return of.shape, of.stride(), of.storage_offset(), of._is_view(), of.requires_grad


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_is_the_view_that_pytorch_makes(index: Any) -> None:
    expected, own = _both()
    for _ in range(2):
        want, found = expected[index], own[index]
        assert isinstance(found, marid.LazyTensor)
        assert torch.equal(found.cpu(), want)
        assert _geometry(found) == _geometry(want)
        assert (found._base is own) == (want._base is expected)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("strided", [False, True])
def test_gradients(index: Any, strided: bool) -> None:
    grads: list[Tensor] = []
    for source in _both():
        leaf = source.requires_grad_()
        indexed = (leaf.repeat(2, 1, 1, 2)[::2, ..., ::2] if strided else leaf)[index]
        (indexed * 3).sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.cpu())
    assert torch.equal(*grads)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", [1, (1, 2), (slice(1, 3), None, 0), (..., 1)], ids=repr)
def test_writes_through_a_view_reach_the_gradients_of_its_base(index: Any) -> None:
    grads: list[Tensor] = []
    for source in _both():
        weight = torch.full((), 2.0, device=source.device, requires_grad=True)
        base = source * 1
        base[index].mul_(weight)
        assert base.requires_grad
        base.sum().backward()
        assert weight.grad is not None
        grads.append(weight.grad.cpu())
        plain = source * 1
        before = plain._version
        plain[index].add_(1)
        assert plain._version == before + 1
        assert torch.equal(plain[index].cpu(), (source[index] + 1).cpu())
    assert torch.equal(*grads)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_what_may_be_written_to_later(mode: Callable[[], Any]) -> None:
    """A view made without gradients of what has some may not be written to in place afterwards."""
    outcomes: list[Any] = []
    for source in _both():
        with mode():
            plain = source[1, 2]
        leaf = source.detach().requires_grad_() * 1
        with mode():
            view = leaf[1, 2]
        try:
            view.mul_(2)
            raised = None
        except RuntimeError as error:
            raised = str(error).replace(str(source.device), "device").split(".")[0]
        outcomes.append((plain.is_inference(), view.requires_grad, raised))
    assert outcomes[0] == outcomes[1]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", WRONG, ids=repr)
def test_wrong_indices_raise_what_pytorch_raises(index: Any) -> None:
    raised: list[Any] = []
    for source in _both():
        with pytest.raises((IndexError, TypeError, ValueError, RuntimeError, OverflowError)) as error:
            source[index]
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]
    scalar = torch.ones((), device=DEVICE)
    with pytest.raises(IndexError, match="0-dim"):
        scalar[0]


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", [1, (1, slice(None), None, 2), slice(None), (slice(0, 9), 1), ...], ids=repr)
def test_modes_see_what_they_see_of_pytorch(index: Any) -> None:
    for make in (_Functions, _Operators):
        seen: list[list[str]] = []
        for source in _both():
            with make() as mode:
                source[index]
            seen.append(mode.seen)
        assert seen[0] == seen[1]
        assert seen[1]


@pytest.mark.usefixtures("either_way")
def test_transforms_and_traces() -> None:
    def picked(x: Tensor) -> Tensor:
        return x[1, ..., None] * x[0, :2, :].sum()

    expected, own = _both()
    assert torch.equal(torch.vmap(picked)(own).cpu(), torch.vmap(picked)(expected))
    grad = torch.func.grad(lambda x: picked(x).sum())
    assert torch.equal(grad(own).cpu(), grad(expected))
    _, tangent = torch.func.jvp(picked, (own,), (own,))
    _, want = torch.func.jvp(picked, (expected,), (expected,))
    assert torch.equal(tangent.cpu(), want)
    traced = torch.jit.trace(picked, expected)
    assert torch.equal(traced(own).cpu(), picked(expected))


@pytest.mark.usefixtures("either_way")
def test_conjugated_and_complex_views() -> None:
    expected = torch.randn(3, 4, dtype=torch.complex64)
    own = expected.to(DEVICE)
    for change in (torch.conj, lambda x: x.conj().imag, torch.view_as_real):
        want, found = change(expected)[1, 2:], change(own)[1, 2:]
        assert torch.equal(torch.view_as_real(found.cpu().resolve_conj()) if found.is_complex() else found.cpu(),
                           torch.view_as_real(want.resolve_conj()) if want.is_complex() else want)  # fmt: skip
        assert (found.is_conj(), found.is_neg()) == (want.is_conj(), want.is_neg())


def test_a_view_names_the_operator_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, own = _both()
    recorded = [str(own[index].operation) for index in (1, (1, slice(2)), (None, 1, None))]
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    own.sum().item()
    for _ in range(2):
        assert [str(own[index].operation) for index in (1, (1, slice(2)), (None, 1, None))] == recorded


@pytest.mark.usefixtures("either_way")
def test_subclasses_have_their_own() -> None:
    class Named(marid.LazyTensor):
        def __getitem__(self, index: Any) -> Any:
            return "own", index

    made = torch.ones(3, device=DEVICE).as_subclass(Named)
    assert made[1] == ("own", 1)
    assert marid.LazyTensor.__getitem__(made, 1).item() == 1


NUMBERS: list[Any] = [1, -1, 300, 2.75, True, float("nan"), float("inf"), 1 << 40, 1 << 70, 1j, "a", None]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
]
WRITTEN: list[Any] = [
    0,
    (1, 2),
    (..., 1),
    (slice(1, 3), 0),
    slice(None),
    ...,
    (None, 1),
    (0, 1, 2, 1),
    (slice(3, 1),),
    [0, 2],
]


def _written(to: Tensor, index: Any, value: Any) -> Any:
    """What a write leaves, and how often it counts; or the class and the text of its error."""
    before = None if to.is_inference() else to._version
    try:
        to[index] = value
    except Exception as error:  # an error is an outcome to compare
        return type(error), str(error).replace("remote_accelerator:0", "cpu").replace(
            "torch.remote_accelerator.", "torch."
        )
    return None if before is None else to._version - before, to.detach().cpu().clone()


def _same(found: Any, expected: Any) -> None:
    if expected[0] is not None:  # an inference tensor counts no writes, and the device has none
        assert found[0] == expected[0]
    if isinstance(found[1], Tensor):
        assert torch.equal(found[1].nan_to_num(), expected[1].nan_to_num())
    else:
        assert found[1] == expected[1]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", WRITTEN, ids=repr)
def test_numbers_are_written_as_pytorch_writes_them(index: Any, dtype: torch.dtype) -> None:
    for value in NUMBERS:
        expected, own = (one.to(dtype) for one in _both())
        _same(_written(own, index, value), _written(expected, index, value))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("index", WRITTEN, ids=repr)
def test_tensors_are_written_as_pytorch_writes_them(index: Any) -> None:
    for make in (
        lambda x: x[index] * 2,
        lambda x: x[index].double() + 0.1,
        lambda x: x[index].int(),
        lambda x: x.new_tensor(5.0),
        lambda x: x.new_ones(1, 1, 1, 1, 1),
        lambda x: x.new_ones(7),
        lambda x: torch.tensor(3.0),
        lambda x: x[index],
    ):
        expected, own = _both()
        _same(_written(own, index, make(own)), _written(expected, index, make(expected)))


@pytest.mark.usefixtures("either_way")
def test_writes_that_share_memory() -> None:
    """Elements that are one in memory, and a source that overlaps with what is written."""
    for write in (
        lambda x: _written(x[0, 0, 0].expand(4, 2), (slice(0, 2), 1), 1.0),
        lambda x: _written(x[0, 0, 0].expand(4, 2), (0, 1), 1.0),
        lambda x: _written(x[0, 0, 0].expand(4, 2), 0, x[1, 1, 1]),
        lambda x: _written(x, slice(1, 4), x[0:3]),
        lambda x: _written(x.view(-1), slice(1, 120), x.view(-1)[:119].clone()),
    ):
        expected, own = _both()
        _same(write(own), write(expected))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_writes_and_gradients(mode: Callable[[], Any]) -> None:
    outcomes: list[Any] = []
    for source in _both():
        leaf = source.clone().requires_grad_()
        weight = torch.full((3, 5, 2), 2.0, device=source.device, requires_grad=True)
        found: list[Any] = []
        with mode():
            found.append(_written(leaf, 0, 1.0))
            base = source * 1
            found.append(_written(base, 1, weight))
            found.append(_written(base, (2, 0), 7))
            product = leaf * 1
            found.append(_written(product, 1, 3.0))
        if mode is torch.enable_grad:
            (base * base).sum().backward()
            product.sum().backward()
            assert leaf.grad is not None
            assert weight.grad is not None
            found += [(0, leaf.grad.cpu()), (0, weight.grad.cpu())]
        outcomes.append(found)
    for found, expected in zip(outcomes[1], outcomes[0], strict=True):
        _same(tuple(part.detach() if isinstance(part, Tensor) else part for part in found), expected)


@pytest.mark.usefixtures("either_way")
def test_modes_see_writes() -> None:
    for make in (_Functions, _Operators):
        with make() as mode:
            own = torch.ones(3, 2, device=DEVICE)
            own[1] = 2.0
        assert any("setitem" in name or "copy_" in name for name in mode.seen)


def test_nothing_is_deleted_from_a_tensor() -> None:
    with pytest.raises(TypeError):
        del torch.ones(3, device=DEVICE)[0]  # pyright: ignore[reportIndexIssue]


def test_numbers_are_written_into_any_view(at_once: None) -> None:
    """As PyTorch does: also where elements share memory that it does not see, and not where it sees it."""
    x = torch.randn(6, 8)
    y = x.to(DEVICE)
    for of in (x, y):
        of[:, :2] = -1e9
        of[::2, 1] = 3
        of.as_strided((4, 3), (2, 1))[1:, 1] = 5  # a window behind the other
        with pytest.raises(RuntimeError, match="single memory location"):
            of[0, :1].expand(4)[1:3] = 7
    torch.testing.assert_close(y.cpu(), x, rtol=0, atol=0)
