"""Subclasses of ``torch.Tensor`` with values on the device: their class is kept, and values are those of the CPU."""

from __future__ import annotations

import copy
from typing import Any

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


def test_a_copy_of_a_subclass() -> None:
    image = torch.ones(2, device=DEVICE).as_subclass(Image)
    for made in (copy.copy(image), copy.deepcopy(image), image.clone()):
        assert isinstance(made, Image)
        assert made.tolist() == [1.0, 1.0]
