"""Subclasses of ``torch.Tensor`` with values on the device: their class is kept, and values are those of the CPU."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch

import marid
from tests.helpers import DEVICE, assert_same


class Image(torch.Tensor):
    """Keeps its class through operations, as PyTorch's own implementation does."""

    unit = "pixel"

    def brightness(self) -> torch.Tensor:
        return self.mean()


class Counted(torch.Tensor):
    """Counts what is done to it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    """Whose results are ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@pytest.mark.parametrize("immediate", [False, True], ids=["recorded", "at once"])
@pytest.mark.parametrize("cls", [Image, Counted, Plain])
def test_a_subclass_is_what_it_is_on_the_cpu(
    cls: type[torch.Tensor], immediate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes of results, values, gradients, and how often its function is called."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 18 if immediate else 0)

    def results(device: str) -> list[Any]:
        found: list[Any] = []
        for _ in range(12 if immediate else 2):
            Counted.calls = 0
            x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
            y = x.as_subclass(cls)
            z = (y * 2 + 1).relu()[:, 1:]
            w = torch.cat([z, z.detach()])
            w += 1
            w.sum().backward()
            many = torch.stack([y, y]).unbind()
            found += [isinstance(one, cls) for one in (x, y, z, w, *many, y.max(), y.max(0).values)]
            found += [isinstance(y, torch.Tensor), y.requires_grad, y.is_leaf, y._is_view(), x.grad, y.detach(), z, w]
            found += [w.sum().item(), y.shape, Counted.calls, y.tolist()]
        return found

    assert_same(results(DEVICE), results("cpu"))


def test_methods_and_attributes() -> None:
    image = torch.ones(2, 2, device=DEVICE).as_subclass(Image)
    assert image.brightness().item() == 1
    assert (image + 1).unit == "pixel"
    assert isinstance(image, marid.LazyTensor)
    assert not image.materialized or image.cpu().sum().item() == 4
    assert isinstance(image.cpu(), Image)
    assert image.as_subclass(torch.Tensor) is not None
    assert isinstance(image.as_subclass(Image), Image)
    assert type(image + 1) is type(image)
    assert_same(image.numpy().tolist(), [[1.0, 1.0], [1.0, 1.0]])
    assert "Image" in repr(image)


def test_memory_is_shared_as_on_the_cpu() -> None:
    def results(device: str) -> list[Any]:
        x = torch.zeros(4).to(device)
        image = x.as_subclass(Image)
        image[1:3] = 5
        x.add_(1)
        return [x, torch.Tensor.tolist(x.cpu()), image, image._version, x._version]

    assert_same(results(DEVICE), results("cpu"))


@pytest.mark.parametrize("cls", [Image, Counted, Plain])
def test_the_data_of_a_subclass(cls: type[torch.Tensor]) -> None:
    def results(device: str) -> list[Any]:
        x = torch.ones(3).to(device).as_subclass(cls)
        Counted.calls = 0
        data = x.data
        called = Counted.calls
        data.add_(1)
        return [isinstance(data, cls), called, data, x, x.requires_grad_().data.requires_grad]

    assert_same(results(DEVICE), results("cpu"))


def test_a_copy_of_a_subclass() -> None:
    image = torch.ones(2, device=DEVICE).as_subclass(Image)
    for made in (copy.copy(image), copy.deepcopy(image), image.clone()):
        assert isinstance(made, Image)
        assert made.tolist() == [1.0, 1.0]


class Scaled(torch.nn.Parameter):
    """A parameter with attributes, as libraries for manifolds and quantisation have them."""

    scale: float

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, scale: float = 1.0) -> Self:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[attr-defined]
        made.scale = scale
        return made

    def doubled(self) -> torch.Tensor:
        return self * 2


class Named(torch.nn.Parameter):
    """A parameter without a constructor of its own."""

    def title(self) -> str:
        return "named"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled(torch.arange(6.0).view(2, 3), scale=3.0)
        self.named = Named(torch.ones(3))
        self.tied = self.scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.scaled.doubled() * self.scaled.scale + self.named).square().mean()


def _classes(net: Net) -> list[Any]:
    found: list[Any] = [net.tied is net.scaled, net.scaled.scale, getattr(net.named, "title", str)()]
    for one in net.parameters():
        found += [isinstance(one, cls) for cls in (Scaled, Named, torch.nn.Parameter)]
        found += [one.is_leaf, one.requires_grad, isinstance(one * 1, torch.nn.Parameter), one.detach(), one.grad]
    return found


@pytest.mark.parametrize("way", ["moved", "made there", "copied", "copied shallowly", "moved back", "moved twice"])
def test_a_subclass_of_parameter_stays_one(way: str) -> None:
    """Its class, its attributes, its identity for optimizers, and what training makes of it are those of the CPU."""

    def results(device: str) -> list[Any]:
        net = Net()
        parameters = list(net.parameters())
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        if way == "made there":
            net.scaled = net.tied = Scaled(net.scaled.detach().to(device), scale=3.0)
            net.named = Named(net.named.data.to(device))
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        else:
            net.to(device)
            assert [one is two for one, two in zip(net.parameters(), parameters, strict=True)] == [True, True]
        if way == "moved twice":
            net.cpu().to(device)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            loss = net(torch.full((4, 2), float(number)).to(device))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if way == "copied":
            net.scaled.__dict__.clear()  # a copy is made by the constructor, of the data alone
            net.scaled.scale = 1.0
            net = copy.deepcopy(net)
        if way == "copied shallowly":
            net.named = copy.copy(net.named)
        if way == "moved back":
            net.cpu()
            found += [type(one) for one in net.parameters()]
        return found + _classes(net) + list(net.state_dict().values())

    assert_same(results(DEVICE), results("cpu"))


def test_a_class_is_given_by_the_functions_of_tensor() -> None:
    """Libraries call them by name, and not as methods."""
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    image = torch.Tensor.as_subclass(x, Image)
    assert isinstance(image, Image)
    assert image.requires_grad
    made = torch.Tensor._make_subclass(Image, x)  # type: ignore[attr-defined]
    assert isinstance(made, Image)
    assert not made.requires_grad
    assert made.brightness().item() == 1
    parameter = torch.Tensor._make_subclass(torch.nn.Parameter, x, True)  # type: ignore[attr-defined]
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(x.as_subclass(torch.nn.Parameter), torch.nn.Parameter)
    assert type(torch.Tensor._make_subclass(Image, torch.ones(2))) is Image  # type: ignore[attr-defined]


def test_a_saved_parameter_of_a_subclass() -> None:
    """As of the CPU, it is loaded as an ordinary parameter with its attributes."""

    def results(device: str) -> list[Any]:
        file = io.BytesIO()
        torch.save(Net().to(device).scaled, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return [
            isinstance(loaded, torch.nn.Parameter),
            isinstance(loaded, Scaled),
            loaded.scale,
            loaded.device.type,
            loaded,
        ]

    there, here = results(DEVICE), results("cpu")
    assert there.pop(3) == DEVICE
    here.pop(3)
    assert_same(there, here)


class Marked(torch.Tensor):
    """A class that adds nothing."""


def test_what_leaves_the_device_has_the_users_class() -> None:
    there, here = (torch.arange(3.0).to(device).as_subclass(Marked) for device in (DEVICE, "cpu"))
    moved = there.cpu()
    assert type(moved) is type(here.cpu()) is Marked
    assert type(moved + 1) is type(moved.clone()) is Marked
    assert moved.tolist() == (moved + 0).numpy().tolist() == [0.0, 1.0, 2.0]
    assert torch.empty(3).copy_(moved).tolist() == [0.0, 1.0, 2.0]
    assert type(moved.to(DEVICE)) is type(there)
    assert type(there.as_subclass(torch.Tensor)) is marid.LazyTensor


_FIRST_USE = """
import torch, marid
from tests.test_subclasses import Net, Scaled
net = Net()
before = list(net.parameters())
net.to("remote_accelerator")
assert all(one is two for one, two in zip(net.parameters(), before, strict=True))
assert net.tied is net.scaled and isinstance(net.scaled, Scaled) and net.scaled.scale == 3.0
assert {one.device.type for one in before} == {"remote_accelerator"}
net(torch.ones(4, 2).to("remote_accelerator")).backward()
assert all(one.grad is not None for one in before)
"""


def test_a_module_with_tied_parameters_of_a_subclass_is_the_first_use() -> None:
    """PyTorch's own function moves it then, and finds the second of them moved."""
    done = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


class OfData(torch.Tensor):
    """A class that is made of data alone, and has an attribute."""

    name = "nobody"

    def __new__(cls, data: torch.Tensor) -> Self:
        made = torch.Tensor._make_subclass(cls, data)  # type: ignore[attr-defined]
        made.name = "somebody"
        return made

    def new_empty(self, *size: Any, **_: Any) -> OfData:  # which PyTorch's `__deepcopy__` asks for
        return OfData(torch.empty(*size, device=self.device))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_tensor_of_a_class_that_was_made_a_parameter_is_copied(copied: Callable[[Any], Any]) -> None:
    def results(device: str) -> list[Any]:
        parameter = torch.nn.Parameter(OfData(torch.ones(3).to(device)))
        made = copied(parameter)
        return [isinstance(made, torch.nn.Parameter), isinstance(made, OfData), made.requires_grad, vars(made), made]

    assert_same(results(DEVICE), results("cpu"))
