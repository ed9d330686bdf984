"""``torch.compile`` in a process with Marid: as without it on the CPU, and right with tensors of the device."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import marid
from tests.helpers import DEVICE, assert_same


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))


def test_a_module_on_the_cpu_is_one_graph() -> None:
    model, x = _model(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_a_training_step_on_the_cpu() -> None:
    def train(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torch.compile(step, backend="eager") if compile_it else step
        return [run(torch.full((4, 8), float(number))) for number in range(4)]

    torch.testing.assert_close(train(True), train(False))  # before PyTorch 2.12 Dynamo's steps round elsewhere


def _layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x.to(w.device) @ w) * 2 + 1


def _reading(w: Tensor, x: Tensor) -> Tensor:
    y = torch.tanh(x.to(w.device) @ w)
    return y * 2 if y.sum().item() > 0 else y * 3


def _coming_back(w: Tensor, x: Tensor) -> Tensor:
    return (x.to(w.device) @ w).cpu() * 2


def _with_state(w: Tensor, x: Tensor) -> Tensor:
    state = {"mean": torch.zeros((), device=w.device), "layers": [w, w.t()]}
    for layer in state["layers"]:
        x = torch.tanh(x.to(w.device) @ layer)
    return x + state["mean"].lerp_(x.mean(), 0.5)


@pytest.mark.parametrize("function", [_layer, _reading, _coming_back, _with_state])
def test_functions_of_tensors_of_the_device(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    w, batches = torch.randn(8, 8), torch.randn(4, 5, 8)
    expected = [function(w, x) for x in batches]
    compiled = torch.compile(function, backend="eager")
    weight = w.to(DEVICE)
    assert_same([compiled(weight, x) for x in batches], expected)


def _made_there(w: Tensor, x: Tensor) -> Tensor:
    y = torch.ones(8, device=w.device) + x.to(w.device.type)
    return y.relu() * 2


def _of_the_host(_w: Tensor, x: Tensor) -> Tensor:
    return (x.to(DEVICE) * 2 + 1).relu().cpu()


@pytest.mark.parametrize("function", [_made_there, _of_the_host])
def test_tensors_of_the_device_that_are_made_inside(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    w, batches = torch.randn(8, 8).to(DEVICE), torch.randn(4, 5, 8)
    compiled = torch.compile(function)  # with Inductor, which knows no such device
    assert_same([compiled(w, x) for x in batches], [function(w.cpu(), x) for x in batches])


def test_what_ran_with_the_device_is_compiled_for_the_cpu() -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model, x = _model(), torch.randn(4, 8)
    expected = model(x)
    there = torch.compile(copy.deepcopy(model).to(DEVICE), backend=backend)
    assert_same([there(x.to(DEVICE)) for _ in range(10)], [expected] * 10)
    assert not graphs
    assert_same(torch.compile(model, backend=backend, fullgraph=True)(x), expected)
    assert graphs


def test_functions_that_hide_their_tensors_are_not_traced_for_ever() -> None:
    weight = torch.ones(8, 8, device=DEVICE)
    hidden = {"weight": [weight]}
    compiled = torch.compile(lambda x: x["x"] @ hidden["weight"][0], backend="eager")
    for _ in range(9):
        compiled({"x": weight})
    with mock.patch("torch._dynamo.convert_frame._compile", side_effect=AssertionError):
        assert compiled({"x": weight}).sum().item() == 8**3


def test_an_export_of_a_module_on_the_device() -> None:
    model, x = _model().to(DEVICE), torch.randn(4, 8).to(DEVICE)
    exported = torch.export.export(model, (x,), strict=True)
    assert torch.equal(exported.module()(x).cpu(), model(x).cpu())


def test_a_function_that_marid_compiles_too() -> None:
    w, batches = torch.randn(8, 8), torch.randn(4, 5, 8)
    weight = w.to(DEVICE)
    inner = marid.compile(lambda x: torch.tanh(x @ weight))
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager")
    with torch.no_grad():
        assert_same([outer(x.to(DEVICE)) for x in batches], [torch.tanh(x @ w) + 1 for x in batches])


def test_modules_trained_on_the_device() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = _model().to(device)
        compiled = torch.compile(model) if device == DEVICE else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = torch.compile(optimizer.step) if device == DEVICE else optimizer.step
        losses = []
        for number in range(4):
            loss = compiled(torch.full((4, 8), float(number)).to(device)).square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_same(train(DEVICE), train("cpu"))


_FIRST = "import torch\nimport torch._dynamo\nimport marid\n"
_LATER = "import torch\nimport marid\n"
_READ = """
w = torch.ones(8, 8, device="remote_accelerator")
@torch.compile(backend="eager")
def read(x):
    y = torch.relu(x @ w)
    return y * 2 if y.sum().item() > 0 else y * 3
print(read(torch.ones(2, 8, device="remote_accelerator")).sum().item())
"""
_MODULE = """
print(torch.compile(torch.nn.Linear(8, 2), backend="eager")(torch.ones(4, 8)).shape)
"""
_COMPILED = """
import sys
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)).to("remote_accelerator")
step = marid.compile(model)
for _ in range(4):
    step(torch.arange(4).to("remote_accelerator")).sum().item()
assert step.stats().replays, step.stats()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (_FIRST + _READ, "256.0"),
        (_LATER + _READ, "256.0"),
        (_LATER + _MODULE, "torch.Size([4, 2])"),
        (_LATER + _COMPILED, "False"),
    ],
    ids=["before", "later", "a module", "not at all"],
)
def test_when_dynamo_is_imported(code: str, printed: str) -> None:
    """Before or after Marid, and not at all for ``marid.compile``: it takes half a second."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == printed
    assert "global hooks" not in ran.stderr  # PyTorch warns of them; these are Marid's own
