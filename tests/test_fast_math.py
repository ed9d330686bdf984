"""Passes that round elsewhere: only when asked for, within tolerances, and never where others read what is fused."""
# ruff: noqa: PLC3002

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import marid
from marid.execute.compiled.compile_request import request_for
from marid.execute.compiled.describe import describe, solve
from tests.helpers import DEVICE
from tests.partitions import bound, change, compute, operators

pytestmark = pytest.mark.in_process("reads what the in-process engine would compile")


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "fast_math", True)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)


def _operators(work: Callable[..., Any], *tensors: torch.Tensor) -> list[str]:
    """What would be compiled of ``work``, having been compared with what was recorded."""
    given = [t.to(DEVICE) for t in tensors]
    marid.materialize(*given)

    def run() -> None:
        found = work(*given)
        marid.materialize(*(found if isinstance(found, tuple) else (found,)))

    [one] = bound(run)
    [part] = one.parts()
    asks = change(one, part)
    inputs = one.inputs_of(part)
    found = compute(asks, one, [t.clone() for t in inputs])
    for got, expected in zip(found, one.outputs_of(part), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)
    return operators(asks.code)


Q, K, V = (torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
MASK = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("work", "tensors"),
    [
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q, K, V]),
        (lambda q, k, v: torch.softmax(q @ k.mT * 0.35, -1) @ v, [Q, K, V]),
        (lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, 3) @ v, [Q, K, V]),
        (lambda q, k, v, m: torch.softmax(q @ k.mT * 0.35 + m, -1) @ v, [Q, K, V, MASK]),
        (lambda q, k, v, m: torch.softmax(q @ k.mT / 3 + m, -1) @ v, [Q, K, V, MASK.expand(2, 1, 16, 16)]),
        (lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, [Q, K, V, torch.randn(2, 4, 16, 16)]),
        (lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, [Q[0], K[0], V[0], MASK]),
        (lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, [Q, K, V, MASK.masked_fill(MASK > 1, -torch.inf)]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[:, :, :5], K, V]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [t[0].transpose(0, 1) for t in (Q, K, V)]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0].mT.contiguous().mT, K[0], V[0]]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0], K[0].mT.contiguous().mT, V[0]]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0], K[0], V[0].mT.contiguous().mT]),
        (
            lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
            [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (Q, K, V)],
        ),
        (lambda q, k, v: (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(2, 16, 32), [Q, K, V]),
    ],
)
def test_attention_that_was_written_out(work: Any, tensors: list[torch.Tensor]) -> None:
    """Takes the flash kernel, scale and mask included; results have the recorded strides."""
    found = _operators(work, *tensors)
    assert FLASH in found
    assert not {"_softmax", "bmm"} & {*found}


@pytest.mark.parametrize(
    ("work", "tensors"),
    [
        (lambda q, k, v: (lambda w: (w @ v, w.sum()))(torch.softmax(q @ k.mT, -1)), [Q, K, V]),
        (lambda q, k, v: (lambda s: (torch.softmax(s, -1) @ v, s * 2))(q @ k.mT), [Q, K, V]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, [Q, K, K.new_ones(2, 4, 16, 8)]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q.double(), K.double(), V.double()]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q, K, V[..., :3]]),
        (lambda q, k, v: torch.softmax((q @ k.mT).tanh(), -1) @ v, [Q, K, V]),
        (lambda q, k, v, m: torch.softmax((q @ k.mT + m) * 0.5, -1) @ v, [Q, K, V, MASK]),
    ],
)
def test_what_is_no_such_attention(work: Any, tensors: list[torch.Tensor]) -> None:
    """Parts with other readers, another dimension, dtype or shape."""
    found = _operators(work, *tensors)
    assert FLASH not in found
    assert found.count("bmm") == 2


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "work",
    [
        lambda x, w, b: _centred(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b,
        lambda x, w, b: w * (_centred(x) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)) + b,
        lambda x, w, b: (lambda d: d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b)(_centred(x)),
        lambda x, w, b: (lambda d: d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) * w)(_centred(x)),
        lambda x, w, b: (lambda d: d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5))(_centred(x)),
    ],
)
@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16)])
def test_a_layer_norm_that_was_written_out(work: Any, shape: tuple[int, ...]) -> None:
    """With or without weight and bias, is one call."""
    x, w, b = torch.randn(shape) * 3 + 1, torch.randn(16), torch.randn(16)
    assert _operators(work, x, w, b) == ["native_layer_norm"]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: _centred(x) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),  # the unbiased variance
        lambda x: (x - x.mean(0, keepdim=True)) / torch.sqrt(x.var(0, keepdim=True, unbiased=False) + 1e-5),
        lambda x: (lambda d: (d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5), d))(_centred(x)),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_what_is_no_layer_norm(work: Any) -> None:
    """Another variance, another dimension, a part that is read, a root-mean-square norm."""
    assert "native_layer_norm" not in _operators(work, torch.randn(4, 16))


X, W, B = torch.randn(8, 300), torch.randn(300, 5), torch.randn(5)


def test_bias_and_transposes() -> None:
    """A bias goes into the product, a product reads a transposed matrix as it lies."""
    assert _operators(lambda x, w, b: (x @ w + b).sin().cos(), X, W, B) == ["addmm", "sin", "cos"]
    three = X.view(2, 4, 300)
    assert "addmm" in _operators(lambda x, w, b: (x @ w + b).sin().cos(), three, W, B)
    small = torch.randn(8, 5)
    assert _operators(lambda x, w: (x.t().contiguous() @ w).sin().cos(), X, small) == ["mm", "sin", "cos"]
    assert "mm" in _operators(lambda x, w, b: (lambda y: (y + b, y.sin()))(x @ w), X, W, B)
    assert "clone" in _operators(lambda x, w: (lambda y: (y @ w, y.sin()))(x.t().contiguous()), X, small)


def test_a_write_in_between() -> None:
    """What the product reads is another thing by the time the bias is added."""

    def work(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y @ w
        y.add_(1)
        return z + b + y.sum()

    found = _operators(work, X, W, B)
    assert "mm" in found
    assert "addmm" not in found


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * 0.35 + m, -1) @ v


def test_one_code_serves_other_sizes() -> None:
    """Sizes and strides of what is fused are expressions of those of the inputs, or constants."""
    examples = []
    for batch, rows, columns in ((2, 16, 16), (3, 20, 25), (5, 21, 17)):
        q, k, v, m = (torch.randn(batch, 4, n, 8).to(DEVICE) for n in (rows, columns, columns, rows))
        mask = m[0, 0, :, :1].expand(rows, columns).contiguous()
        marid.materialize(q, k, v, mask)
        [one] = bound(lambda given=(q, k, v, mask): _written_out(*given).cpu())
        examples.append((one, one.parts()))
    (first, [part]), *others = examples
    assert all(parts == [part] for _, parts in others)
    asks = request_for(part, first.program, [(one.specs, one.params) for one, _ in examples[:2]], set())
    assert asks is not None
    assert asks.symbols > 0
    assert FLASH in operators(asks.code)
    last = examples[2][0]
    assert solve(asks.fits, describe(asks.part, last.program, last.specs, last.params), asks.symbols) is not None


def test_a_scale_is_part_of_the_code_and_one_that_changes_is_not_concluded_from() -> None:
    """Else every new one would be compiled anew."""
    q, k, v = (t.to(DEVICE) for t in (Q, K, V))
    [one] = bound(lambda: (torch.softmax(q @ k.mT * 0.35, -1) @ v).cpu())
    [part] = one.parts()
    [scale] = [number.param for number in part.numbers]
    asks = change(one, part)
    assert FLASH in operators(asks.code)
    assert asks.part.numbers == ()
    assert scale in asks.part.baked
    asks = request_for(part, one.program, [(one.specs, one.params)], {scale})
    assert asks is not None
    assert FLASH not in operators(asks.code)
    assert asks.part == part


def test_nothing_of_it_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where passes are switched off."""
    work = lambda x, w, b: (x @ w + b).sin().cos().exp()  # noqa: E731
    monkeypatch.setattr(marid.settings, "passes", False)
    assert "addmm" not in _operators(work, X, W, B)
    monkeypatch.setattr(marid.settings, "passes", True)
    monkeypatch.setattr(marid.settings, "fast_math", False)
    assert "addmm" not in _operators(work, X, W, B)


@pytest.mark.conformance
def test_it_is_compiled(compiling: Any) -> None:
    """Attention, norm and bias in one part, with the kernel that they are fused to."""
    q, k, v, m = (t.to(DEVICE) for t in (Q, K, V, MASK))
    weight, bias, w = torch.randn(8), torch.randn(8), torch.randn(8, 8) / 8
    lazy = [t.to(DEVICE) for t in (weight, bias, w)]

    def work(q: Any, k: Any, v: Any, m: Any, weight: Any, bias: Any, w: Any) -> torch.Tensor:
        x = _centred(v) / torch.sqrt(v.var(-1, keepdim=True, unbiased=False) + 1e-5) * weight
        return (_written_out(q, k, x, m) @ w + bias).tanh()

    expected = work(Q, K, V, MASK, weight, bias, w)
    end = time.monotonic() + 200
    while marid.stats().compiled_runs < 3 and time.monotonic() < end:
        torch.testing.assert_close(work(q, k, v, m, *lazy).cpu(), expected)
        time.sleep(0.05)
    stats = marid.stats()
    assert stats.compiled_runs >= 3, stats
    assert (stats.compile_mismatches, stats.compile_failures) == (0, 0)
    assert stats.passes == {"attention": 1, "norms": 1, "bias": 1}
