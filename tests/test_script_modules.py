"""Modules of TorchScript on the device: their parameters are C++'s, and move with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import marid  # noqa: F401
from tests.helpers import DEVICE, assert_same


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def _scripted(way: str) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Scaled()) if way == "scripted" else torch.jit.trace(Scaled(), torch.ones(1, 3))


@pytest.mark.parametrize("way", ["scripted", "traced"])
def test_it_moves_there_and_back(way: str) -> None:
    def results(device: str) -> list[Any]:
        module = _scripted(way)
        assert module.to(device) is module
        places = [tensor.device.type for tensor in (*module.parameters(), *module.buffers())]
        assert places == [torch.device(device).type] * 3
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(1, 3, device=device)).sum().backward()
        optimizer.step()
        outputs = module(torch.ones(1, 3, device=device))
        return [outputs, module.to("cpu")(torch.ones(1, 3)), module.linear.weight, module.to(torch.float64).linear.bias]

    assert_same(results(DEVICE), results("cpu"))


def test_its_move_is_the_first_use() -> None:
    script = f"""
    import warnings
    warnings.simplefilter("ignore")
    import torch, marid
    module = torch.jit.script(torch.nn.Linear(3, 2)).to({DEVICE!r})
    print(module.weight.device.type, module(torch.ones(1, 3, device={DEVICE!r})).shape[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [DEVICE, "2"], done.stderr
