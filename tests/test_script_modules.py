"""Modules of TorchScript on the device: their parameters are C++'s, and move with them."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
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


def _saved(module: Any) -> io.BytesIO:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(module, file := io.BytesIO())
    file.seek(0)
    return file


def _loaded(file: Any, device: str | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(file, device)


@pytest.mark.parametrize("way", ["scripted", "traced"])
def test_it_is_saved_from_there_and_loaded_there(way: str, tmp_path: Path) -> None:
    def results(device: str) -> list[Any]:
        module = _scripted(way).to(device)
        module.linear.bias.requires_grad_(False)
        path = tmp_path / f"{way}-{device}.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.save(path)
        found = []
        for loaded in (_loaded(_saved(module)), _loaded(path)):
            assert not loaded.linear.bias.requires_grad
            assert loaded.linear.weight.is_leaf
            assert loaded.linear.weight.requires_grad
            found += [loaded.to("cpu")(torch.ones(1, 3)), loaded.to(device)(torch.ones(1, 3, device=device))]
        again = _loaded(_saved(loaded), device)
        assert again.scale.device.type == torch.device(device).type
        again(torch.ones(1, 3, device=device)).sum().backward()
        return [*found, again.linear.weight, again.linear.weight.grad, module.linear.weight]

    assert_same(results(DEVICE), results("cpu"))


def test_a_constant_there_cannot_be_saved() -> None:
    module = Scaled()
    module.constant = torch.ones(2, device=DEVICE)  # neither a parameter nor a buffer: it does not move
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module).to(DEVICE)
    with pytest.raises(RuntimeError, match=r"TorchScript does, move the tensor to the CPU first"):
        _saved(scripted)


@pytest.mark.parametrize("made", ["torch.jit.script(linear)", "loaded(linear)"])
def test_its_move_is_the_first_use(made: str) -> None:
    script = f"""
    import io, warnings
    warnings.simplefilter("ignore")
    import torch, marid
    def loaded(linear):
        torch.jit.save(torch.jit.script(linear), file := io.BytesIO())
        file.seek(0)
        return torch.jit.load(file)
    linear = torch.nn.Linear(3, 2)
    module = {made}.to({DEVICE!r})
    print(module.weight.device.type, module(torch.ones(1, 3, device={DEVICE!r})).shape[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [DEVICE, "2"], done.stderr
