"""When a compiled part's results count as those of the flat tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from marid.execute.compiled.rounding import Disturb, beyond_rounding, copies, is_close

Function = Callable[..., torch.Tensor]


def _far(compiled: Function, flat: Function, *inputs: torch.Tensor) -> tuple[bool, list[int]]:
    """Whether the two are close element by element, and which results differ by more than rounding."""
    got, right = compiled(*inputs), flat(*inputs)
    bases = [-1] * len(inputs)
    return is_close(got, right), beyond_rounding([(got, right)], inputs, bases, lambda given, _disturb: [flat(*given)])


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def test_sums_whose_terms_cancel_may_be_added_in_another_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000) * 100
    x = torch.cat([x, -x])
    close, far = _far(lambda x: x.view(-1, 4).sum(0).flip(0).cumsum(0)[-1], _sum, x)
    assert (close, far) == (False, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_intermediate_results_may_keep_more_digits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, c, d = torch.randn(4, 10_000).to(dtype)

    def flat(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return torch.tanh(a * b + c) * d - a

    def compiled(*given: torch.Tensor) -> torch.Tensor:
        return flat(*(one.float() for one in given)).to(dtype)

    assert _far(compiled, flat, a, b, c, d) == (False, [])


def test_another_formula_of_one_function_is_rounding_where_its_results_cancel() -> None:
    """``1 + erf(x)`` of a negative ``x`` is a few last bits of ``erf``, which no change of ``x`` shows."""
    torch.manual_seed(0)
    x = -3 - torch.rand(10_000)

    def flat(x: torch.Tensor, disturb: Disturb = lambda results: None) -> torch.Tensor:
        for step in (torch.erf, lambda x: x + 1, lambda x: x * 1e4):
            x = step(x)
            disturb([x])
        return x

    others = torch.nextafter(torch.erf(x), torch.zeros(()))
    got, right = 1e4 * (1 + torch.where(torch.rand(10_000) < 0.3, others, torch.erf(x))), flat(x)
    assert not is_close(got, right)
    assert beyond_rounding([(got, right)], [x], [-1], lambda given, _disturb: [flat(*given)]) == [0]
    assert beyond_rounding([(got, right)], [x], [-1], lambda given, disturb: [flat(*given, disturb)]) == []
    wrong = got.clone()
    wrong[5] += 0.1
    assert beyond_rounding([(wrong, right)], [x], [-1], lambda given, disturb: [flat(*given, disturb)]) == [0]


def test_comparisons_may_fall_either_way_at_their_limit_and_nowhere_else() -> None:
    torch.manual_seed(0)
    x = torch.rand(10_000).bfloat16()
    assert _far(lambda x: x.float() * 3 > 1.5, lambda x: x * 3 > 1.5, x)[1] == []
    assert _far(lambda x: x * 3 > 1.0, lambda x: x * 3 > 1.5, x)[1] == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", ["one element", "an order", "a nan", "an infinity", "strides", "a dtype"])
def test_what_is_wrong_is_found(dtype: torch.dtype, change: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 40).to(dtype)

    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x) - 1
        if change == "one element":
            y[3, 4] += 0.5
        elif change == "an order":
            y[[0, 1]] = y[[1, 0]]
        elif change in ("a nan", "an infinity"):
            y[3, 4] = float(change.split()[1][:3])
        return y.t().contiguous().t() if change == "strides" else y.double() if change == "a dtype" else y

    close, far = _far(compiled, lambda x: torch.exp(x) - 1, x)
    assert (close, far) == (False, [0])


def test_nan_and_infinities_in_both_are_equal() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert _far(lambda x: x * 1, lambda x: x + 0, x) == (True, [])
    assert _far(lambda x: x * (1 + 1e-5), lambda x: x * 1, x)[1] == [0]  # more than the last bits


def test_copies_keep_geometry_and_views() -> None:
    memory = torch.arange(60.0)
    base, other = memory[4:44].view(5, 8), memory[50:51].expand(3)
    view = base.t()[2:4]
    made = copies([view, base, other], [1, -1, -1], [False, True, True])
    for own, copy in zip([view, base, other], made, strict=True):
        assert torch.equal(own, copy)
        assert (own.stride(), own.storage_offset()) == (copy.stride(), copy.storage_offset())
        assert own.untyped_storage()._cdata != copy.untyped_storage()._cdata
    made[1].fill_(-1)
    assert torch.all(made[0] == -1)
    assert torch.equal(memory, torch.arange(60.0))


def test_inputs_are_not_changed() -> None:
    torch.manual_seed(0)
    x = torch.randn(100)
    before = x.clone()
    beyond_rounding([(x + 1, x + 2)], [x], [-1], lambda given, _disturb: [given[0].add_(2)])
    assert torch.equal(x, before)
    state = torch.get_rng_state()
    beyond_rounding([(x + 1, x + 2)], [x], [-1], lambda given, _disturb: [given[0].add_(2)])
    assert torch.equal(state, torch.get_rng_state())


def test_what_agrees_and_what_does_not() -> None:
    nan, inf = float("nan"), float("inf")
    same = torch.tensor([1.0, nan, inf, -inf, 0.0])
    assert is_close(same, same.clone())
    pairs = [(1.0, 1.0001), (0.0, nan), (nan, 0.0), (inf, 1.0), (1.0, inf), (inf, -inf), (0.0, 1.1e-5)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for one, other in pairs[1:6]:
            assert not is_close(torch.tensor([1.0, one], dtype=dtype), torch.tensor([1.0, other], dtype=dtype))
    assert not any(is_close(torch.tensor([one]), torch.tensor([other])) for one, other in pairs)
    assert is_close(torch.tensor([1e6]), torch.tensor([1e6 + 1]))
    assert not is_close(torch.ones(2, 3), torch.ones(3, 2).t())
    assert not is_close(torch.tensor([1]), torch.tensor([2]))
