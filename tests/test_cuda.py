"""Workers on a GPU, where there is one: values against eager PyTorch on the CPU, within tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marid.frontend.engines import engine_of
from tests.helpers import DEVICE
from tests.remote_helpers import connected

GPU = f"{DEVICE}:2"

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.in_process("connects workers of its own"),
]


@pytest.fixture(autouse=True, scope="module")
def _worker() -> Iterator[None]:
    with connected(2, device="cuda:0"):
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
    stats = engine_of(2).worker_stats()
    assert stats is not None
    assert stats["graph_replays"] > 5


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
    conv, norm, lstm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(36, 16)
    x = torch.randn(2, 3, 8, 8)

    def run(device: str) -> list[torch.Tensor]:
        parts = [part.to(device) for part in (conv, norm, lstm)]
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
