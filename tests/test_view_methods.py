"""Methods that return views of the device's tensors: made in C++, as ``torch.Tensor`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import marid
from tests.helpers import DEVICE

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(6, 10),
    "view of one size": lambda x: x.view(-1),
    "view of a tuple": lambda x: x.view((3, -1)),
    "view of a list": lambda x: x.view([5, 12]),
    "view of a shape": lambda x: x.view(torch.Size((2, 30))),
    "view by keyword": lambda x: x.view(size=(2, 30)),
    "view of a dtype": lambda x: x.view(torch.int32),
    "view of two open sizes": lambda x: x.view(-1, -1),
    "view that does not fit": lambda x: x.view(7, 9),
    "view of no number": lambda x: x.view("a"),  # pyright: ignore[reportCallIssue, reportArgumentType]
    "view of nothing": lambda x: x.view(),  # pyright: ignore[reportCallIssue]
    "view of what is turned": lambda x: x.transpose(0, 2).view(60),
    "view of a part": lambda x: x[:, 1:].view(4, 2, 5),
    "view of a tensor's number": lambda x: x.view(torch.tensor(60)),  # pyright: ignore[reportCallIssue, reportArgumentType]
    "reshape": lambda x: x.reshape(6, 10),
    "reshape to itself": lambda x: x.reshape(x.shape),
    "reshape of what is turned": lambda x: x.transpose(0, 2).reshape(60),
    "reshape that does not fit": lambda x: x.reshape(7),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute of a tuple": lambda x: x.permute((0, -1, 1)),
    "permute by keyword": lambda x: x.permute(dims=(1, 0, 2)),
    "permute of too few": lambda x: x.permute(0, 1),
    "permute twice the same": lambda x: x.permute(0, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "transpose by keywords": lambda x: x.transpose(dim0=0, dim1=1),
    "transpose out of range": lambda x: x.transpose(0, 3),
    "transpose of one": lambda x: x.transpose(0),  # pyright: ignore[reportCallIssue]
    "expand": lambda x: x[:, :1].expand(4, 7, 5),
    "expand with open sizes": lambda x: x.expand(2, -1, -1, -1),
    "expand of a tuple": lambda x: x.expand((3, *x.shape)),
    "expand that does not fit": lambda x: x.expand(4, 4, 5),
    "expand to fewer": lambda x: x.expand(5),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "unsqueeze out of range": lambda x: x.unsqueeze(5),
    "unsqueeze of a fraction": lambda x: x.unsqueeze(1.5),  # pyright: ignore[reportArgumentType]
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze of more elements": lambda x: x.squeeze(0),
    "squeeze all": lambda x: x[:1, :, :1].squeeze(),
    "squeeze of several": lambda x: x[:1, :, :1].squeeze((0, 2)),
    "squeeze of a bool": lambda x: x[:1].squeeze(False),  # pyright: ignore[reportArgumentType]
    "of no elements": lambda x: x[:0].view(0, 15),
    "of a scalar": lambda x: x[0, 0, 0].view(1, 1).expand(2, 3),
    "by the function": lambda x: torch.Tensor.view(x, 60),
}


def _both() -> tuple[Tensor, Tensor]:
    on_cpu = torch.arange(60.0).reshape(4, 3, 5).clone()
    return on_cpu, on_cpu.to(DEVICE)


def _outcome(of: Callable[[Tensor], Tensor], source: Tensor) -> Any:
    try:
        return of(source)
    except Exception as error:  # an error is an outcome to compare
        return type(error), str(error).split("\n")[0]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("name", VIEWS)
def test_is_the_view_that_pytorch_makes(name: str, mode: Callable[[], Any]) -> None:
    expected, own = _both()
    with mode():
        for _ in range(2):
            want, found = _outcome(VIEWS[name], expected), _outcome(VIEWS[name], own)
            if not isinstance(want, Tensor):
                assert found == want
                continue
            assert isinstance(found, marid.LazyTensor)
            assert (found.shape, found.stride(), found.storage_offset()) == (
                want.shape,
                want.stride(),
                want.storage_offset(),
            )
            assert torch.equal(found.cpu(), want)
            if mode is not torch.inference_mode:  # where only the CPU keeps no account of views
                assert found._is_view() == want._is_view()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", VIEWS)
def test_gradients_and_writes(name: str) -> None:
    found: list[Any] = []
    for source in _both():
        leaf = source.clone().requires_grad_()
        made = _outcome(VIEWS[name], leaf * 1)
        if not isinstance(made, Tensor) or not made.is_floating_point():
            return
        (made * 2).sum().backward()
        assert leaf.grad is not None
        plain = source.clone()
        version = plain._version
        view = VIEWS[name](plain)
        if 0 not in view.stride():
            view.add_(1)
        found.append((leaf.grad.cpu(), plain.cpu(), plain._version - version))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.usefixtures("either_way")
def test_profilers_see_the_operators() -> None:
    own = torch.ones(2, 3, device=DEVICE)
    own.view(6)[1:].unsqueeze(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        own.view(6)[1:].unsqueeze(0)
    assert {"aten::view", "aten::slice", "aten::unsqueeze"} <= {event.key for event in profile.key_averages()}


def test_methods_are_documented_as_pytorchs() -> None:
    for name in ("view", "reshape", "permute", "transpose", "expand", "unsqueeze", "squeeze"):
        assert getattr(marid.LazyTensor, name).__doc__ == getattr(Tensor, name).__doc__
