"""``torch.distributed`` with gloo between processes, equal to what it does on the CPU; ``nn.DataParallel``."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import DEVICE

SCRIPTS = Path(__file__).parent / "framework_scripts"


def _printed(script: str, folder: Path, world: int, device: str) -> str:
    environment = os.environ | {"WORLD_SIZE": str(world), "MEETING": str(folder / device)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / f"{script}.py"), device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, printed
    return printed[0][0]


@pytest.mark.parametrize("world", [1, 2])
def test_distributed_data_parallel_and_collectives(tmp_path: Path, world: int) -> None:
    """Buckets that are views or not, unused parameters, static graphs, accumulation; each collective."""
    expected = _printed("distributed_data_parallel", tmp_path, world, "cpu")
    assert expected
    assert _printed("distributed_data_parallel", tmp_path, world, DEVICE) == expected


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.conformance), 2])
def test_fully_sharded_and_distributed_tensors(tmp_path: Path, world: int) -> None:
    """FSDP2: parts of unequal size, accumulation, mixed precision, whole state; tensor parallelism; functional
    collectives; all bit for bit."""
    expected = _printed("fully_sharded", tmp_path, world, "cpu")
    assert expected
    assert _printed("fully_sharded", tmp_path, world, DEVICE) == expected


@pytest.mark.parametrize("world", [1, 2])
def test_groups_need_no_backend(tmp_path: Path, world: int) -> None:
    expected = _printed("group_backends", tmp_path, world, "cpu")
    assert expected.count("\n") == 5
    assert _printed("group_backends", tmp_path, world, DEVICE) == expected


@pytest.mark.parametrize("devices", [[0], [0, 1], [1, 0, 2], None])
def test_data_parallel(devices: list[int] | None) -> None:
    """Replicas on several devices of this process compute what the module by itself does."""
    torch.manual_seed(0)
    count = torch.remote_accelerator.device_count()  # type: ignore[attr-defined]
    if devices is not None and max(devices) >= count:
        pytest.skip("there are fewer devices")
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0).eval(), nn.Linear(8, 1))
    first = 0 if devices is None else devices[0]
    module = copy.deepcopy(plain).to(f"{DEVICE}:{first}")
    parallel = nn.DataParallel(module, devices)
    assert parallel.device_ids == (list(range(count)) if devices is None else devices)
    for _ in range(2):
        x, y = torch.randn(9, 4), torch.randn(9, 1)
        losses = []
        for one, device in ((plain, "cpu"), (parallel, f"{DEVICE}:{first}")):
            out = one(x.to(device))
            assert out.device == torch.device(device)
            loss = F.mse_loss(out, y.to(device))
            one.zero_grad()
            loss.backward()
            losses.append(loss.cpu())
            torch.optim.SGD(one.parameters(), 0.1).step()
        torch.testing.assert_close(*losses)
        for p, q in zip(plain.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(q.cpu(), p)
