"""The operators of RWKV-7: the C++ kernels, the plain forms and naive ones agree; gradients; one node for a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import marid
from marid.frontend import rwkv7_operators
from marid.frontend.rwkv7_operators import ACTIVATIONS, NAMES
from marid.remote.worker.operators import operator_named
from tests.helpers import DEVICE, assert_same

ops = torch.ops.marid
HEADS, SIZE = 2, 5
WIDTH = HEADS * SIZE


def _randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


# --- naive forms: loops over every token and head --------------------------------------------------------------------


def naive_token_shift(x: Tensor, shift: Tensor, mix: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    mixed, last = torch.zeros(len(mix), *x.shape, dtype=x.dtype), shift.clone()
    for b in range(x.shape[0]):
        before = shift[b]
        for t in range(x.shape[1]):
            for m in range(len(mix)):
                mixed[m, b, t] = x[b, t] * (1 - mix[m]) + before * mix[m]
            before = x[b, t]
            if lengths is None or t < lengths[b]:
                last[b] = x[b, t]
    return mixed, last


def naive_time_mix(
    r: Tensor, w: Tensor, packed: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _, size = packed.shape
    state, y = state.clone(), torch.zeros(batch, tokens, heads, size, dtype=r.dtype)
    r, w = r.reshape(y.shape), w.reshape(y.shape)
    for b in range(batch):
        for t in range(tokens if lengths is None else int(lengths[b])):
            for h in range(heads):
                k, v, a, kk = packed[b, t, h]
                before = state[b, h].t()  # BlinkDL's: values before keys
                decay = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=r.dtype)) * torch.sigmoid(w[b, t, h]))
                after = before * decay + before @ torch.outer(-kk, kk * a) + torch.outer(v, k)
                state[b, h] = after.t()
                y[b, t, h] = after @ r[b, t, h]
    return y.reshape(batch, tokens, heads * size), state


def naive_channel_mix(
    x: Tensor, shift: Tensor, mix: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    mixed, last = naive_token_shift(x, shift, mix[None], lengths)
    return torch.relu(mixed[0] @ key.t()) ** 2 @ value.t(), last


def naive_l2_norm(x: Tensor, groups: int = 1, eps: float = 1e-12) -> Tensor:
    parts = [part / part.square().sum(-1, keepdim=True).sqrt().clamp(min=eps) for part in x.chunk(groups, -1)]
    return torch.cat(parts, -1)


def naive_pack(k: Tensor, v: Tensor, a: Tensor, kk: Tensor, heads: int) -> Tensor:
    rows = [torch.stack([t.chunk(heads, -1)[h] for t in (k, v, a, kk)], -2) for h in range(heads)]
    return torch.stack(rows, -3)


def naive_time_first(y: Tensor, r: Tensor, packed: Tensor, bonus: Tensor) -> Tensor:
    out = y.clone()
    for h in range(len(bonus)):
        part = slice(h * SIZE, (h + 1) * SIZE)
        k, v = packed[..., h, 0, :], packed[..., h, 1, :]
        out[..., part] += (r[..., part] * k * bonus[h]).sum(-1, keepdim=True) * v
    return out


NAIVE: dict[str, Callable[..., Any]] = {
    "lerp": lambda a, b, f, reversed=False: b + (a - b) * f if reversed else a + (b - a) * f,
    "blend": lambda a, b, f: a * f + b * (1 - f),
    "l2_norm": naive_l2_norm,
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0),
    "add_activate": lambda a, b, x, y, z: ACTIVATIONS[z](ACTIVATIONS[x](a) + ACTIVATIONS[y](b)),
    "fast_linear": lambda x, w, b=None, act="none": ACTIVATIONS[act](
        (x[..., None, :] * w).sum(-1) + (0 if b is None else b)
    ),
    "control_k": lambda k, a, k_a: k + k * (a - 1) * k_a,
    "token_shift": naive_token_shift,
    "pack_kvakk": naive_pack,
    "time_first_v7": naive_time_first,
    "time_mix_v7": naive_time_mix,
    "channel_mix_v7": naive_channel_mix,
}


def _layers() -> list[tuple[int, Tensor | None, str]]:
    return [
        (rows, _randn(8) if rows % 2 else None, name) for rows, name in zip((1, 2, 3) * 3, ACTIVATIONS, strict=False)
    ]


def _calls(tokens: int = 37) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls of every operator, in float64."""
    torch.manual_seed(7)
    x, k, v, a = (_randn(3, tokens, WIDTH) for _ in range(4))
    row, a = _randn(WIDTH), a.sigmoid()
    kk = naive_l2_norm(k, HEADS)
    packed, state = naive_pack(k, v, a, kk, HEADS), _randn(3, HEADS, SIZE, SIZE)
    lengths = torch.tensor([tokens, 0, min(11, tokens)])
    key, value = _randn(8, WIDTH), _randn(WIDTH, 8)
    return [
        *(("lerp", (x, k, a)), ("lerp", (x, k, row, True)), ("lerp", (x, row, a[:, :1])), ("blend", (x, k, a))),
        *(("l2_norm", (x,)), ("l2_norm", (x, HEADS)), ("l2_norm", (x * 1e-3, 1, 0.5)), ("squared_relu", (x,))),
        *(("add_activate", (x, row, "none", "none", name)) for name in ACTIVATIONS),
        *(("add_activate", (x, k, "tanh", "silu", "none")), ("control_k", (k, a, row))),
        *(
            ("fast_linear", (x[:rows].mean(1) if tokens else x[:rows].sum(1), key, bias, name))
            for rows, bias, name in _layers()
        ),
        *(("fast_linear", (given, key)) for given in (x, x[0, 0] if tokens else row, x[:, :0], x.transpose(0, 1))),
        *(("token_shift", (x, k[:, 0].clone(), a[0, :4].clone(), end)) for end in (None, lengths) if tokens >= 4),
        *(("pack_kvakk", (k, v, a, kk, HEADS)), ("time_first_v7", (x, k, packed, _randn(HEADS, SIZE)))),
        *(("time_mix_v7", (x, k, packed, state, end)) for end in (None, lengths, lengths.int())),
        *(("channel_mix_v7", (x, _randn(3, WIDTH), row, key, value, end)) for end in (None, lengths)),
    ]


CALLS = [pytest.param(name, args, id=f"{name}-{index}") for index, (name, args) in enumerate(_calls())]


def _in(args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    return [arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]


def _several(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# --- tests -----------------------------------------------------------------------------------------------------------


def test_every_operator_is_called_here() -> None:
    assert {name for name, _ in _calls()} == set(NAMES) == set(NAIVE)


@pytest.mark.parametrize("tokens", [0, 1, 16, 37])
def test_they_are_what_the_naive_forms_are(tokens: int) -> None:
    """The kernels, and what is used where there are none."""
    for name, args in _calls(tokens):
        for form in (getattr(ops, name), getattr(rwkv7_operators, name)):
            for found, expected in zip(_several(form(*args)), _several(NAIVE[name](*args)), strict=True):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_recurrence_for_the_sizes_that_have_loops_of_their_own(size: int) -> None:
    r, w, k, v, kk = (_randn(2, 21, 2 * size) for _ in range(5))
    packed = naive_pack(k, v, w.sigmoid(), naive_l2_norm(kk, 2), 2)
    state, lengths = _randn(2, 2, size, size), torch.tensor([21, 20])
    for dtype in (torch.float64, torch.float32):
        given = _in((r, w, packed, state, lengths), dtype)
        expected = naive_time_mix(r, w, packed, state, lengths)
        for found, one in zip(ops.time_mix_v7(*given), expected, strict=True):
            torch.testing.assert_close(found, one.to(dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "args"), CALLS)
def test_types(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Kernels and plain forms give the same types, and numbers within PyTorch's tolerances; so do mixed types."""
    given = _in(args, dtype)
    for found, plain in zip(
        _several(getattr(ops, name)(*given)), _several(getattr(rwkv7_operators, name)(*given)), strict=True
    ):
        loose = {}
        if "mix" in name or name == "fast_linear":
            loose = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
        torch.testing.assert_close(found, plain, **loose)
    given[0] = given[0].double()
    if name not in ("channel_mix_v7", "fast_linear"):
        for found, plain in zip(
            _several(getattr(ops, name)(*given)), _several(getattr(rwkv7_operators, name)(*given)), strict=True
        ):
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "args"), CALLS)
def test_a_call_is_one_node_and_gives_what_the_cpu_gives(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Bit for bit, in repeated programs too, and with nothing mispredicted or run at once."""
    given = _in(args, dtype)
    expected = _several(getattr(ops, name)(*given))
    lazy = [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in given]
    for _ in range(3):
        marid.materialize(*[arg for arg in lazy if isinstance(arg, Tensor)])
        before = marid.stats().ops_captured
        found = _several(getattr(ops, name)(*lazy))
        assert marid.stats().ops_captured == before + 1
        assert found[0].operation == f"marid::{name}"  # pyright: ignore[reportAttributeAccessIssue]
        assert_same(found, expected)
    stats = marid.stats()
    assert not stats.mispredictions
    assert not stats.fallbacks


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_gradients(name: str, args: tuple[Any, ...]) -> None:
    """They are right; on the device they are the CPU's."""
    args = tuple([arg[:, :19] if name == "time_mix_v7" and i < 3 else arg for i, arg in enumerate(args)])
    if name == "time_mix_v7" and args[4] is not None:
        args = (*args[:4], args[4].clamp(max=19))

    def called(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return getattr(ops, name)(*[next(rest) if is_float(arg) else arg for arg in args])

    def is_float(arg: Any) -> bool:
        return isinstance(arg, Tensor) and arg.is_floating_point()

    inputs = [arg.detach().clone().requires_grad_() for arg in args if is_float(arg)]
    assert torch.autograd.gradcheck(called, inputs, fast_mode=True)

    def gradients(device: str) -> Any:
        given = [
            arg.detach().float().to(device).requires_grad_()
            if is_float(arg)
            else arg.to(device)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        total = sum(
            (part.square().sum() for part in _several(getattr(ops, name)(*given))), torch.zeros((), device=device)
        )
        return torch.autograd.grad(total, [arg for arg in given if is_float(arg)])

    for found, expected in zip(gradients(DEVICE), gradients("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 40])
@pytest.mark.parametrize("depth", [1, 17, 64, 200])
def test_products(rows: int, depth: int, dtype: torch.dtype) -> None:
    """The ways in which products are computed, of numbers whose sums are exact."""
    torch.manual_seed(0)
    x, weight = (torch.randint(-3, 4, shape).to(dtype) for shape in ((rows, depth), (70, depth)))
    bias = torch.randint(-3, 4, (70,)).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(dtype)
    assert torch.equal(ops.fast_linear(x, weight, bias), expected)
    assert torch.equal(ops.fast_linear(x, weight.t().contiguous().t(), bias), expected)
    assert torch.equal(ops.fast_linear(x, weight, bias, "relu"), expected.relu())


def test_what_is_behind_a_sequence_changes_nothing() -> None:
    """Not even NaN."""
    (_, (r, w, packed, state, _)), *_ = [call for call in _calls() if call[0] == "time_mix_v7"]
    alone = ops.time_mix_v7(r[:1, :9], w[:1, :9], packed[:1, :9], state[:1])
    padded = [tensor.clone() for tensor in (r[:1], w[:1], packed[:1])]
    for tensor in padded:
        tensor[:, 9:] = float("nan")
    for form in (ops.time_mix_v7, rwkv7_operators.time_mix_v7):
        y, after = form(*padded, state[:1], torch.tensor([9]))
        torch.testing.assert_close((y[:, :9], after), alone)
        assert not y[:, 9:].any()


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_misuse_is_an_error_at_its_line(device: str) -> None:
    x, shift, mix = (torch.randn(*shape, device=device) for shape in ((2, 3, 10), (2, 10), (4, 10)))
    packed, state = torch.randn(2, 3, 2, 4, 5, device=device), torch.randn(2, 2, 5, 5, device=device)
    for wrong in (
        lambda: ops.token_shift(x, shift, mix[:, :9]),
        lambda: ops.token_shift(x, shift[:1], mix),
        lambda: ops.token_shift(x, shift, mix, torch.ones(3, dtype=torch.int64, device=device)),
        lambda: ops.token_shift(x, shift, mix, torch.ones(2, device=device)),
        lambda: ops.time_mix_v7(x, x, packed[:, :2], state),
        lambda: ops.time_mix_v7(x, x, packed, state[:1]),
        lambda: ops.time_first_v7(x, x, packed, mix),
        lambda: ops.pack_kvakk(x, x, x, x, 3),
        lambda: ops.l2_norm(x, 0),
        lambda: ops.lerp(x, x[:, :2], x),
        lambda: ops.squared_relu(x.long()),
        lambda: ops.channel_mix_v7(x, shift, mix, mix, mix),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(ValueError, match="does not know the activation 'swish'"):
        ops.add_activate(x, x, "swish", "none", "none")


def test_a_worker_admits_them() -> None:
    for name in NAMES:
        assert operator_named(f"marid.{name}.default").func._schema.name == f"marid::{name}"
