"""``marid.compile`` of modules, methods and functions that are copied, pickled, or called by several threads."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import marid
from tests.helpers import DEVICE, assert_same


def _same(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return function


def _block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self, compiled: Callable[[Any], Any]) -> None:
        super().__init__()
        self.block = compiled(_block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.block(x))


def _trained(device: str, compiled: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(compiled).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(8):
        model.train(number % 2 == 0)
        optimizer.zero_grad()
        model(torch.full((3, 4), number / 8).to(device)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def test_a_part_of_another_module() -> None:
    """Its parameters, their names, its mode and its device are those of the module."""
    expected = _trained("cpu", _same)
    found = _trained(DEVICE, marid.compile)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor)
    model = Model(marid.compile)
    assert isinstance(model.block, nn.Sequential)
    assert "block.0.weight" in dict(model.named_parameters())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Model(_same).named_modules()]
    assert repr(model) == repr(Model(_same))
    model.to(DEVICE).block.eval()
    assert not model.block[0].training
    assert model.block[0].weight.device.type == "remote_accelerator"


def test_it_is_replayed_there() -> None:
    model = Model(marid.compile).to(DEVICE)
    x = torch.ones(3, 4, device=DEVICE)
    for _ in range(6):
        model(x).sum().backward()
    assert model.block.stats().replays == 3  # the first one has no gradients


def test_a_container() -> None:
    compiled = marid.compile(_block().to(DEVICE))
    assert len(compiled) == 3
    assert [type(one) for one in compiled] == [nn.Linear, nn.Tanh, nn.Linear]
    compiled[1] = nn.ReLU()
    assert isinstance(compiled[1], nn.ReLU)
    del compiled[2]
    assert compiled
    assert "stats" in dir(compiled)
    assert not marid.compile(nn.Sequential())
    assert marid.compile(nn.Identity())


def test_what_is_registered_counts() -> None:
    def run(device: str, compiled: Callable[[Any], Any]) -> list[Any]:
        block, found = compiled(_block().to(device)), []
        x = torch.linspace(-1, 1, 8).reshape(2, 4).to(device)
        for number in range(9):
            if number == 3:
                block.register_forward_hook(lambda _module, _args, out: out * 2)
            if number == 6:
                parametrize.register_parametrization(block[0], "weight", nn.Tanh())
                linear = compiled(nn.Linear(4, 4).to(device))
                parametrize.register_parametrization(linear, "weight", nn.Tanh())
                found.append(linear.weight.abs().max().item() < 1)
                linear(x)
            found.append(block(x).sum().item())
        return found

    assert run(DEVICE, marid.compile) == run("cpu", _same)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "save"])
def test_copies(way: str) -> None:
    """A copy is compiled too; what shares the parameters is what does with a plain module."""
    model = Model(marid.compile).to(DEVICE)
    x = torch.ones(3, 4, device=DEVICE)
    model(x)
    if way == "save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    else:
        ways = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}
        copied = ways[way](model)
    assert (copied.block is model.block) == (way == "copy")
    with torch.no_grad():
        copied.block[0].weight.add_(1)
    assert (model(x).sum().item() == copied(x).sum().item()) == (way == "copy")
    for _ in range(5):
        copied.block(x)
    assert copied.block.stats().replays >= 3
    assert copy.copy(model.block)[0] is model.block[0]


@marid.compile
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_function_is_its_copy() -> None:
    """As any function, which is pickled by its name."""
    assert copy.deepcopy([double])[0] is double
    assert pickle.loads(pickle.dumps(double)) is double
    other = marid.compile(_same)
    assert pickle.loads(pickle.dumps(other))(3) == 3


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    @marid.compile
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    part = marid.compile(nn.Identity())


def test_a_method() -> None:
    one, other = Scaled(2.0), Scaled(3.0)
    x = torch.ones(2, device=DEVICE)
    for _ in range(4):
        assert one.step(x).tolist() == [2.0, 2.0]
        assert other.step(x).tolist() == [3.0, 3.0]
    assert one.step.__self__ is one
    assert one.step == one.step
    assert one.step.stats().replays > 0
    assert isinstance(one.part, nn.Identity)
    assert pickle.loads(pickle.dumps(one.step)).__self__.by == 2.0


def test_a_function_that_waits_for_a_thread_that_calls_it() -> None:
    def run(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return x * 2
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(compiled(x, depth - 1)))
        thread.start()
        thread.join()
        return found[0] + 1

    compiled = marid.compile(run)
    for _ in range(4):
        assert compiled(torch.ones(1, device=DEVICE), 1).item() == 3.0


def test_hooks_that_were_removed() -> None:
    """They leave an empty dictionary behind, as unpickling a parameter does."""
    linear = nn.Linear(3, 3).to(DEVICE)
    linear.weight.register_hook(lambda grad: grad * 2).remove()
    compiled = marid.compile(linear)
    for _ in range(6):
        compiled(torch.ones(2, 3, device=DEVICE)).sum().backward()
    assert compiled.stats().replays == 3
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[12.0] * 3] * 3
    linear.weight.register_hook(lambda grad: grad * 2)
    linear.zero_grad()
    compiled(torch.ones(2, 3, device=DEVICE)).sum().backward()
    assert linear.weight.grad.tolist() == [[4.0] * 3] * 3


@pytest.mark.parametrize("way", ["vector", "pickled"])
def test_parameters_in_memory_that_nobody_holds(way: str) -> None:
    """They are views of one vector, or of the bytes of a file."""

    def run(device: str, compiled: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        model = _block().to(device)
        if way == "vector":
            vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            nn.utils.vector_to_parameters(vector, model.parameters())
            del vector
        else:
            model = pickle.loads(pickle.dumps(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        forward = model
        stepped, found = compiled(step), []
        x = torch.linspace(-1, 1, 8).reshape(2, 4).to(device)
        found += [stepped(x).item() for _ in range(8)]
        forward = compiled(model)
        for _ in range(6):
            optimizer.zero_grad()
            forward(x).sum().backward()
            found += [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.125)
            if way == "vector":
                found.append(model[0].weight.untyped_storage().nbytes())
        return (stepped, forward), [*found, *[parameter.tolist() for parameter in model.parameters()]]

    functions, found = run(DEVICE, marid.compile)
    assert found == run("cpu", _same)[1]
    assert all(function.stats().replays >= 3 for function in functions)


def test_what_returns_the_module() -> None:
    """``to``, ``eval`` and the like return the compiled module, and a compiled one can be compiled again."""
    compiled = marid.compile(marid.compile(nn.Linear(4, 4))).to(DEVICE).eval()
    assert isinstance(compiled, nn.Linear)
    for _ in range(5):
        compiled(torch.ones(3, 4, device=DEVICE))
    assert compiled.stats().replays == 3
    assert [name for name, _ in nn.Sequential(compiled).named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Identity()])
def test_a_result_that_was_written_in_place(last: nn.Module) -> None:
    """By the function, before it is saved for the backward; written afterwards it raises as in eager PyTorch."""

    def run(device: str, compiled: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model, found = compiled(nn.Sequential(nn.Linear(4, 4), last).to(device)), []
        for number in range(7):
            out = model(torch.linspace(-1, 1, 12).reshape(3, 4).to(device))
            found.append(out._version)
            if number == 5:
                out.mul_(2)
            try:
                out.square().sum().backward()
            except RuntimeError as error:
                found.append(str(error)[:60])
            found.append(model[0].weight.grad.sum().item())
        return found

    assert run(DEVICE, marid.compile) == run("cpu", _same)


class Stateful(nn.Module):
    """Its attributes have names that a compiled function has, too, and it gets its weight from its first input."""

    def __init__(self) -> None:
        super().__init__()
        self._state = 2.0
        self._stats = {"calls": 0}
        self.linear = nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self._state


def test_attributes_and_identity_are_those_of_the_module() -> None:
    torch.manual_seed(0)
    module = Stateful().to(DEVICE)
    compiled = marid.compile(module)
    x = torch.ones(2, 4, device=DEVICE)
    for number in range(8):
        if number == 5:
            compiled._state = 3.0
        assert torch.equal(compiled(x), module(x))
    assert module._state == compiled._state == 3.0
    assert compiled._stats == {"calls": 0}
    assert compiled.stats().replays >= 3
    assert vars(compiled) is vars(module)
    outer = nn.Sequential(compiled)
    assert compiled in list(outer.modules())
    assert {compiled: 1}[module] == 1
    assert compiled != marid.compile(nn.Identity())


def test_values_of_a_thread() -> None:
    local = threading.local()

    @marid.compile
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * local.by

    def run(by: float, found: list[float]) -> None:
        local.by = by
        found += [scaled(torch.ones(1, device=DEVICE)).item() for _ in range(5)]

    results: dict[float, list[float]] = {2.0: [], 3.0: []}
    run(2.0, results[2.0])
    thread = threading.Thread(target=run, args=(3.0, results[3.0]))
    thread.start()
    thread.join()
    run(2.0, results[2.0])
    assert results == {2.0: [2.0] * 10, 3.0: [3.0] * 5}


def test_a_value_of_a_thread_that_comes_later() -> None:
    local = threading.local()
    scaled = marid.compile(lambda x: x * getattr(local, "by", 2.0))
    x = torch.ones(1, device=DEVICE)
    assert [scaled(x).item() for _ in range(5)] == [2.0] * 5
    local.by = 3.0
    assert [scaled(x).item() for _ in range(5)] == [3.0] * 5


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    sizes: dict[str, int] = dataclasses.field(default_factory=dict, metadata={"help": "of layers"})


def test_a_dataclass_and_a_read_only_view_of_a_dict() -> None:
    config, shown = Config(), {"a": 1.0}
    view = types.MappingProxyType(shown)

    @marid.compile
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * config.scale * sum(view.values())

    x = torch.ones(1, device=DEVICE)
    assert [scaled(x).item() for _ in range(5)] == [2.0] * 5
    assert scaled.stats().replays == 3
    config.scale = 3.0
    assert scaled(x).item() == 3.0
    shown["a"] = 2.0
    assert [scaled(x).item() for _ in range(4)] == [6.0] * 4
    shown["b"] = 1.0
    assert [scaled(x).item() for _ in range(4)] == [9.0] * 4
