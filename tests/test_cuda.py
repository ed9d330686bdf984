"""Programs on a GPU, where there is one: values against eager PyTorch on the CPU, within tolerances."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.opinfo.core import OpInfo

from marid.engine.accelerated import AcceleratedEngine
from marid.frontend.engines import assign, engine_of, local_engine
from tests.conformance.opinfo import (
    Mismatch,
    SparseSample,
    check_forward,
    check_grad,
    name_of,
    operators,
    samples_of,
)
from tests.helpers import DEVICE
from tests.remote_helpers import connected

GPU = f"{DEVICE}:2"
_SAMPLES = 4  # of an operator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.in_process("connects workers of its own"),
]


@pytest.fixture(autouse=True, scope="module", params=["in this process", "on a worker"])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which engine the device has."""
    if request.param == "on a worker":
        with connected(2, device="cuda:0"):
            yield request.param
    else:
        assign([(2, AcceleratedEngine(torch.device("cuda:0")))])
        yield request.param
        assign([(2, local_engine)])


@pytest.fixture(autouse=True)
def _plain_float32() -> Iterator[None]:
    """As the CPU computes; a worker does so anyway."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def _close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def _training(device: str) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 64), layer, nn.Linear(64, 50)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randint(50, (4, 17)).to(device) for _ in range(12)]
    torch.manual_seed(1)
    losses = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_captured_and_the_cpus() -> None:
    _close(_training(GPU), _training("cpu"))
    engine = engine_of(2)
    stats = engine.worker_stats()
    replays = engine.captured.replays if isinstance(engine, AcceleratedEngine) else (stats or {})["graph_replays"]
    assert replays > 5


def test_random_numbers_are_the_cpus() -> None:
    torch.manual_seed(3)
    found = torch.randn(100, device=GPU).cpu(), F.dropout(torch.ones(100, device=GPU)).cpu()
    torch.manual_seed(3)
    expected = torch.randn(100), F.dropout(torch.ones(100))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (3000, 1000)])
def test_tensors_come_back_as_they_went(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(2, shape).to(dtype)
    for one in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
        back = one.to(GPU).cpu()
        assert torch.equal(back, one)
        assert back.stride() == one.stride()


def test_convolutions_and_recurrent_layers() -> None:
    """Other kernels, other layouts, and what only the CPU has."""
    torch.manual_seed(0)
    conv: Any = nn.Conv2d(3, 8, 3)
    norm, lstm = nn.BatchNorm2d(8), nn.LSTM(36, 16)
    x = torch.randn(2, 3, 8, 8)

    def run(device: str) -> list[torch.Tensor]:
        parts: list[Any] = [part.to(device) for part in (conv, norm, lstm)]
        y = parts[1](parts[0](x.to(device))).relu()
        out, _ = parts[2](y.flatten(2))
        return [y.cpu(), out.cpu(), torch.autograd.grad(out.sum(), parts[0].weight)[0].cpu()]

    expected = [one.detach() for one in run("cpu")]
    for found, wanted in zip(run(GPU), expected, strict=True):
        assert found.stride() == wanted.stride()
        _close(found.detach(), wanted)


def test_uploads_run_beside_the_kernels() -> None:
    """And nothing is read before it is there."""
    weight = torch.randn(512, 512)
    there = weight.to(GPU)
    sums = []
    for number in range(50):
        there = (there @ there).tanh()
        sums.append((torch.full((300, 300), float(number)).to(GPU) * 2).sum())
    assert [one.item() for one in sums] == [number * 2 * 300 * 300 for number in range(50)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_kernels_keep_for_their_backward(dtype: torch.dtype) -> None:
    """Other than the CPU's: other dtypes, other sizes, or nothing."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval(), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.LogSigmoid()]
    x, factors = torch.randn(8, 6).to(dtype), torch.randn(8, 6).to(dtype)

    def run(layer: nn.Module, device: str) -> list[torch.Tensor]:
        given = x.to(device).requires_grad_()
        out = layer.to(device, dtype)(given)
        weights = [given, *layer.parameters()]
        found = torch.autograd.grad((out * factors.to(device)).sum(), weights)
        return [one.detach().cpu().float() for one in (out, *found, *layer.buffers())]

    for layer in layers:
        expected = run(copy.deepcopy(layer), "cpu")
        for found, wanted in zip(run(copy.deepcopy(layer), GPU), expected, strict=True):
            tolerance = 1e-4 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "columns", "width"), [(64, 64, 32), (37, 37, 64), (20, 50, 16), (33, 33, 20)])
def test_attention(dtype: torch.dtype, is_causal: bool, rows: int, columns: int, width: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, length, width).to(dtype) for length in (rows, columns, columns)]
    factors = torch.randn(2, 3, rows, width).to(dtype)

    def run(device: str) -> list[torch.Tensor]:
        q, k, v = (inputs[index].to(device).requires_grad_() for index in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        found = torch.autograd.grad((out * factors.to(device)).sum(), (q, k, v))
        return [one.detach().cpu().float() for one in (out, *found)]

    for found, expected in zip(run(GPU), run("cpu"), strict=True):
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_layouts_and_shared_memory() -> None:
    """What is read has the strides that it has, and what is pickled shares memory as it did."""
    x = torch.randn(64, 48)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:, 3],
        lambda t: t[::2, 1:40:3],
        lambda t: t[0].expand(7, 48),
        lambda t: t.unfold(1, 9, 4),
    ]
    for view in views:
        found, expected = view(x.to(GPU)), view(x)
        assert torch.equal(found.cpu(), expected)
        assert found.stride() == expected.stride()
        assert torch.equal(expected.to(GPU).cpu(), expected)
    there = x.to(GPU)
    file = io.BytesIO()
    torch.save([there, there[1], there.t()], file)
    file.seek(0)
    whole, row, turned = torch.load(file, map_location="cpu")
    whole.zero_()
    assert not row.any()
    assert not turned.any()


def test_what_is_written_later_is_not_in_what_was_copied() -> None:
    pinned = torch.ones(1 << 20).pin_memory()
    plain = torch.ones(1 << 20)
    there = pinned.to(GPU), plain.to(GPU)
    pinned.zero_()
    plain.zero_()
    assert [one.sum().item() for one in there] == [1 << 20, 1 << 20]
    kept = there[0].cpu()
    there[0].zero_()
    assert kept.sum() == 1 << 20


@pytest.mark.conformance
@pytest.mark.parametrize("where", ["in this process"], indirect=True, scope="module")  # a worker has the same kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [check_forward, check_grad])
@pytest.mark.parametrize("op", operators(), ids=name_of)
@pytest.mark.usefixtures("where")
def test_operators_agree_with_the_cpu(op: OpInfo, check: Any, dtype: torch.dtype) -> None:
    """PyTorch's own database: values within tolerances; shapes, dtypes, strides and errors as on the CPU."""
    if dtype not in op.dtypes or (check is check_grad and not op.supports_autograd) or "empty" in op.name:
        pytest.skip("nothing to compare")
    torch.remote_accelerator.set_device(2)
    for sample in itertools.islice(samples_of(op, dtype, check is check_grad), _SAMPLES):
        with contextlib.suppress(SparseSample):
            try:
                check(op, sample)
            except Mismatch as mismatch:
                if mismatch.different is None:
                    raise
                tolerance = 1e-4 if dtype is torch.float32 else 5e-2
                torch.testing.assert_close(*mismatch.different, rtol=tolerance, atol=tolerance, equal_nan=True)
