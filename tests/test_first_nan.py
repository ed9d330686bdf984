"""``marid.first_nan``: which operator made it, found without running anything of what is pending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import marid
from tests.helpers import DEVICE


def line(marker: str) -> str:
    """``file:line`` of the line in this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{__file__}:{found}"


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.log(y - y.max() - 1).relu()  # log


def test_the_operator_with_module_line_and_inputs() -> None:
    """Nothing runs, and the values are those of an undisturbed run."""
    model = nn.Sequential(nn.Linear(4, 4), Broken()).to(DEVICE)
    loss = model(torch.ones(3, 4, device=DEVICE)).sum()
    before = marid.epoch(), marid.stats().pending_nodes
    found = marid.first_nan(loss)
    assert (marid.epoch(), marid.stats().pending_nodes) == before
    assert found is not None
    assert (found.operator, found.module_path, found.phase) == ("aten::log", "1", "forward")
    assert found.source == line("log")
    assert (found.count, found.total, found.was_there) == (12, 12, False)
    assert (found.inputs[0] < 0).all()
    assert str(found) == f"aten::log at {line('log')} in module '1' (forward): 12 of 12 elements"
    assert loss.isnan().item()


def test_in_a_backward() -> None:
    """The square root of zero has no slope: infinity times zero."""
    x = torch.zeros(3, device=DEVICE, requires_grad=True)
    with marid.no_sync():
        (x.sqrt() * 0).sum().backward()  # backward
    found = marid.first_nan()
    assert found is not None
    assert (found.phase, found.source) == ("backward", line("backward"))
    assert x.grad is not None
    assert x.grad.isnan().all().item()


def test_nothing_is_none() -> None:
    x = torch.randn(5, device=DEVICE)
    assert marid.first_nan(x.exp().log().sum()) is None
    assert marid.first_nan(torch.zeros(2, device=DEVICE).log()) is None


def test_infinities_where_they_are_asked_for() -> None:
    found = marid.first_nan(torch.zeros(2, device=DEVICE).log(), infinite=True)
    assert found is not None
    assert (found.operator, found.count) == ("aten::log", 2)


def test_in_place_views_and_random_numbers_change_nothing() -> None:
    torch.manual_seed(5)
    x = torch.rand(6, device=DEVICE)
    marid.materialize(x)
    kept = x.cpu()
    x[2:4].sub_(2).sqrt_()  # sqrt
    noise = torch.rand(6, device=DEVICE)
    found = marid.first_nan()
    assert found is not None
    assert (found.operator, found.source, found.count) == ("aten::sqrt_", line("sqrt"), 2)
    assert (found.inputs[0] < 0).all()
    expected = kept.clone()
    expected[2:4].sub_(2).sqrt_()
    torch.testing.assert_close(x.cpu(), expected, equal_nan=True, rtol=0, atol=0)
    torch.manual_seed(5)
    torch.rand(6)
    torch.testing.assert_close(noise.cpu(), torch.rand(6), rtol=0, atol=0)


def test_memory_that_nobody_has_written_is_not_looked_at() -> None:
    x = torch.empty(4, device=DEVICE)
    assert marid.first_nan(x.fill_(1).sum()) is None


def test_what_was_there_before() -> None:
    x = torch.tensor([1.0, float("nan")]).to(DEVICE)
    found = marid.first_nan(x + 1)
    assert found is not None
    assert found.was_there
    with pytest.raises(marid.errors.LazyTensorError, match="has run"):
        marid.first_nan(x)
    with pytest.raises(TypeError):
        marid.first_nan(torch.ones(2))


def test_the_script_does_it_again(tmp_path: Path) -> None:
    """In a process that knows nothing of Marid; the inputs are data."""
    x = torch.randn(3, 4, device=DEVICE)
    y = torch.nn.functional.layer_norm(torch.addcdiv(x * 0, x, x.t().t() * 0, value=-1.5), (4,))
    found = marid.first_nan(y)
    assert found is not None
    script = found.save(tmp_path / "nan")
    done = subprocess.run(
        [sys.executable, str(script)], env={"MARID_AUTOLOAD": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nan" in done.stdout
    assert found.operator in script.read_text()
    loaded = torch.load(tmp_path / "nan" / "inputs.pt", weights_only=True)
    assert len(loaded) == len(found.inputs)
