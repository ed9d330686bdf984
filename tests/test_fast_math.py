"""Passes that round elsewhere: only when asked for, within tolerances, and never where a part has another reader."""
# ruff: noqa: PLC3002

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.frontend.engines import local_engine as engine
from tests.helpers import DEVICE

pytestmark = pytest.mark.in_process("reads the programs of the in-process engine")


@pytest.fixture(autouse=True)
def _every_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    engine.programs.clear()
    monkeypatch.setattr(marid.settings, "pass_instructions", 1)
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    monkeypatch.setattr(marid.settings, "fast_math", True)
    yield
    engine.programs.clear()


def _operators(work: Callable[..., Any], *tensors: torch.Tensor) -> list[str]:
    engine.programs.clear()
    expected = work(*tensors)
    given = [t.to(DEVICE) for t in tensors]
    marid.materialize(*given)
    for _ in range(4):
        found = work(*given)
        marid.materialize(*(found if isinstance(found, tuple) else (found,)))
        one, other = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
        for a, b in zip(one, other, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a.cpu(), b)
    largest = max(engine.programs._programs.values(), key=lambda program: len(program.program.instructions))
    forms = [form.improved.program for form in largest.forms if form.improved is not None]
    return [i.op.name.removeprefix("aten::") for i in (forms[-1] if forms else largest.program).instructions]


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
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0].mT.contiguous().mT, K[0], V[0]]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0], K[0].mT.contiguous().mT, V[0]]),
        (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [Q[0], K[0], V[0].mT.contiguous().mT]),
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
    assert _operators(lambda x, w, b: x @ w + b, X, W, B) == ["addmm"]
    assert _operators(lambda x, w, b: (x @ w + b).relu(), X, W, B) == ["_addmm_activation"]
    three = X.view(2, 4, 300)
    assert "addmm" in _operators(lambda x, w, b: x @ w + b, three, W, B)
    assert _operators(lambda x, w: x.t().contiguous() @ w, X, torch.randn(8, 5)) == ["t", "mm"]
    assert "mm" in _operators(lambda x, w, b: (lambda y: (y + b, y))(x @ w), X, W, B)
    assert "clone" in _operators(lambda x, w: (lambda y: (y @ w, y))(x.t().contiguous()), X, torch.randn(8, 5))


def test_nothing_of_it_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default results are those of eager PyTorch, bit for bit."""
    monkeypatch.setattr(marid.settings, "fast_math", False)
    assert FLASH not in _operators(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, Q, K, V)
    assert "addmm" not in _operators(lambda x, w, b: x @ w + b, X, W, B)


def test_errors_in_the_middle_of_a_fused_attention() -> None:
    """An error beside it: what the recorded program would have, exists."""
    index = torch.tensor([99], device=DEVICE)
    q, k, v = (t.to(DEVICE) for t in (Q, K, V))
    for _ in range(4):
        scores = torch.softmax(q @ k.mT, -1)
        bad = torch.index_select(q, 0, index)
        out = scores @ v
        del scores
        with pytest.raises(IndexError):
            marid.materialize(bad, out)
        torch.testing.assert_close(out.cpu(), torch.softmax(Q @ K.mT, -1) @ V)
