"""Python's operators on tensors of the device: computed in C++, as the methods of ``torch.Tensor`` compute them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from marid.native import module
from tests.helpers import DEVICE

Operator = Callable[[Any, Any], Any]

BINARY: dict[str, Operator] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "eq", "ne", "gt", "ge")
}
BITS: dict[str, Operator] = {name: getattr(operator, name) for name in ("and_", "or_", "xor")}
IN_PLACE: dict[str, Operator] = {name: getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow")}
READS: dict[str, Callable[[Tensor], Any]] = {
    "bool": bool,
    "float": float,
    "int": int,
    "not": operator.not_,
    "item": lambda x: x.item(),
    "item of the class": Tensor.item,
}
NUMBERS: list[Any] = [2, -3, 2.5, 0.0, -0.0, True, float("inf"), float("nan"), 1 << 40, 3 + 1j]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def _outcome(call: Callable[..., Any], *operands: Any) -> Any:
    """What a call returns, computed; or the class of its error."""
    try:
        made = call(*operands)
        if isinstance(made, marid.LazyTensor):
            made.materialize()
        return made
    except Exception as error:  # an error is an outcome to compare
        return type(error)


def _same(found: Any, expected: Any) -> None:
    if isinstance(expected, type):  # a class of errors, or one derived from it
        assert issubclass(found, expected)
        return
    if not isinstance(expected, Tensor):
        assert found == expected
        return
    assert isinstance(found, marid.LazyTensor)
    assert found.dtype == expected.dtype
    bits = [torch.nan_to_num(one.detach().cpu(), nan=-12345.0) for one in (found, expected)]
    assert torch.equal(*bits)
    if expected.dtype.is_floating_point:
        assert torch.equal(torch.signbit(bits[0]), torch.signbit(bits[1]))


def _tensor(dtype: torch.dtype) -> Tensor:
    return torch.tensor([3, 1, 2, 0, 1, 5], dtype=dtype).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*BINARY, *BITS])
def test_tensors_and_numbers_are_what_they_are_on_the_cpu(name: str, dtype: torch.dtype, either_way: None) -> None:
    of = {**BINARY, **BITS}[name]
    x, y = _tensor(dtype), _tensor(dtype).flip(0)
    on, other = x.to(DEVICE), y.to(DEVICE)
    _same(_outcome(of, on, other), _outcome(of, x, y))
    _same(_outcome(of, on, other[0].double()), _outcome(of, x, y[0].double()))
    for number in NUMBERS:
        _same(_outcome(of, on, number), _outcome(of, x, number))
        _same(_outcome(of, number, on), _outcome(of, number, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_in_place_write_to_the_tensor_that_they_are_given(
    name: str, dtype: torch.dtype, either_way: None
) -> None:
    of = IN_PLACE[name]
    for other in [_tensor(dtype).flip(0), *NUMBERS]:
        x = _tensor(dtype)
        on = x.to(DEVICE)
        version = on._version
        found = _outcome(of, on, other.to(DEVICE) if isinstance(other, Tensor) else other)
        expected = _outcome(of, x, other)
        _same(found, expected)
        _same(on, x)
        assert (found is on) == (expected is x)
        assert (on._version > version) == (expected is x)


@pytest.mark.parametrize("name", ["neg", "abs", "invert", "pos"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_of_one_tensor(name: str, dtype: torch.dtype, either_way: None) -> None:
    of = getattr(operator, name)
    x = _tensor(dtype)
    _same(_outcome(of, x.to(DEVICE)), _outcome(of, x))


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((4, 2, 3), (3, 5)), ((2, 3), (2, 3))], ids=str
)
def test_products_of_matrices(shapes: tuple[tuple[int, ...], tuple[int, ...]], either_way: None) -> None:
    x, y = (torch.randn(shape) for shape in shapes)
    _same(_outcome(lambda: x.to(DEVICE) @ y.to(DEVICE)), _outcome(lambda: x @ y))
    assert _outcome(lambda: x.to(DEVICE) @ 2) is _outcome(lambda: x @ 2) is TypeError  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan"), 0, 7, True, False, 2j, [1.0, 2.0], []], ids=str)
@pytest.mark.parametrize("name", READS)
def test_numbers_that_are_read(value: Any, name: str, either_way: None) -> None:
    of = READS[name]
    x = torch.tensor(value)
    on = x.to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a complex number loses a part
        found, expected = _outcome(of, on), _outcome(of, x)
    assert type(found) is type(expected)
    assert found == expected or found != found  # not a number


def test_numbers_are_not_taken_for_one_another(either_way: None) -> None:
    """Numbers are kept as tensors; those that are equal and of other types, or of other signs, are others."""
    x = torch.tensor([1, 2], device=DEVICE)
    assert [(x + one).dtype for one in (1, 1.0, True, 1, 1.0)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
        torch.float32,
    ]
    zeros = torch.tensor([0.0], device=DEVICE)
    assert [torch.signbit((zeros * one).cpu()).item() for one in (0.0, -0.0, 0.0)] == [False, True, False]
    for count in range(300):  # more than are kept
        assert (zeros + count).item() == count
        assert (zeros + float(count)).item() == count


def test_numbers_of_other_threads_do_not_take_the_place_of_one_in_use() -> None:
    """Long operations let other threads run, which have other numbers than are kept."""
    x = torch.zeros(1 << 17, device=DEVICE)

    def run(first: int) -> bool:
        return all(bool(((x + float(n)) == n).all()) for n in range(first, first + 300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, (0, 1000, 2000, 3000)))


def test_a_number_that_inference_mode_has_met_can_be_saved_for_gradients(either_way: None) -> None:
    x = torch.ones(2, device=DEVICE)
    with torch.inference_mode():
        _ = x * 1.2345  # the number is kept from here on
    weight = torch.ones(2, device=DEVICE, requires_grad=True)
    (weight * 1.2345).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([1.2345, 1.2345])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow", "matmul"])
def test_gradients_and_their_graph(name: str, either_way: None) -> None:
    of = getattr(operator, name)
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        x, w = (torch.rand(3, 3).to(device).requires_grad_() for _ in range(2))
        made = [of(x, w)] if name == "matmul" else [of(x, w), of(x, 2.5), of(2.5, x)]
        total = torch.stack([one.square().sum() for one in made]).sum()
        grads = torch.autograd.grad(total, [x, w], create_graph=True)
        second = torch.autograd.grad(grads[0].sum(), [x, w], allow_unused=True)
        results.append(([one.grad_fn.name() for one in made], [*made, *grads, *(s for s in second if s is not None)]))
    assert results[0][0] == results[1][0]
    for expected, found in zip(results[0][1], results[1][1], strict=True):
        _same(found, expected)


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm"])
@pytest.mark.parametrize("trains", [(True, True), (True, False), (False, True)])
def test_functions_of_products_show_what_they_save(name: str, trains: tuple[bool, bool], either_way: None) -> None:
    factors = ("_saved_mat1" if name == "addmm" else "_saved_self", "_saved_mat2")
    found = []
    for device in ("cpu", DEVICE):
        shapes = ((2, 2, 3), (2, 3, 4)) if name == "bmm" else ((2, 3), (3, 4))
        x, w = (
            torch.rand(shape).to(device).requires_grad_(trained) for shape, trained in zip(shapes, trains, strict=True)
        )
        made = getattr(torch, name)(*([torch.ones(4).to(device)] if name == "addmm" else []), x, w)
        saved = [getattr(made.grad_fn, factor) for factor in factors]
        same = [one is of if of.requires_grad else one is not None for one, of in zip(saved, (x, w), strict=True)]
        found.append((type(made.grad_fn).__name__, same))
        made.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            getattr(made.grad_fn, factors[trains[0]])
    assert found[0] == found[1]


def test_conversions_to_numbers_warn_where_they_are_traced(either_way: None) -> None:
    """Once each, by the line of the user's."""
    for convert in (bool, float, int, lambda x: x.item()):
        found = []
        for device in ("cpu", DEVICE):
            with pytest.warns(torch.jit.TracerWarning, match="Converting a tensor") as warned:
                torch.jit.trace(lambda x: x * convert(x.sum()), torch.ones(2).to(device), check_trace=False)  # noqa: B023
            found.append([(str(w.message), w.filename) for w in warned if w.category is torch.jit.TracerWarning])
        assert found[0] == found[1]


def test_operators_are_called_what_they_are_called_by_methods() -> None:
    x, y = torch.rand(2, 2, device=DEVICE), torch.rand(2, 2, device=DEVICE)
    pairs: list[tuple[Any, Any]] = [
        (x + y, Tensor.__add__(x, y)), (x - 2, Tensor.__sub__(x, 2)), (2 - x, Tensor.__rsub__(x, 2)),
        (3.0 / x, Tensor.__rtruediv__(x, 3.0)), (x**2, Tensor.__pow__(x, 2)), (2**x, Tensor.__rpow__(x, 2)),
        (x < 0.5, Tensor.__lt__(x, 0.5)), (x @ y, Tensor.__matmul__(x, y)),
        (x % 2, Tensor.__mod__(x, 2)), (-x, Tensor.__neg__(x)), ((x > 0) & (y > 0), Tensor.__and__(x > 0, y > 0)),
    ]  # fmt: skip
    for found, expected in pairs:
        assert found.operation == expected.operation
        assert [repr(one) for one in found.inputs if not isinstance(one, Tensor)] == [
            repr(one) for one in expected.inputs if not isinstance(one, Tensor)
        ]


def test_operands_of_other_classes_are_asked(either_way: None) -> None:
    class Other:
        def __radd__(self, left: Any) -> str:
            return "radd"

        def __rmatmul__(self, left: Any) -> str:
            return "rmatmul"

        def __lt__(self, right: Any) -> str:
            return "lt"

        def __gt__(self, right: Any) -> str:
            return "gt"

    x = torch.ones(2, device=DEVICE)
    assert (x + Other(), x @ Other(), x < Other(), Other() < x) == ("radd", "rmatmul", "gt", "lt")
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = x + "text"  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = x - [1]  # pyright: ignore[reportOperatorIssue]
    two: Any = np.float32(2)
    _same(x + two, torch.ones(2) + two)
    _same(two * x, two * torch.ones(2))
    _same(x + torch.tensor(2.0), torch.ones(2) + torch.tensor(2.0))
    _same(torch.tensor(2.0) - x, torch.tensor(2.0) - torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        _ = x + torch.ones(2)


def test_parameters_are_operands_like_others(either_way: None) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0])).to(DEVICE)
    module = nn.Linear(2, 2).to(DEVICE)
    x = torch.ones(2, device=DEVICE)
    _same(x + weight, torch.tensor([2.0, 3.0]))
    _same(weight * x, torch.tensor([1.0, 2.0]))
    assert (module.weight * x).requires_grad
    _same(x < module.bias, torch.ones(2) < module.bias.cpu())
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        module.bias += 1.0
    with torch.no_grad():
        module.bias += 1.0
    assert isinstance(module.bias, nn.Parameter)


def test_a_class_of_ones_own_has_its_own_operators(either_way: None) -> None:
    class Mine(torch.Tensor):
        def __add__(self, other: Any) -> str:
            return "mine"

        def __radd__(self, other: Any) -> str:
            return "mine too"

    x, mine = torch.ones(2, device=DEVICE), torch.ones(2).as_subclass(Mine)
    assert (mine + x, mine + 1) == ("mine", "mine")


def test_methods_that_are_replaced_are_called(monkeypatch: pytest.MonkeyPatch, either_way: None) -> None:
    """Whoever replaces an operator of tensors, as instrumentation does, sees the device's too; and it can be undone."""
    x = torch.ones(2, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__add__", lambda left, right: "replaced")
        assert x + x == "replaced"
        patch.setattr(Tensor, "item", lambda self: "read")
    _same(x + x, torch.tensor([2.0, 2.0]))


def test_modes_see_operators(either_way: None) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(x: Tensor) -> None:
        made = 2 * x + x
        made += 1
        assert bool((made < 100).all())
        assert made.sum().item() == -made.sum().neg()

    for mode in (Functions, Operators):
        expected: list[str] = []
        for device in ("cpu", DEVICE):
            x = torch.ones(2, device=device)
            seen: list[str] = []
            with mode():
                run(x)
            expected = expected or seen
        assert seen == expected


def test_transforms_see_operators(either_way: None) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return ((2 * x - w) ** 2 / (1 + x @ w)).sum()

    torch.manual_seed(0)
    x, w = torch.rand(4, 3), torch.rand(3)
    for of in (torch.func.vmap(f, (0, None)), torch.func.vmap(torch.func.grad(f), (0, None))):
        found, expected = of(x.to(DEVICE), w.to(DEVICE)), of(x, w)
        torch.testing.assert_close(found.cpu(), expected)
    found = torch.func.jvp(f, (x[0].to(DEVICE), w.to(DEVICE)), (x[1].to(DEVICE), w.to(DEVICE)))
    expected = torch.func.jvp(f, (x[0], w), (x[1], w))
    torch.testing.assert_close([one.cpu() for one in found], list(expected))


def test_autocast_sees_operators(either_way: None) -> None:
    x, w = torch.rand(4, 4, device=DEVICE), torch.rand(4, 4, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.bfloat16
        assert (x + w).dtype == torch.float32


def test_errors_and_metadata_are_those_of_the_operation(either_way: None) -> None:
    x = torch.rand(3, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(3\) must match the size of tensor b \(4\)"):
        _ = x + torch.rand(4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"test_arithmetic\.py:\d+"):
        _ = x + torch.rand(3)
    assert "test_arithmetic.py" in str((x * 2).metadata)


def test_a_call_has_one_site_before_and_after_python_specialises_it() -> None:
    sites = {id(module.here()) for _ in range(100)}
    assert len(sites) == 1


@pytest.mark.usefixtures("either_way")
def test_numbers_of_tensors_that_require_gradients_warn() -> None:
    """As PyTorch does where it is asked to warn always."""
    said: list[int] = []
    torch.set_warn_always(True)
    try:
        for device in ("cpu", DEVICE):
            loss = torch.ones(3).to(device).requires_grad_().sum()
            loss.backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert [float(loss), loss.item(), float(loss.detach()), float(loss)] == [3.0] * 4
            said.append(sum("requires_grad=True to a scalar" in str(one.message) for one in caught))
    finally:
        torch.set_warn_always(False)
    assert said == [2, 2]


def test_equal_to_an_array() -> None:
    """The one comparison in which PyTorch takes arrays, on either side."""

    def run(device: str) -> list[Any]:
        x = torch.arange(3.0, device=device)
        found: list[Any] = []
        for array in (np.arange(3), np.array(1.0), np.array([True, False, True]), np.arange(6).reshape(2, 3)):
            for one in (x == array, array == x, torch.nn.Parameter(x) == array):
                assert one.device == x.device
                found.append((one.dtype, one.tolist()))
        found += [x == np.array(["a", "b", "c"]), x == np.array([1, 2, None])]
        with pytest.raises(RuntimeError, match="must match the size"):
            (x == np.arange(4)).tolist()
        return found

    assert run(DEVICE) == run("cpu")
