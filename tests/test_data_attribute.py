"""``tensor.data``, read and assigned: the same memory, without history, with a version of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marid
from tests.helpers import DEVICE, assert_same, on_both

pytestmark = pytest.mark.usefixtures("either_way")


def test_it_shares_memory_and_nothing_else() -> None:
    def run(device: str) -> list[Any]:
        x = torch.arange(6.0).to(device).requires_grad_()
        y = x.exp()
        data, of_result = x.data, y.data
        data[1:3].mul_(10)
        of_result.zero_()
        versions = [x._version, y._version, data._version, of_result._version]
        y.sum().backward()  # which does not notice that its result was written to
        return [x, y, data, x.grad, versions, data.requires_grad, data.is_leaf, data.grad_fn, x.data.storage_offset()]

    found = on_both(run)
    assert type(found[2]) is marid.LazyTensor


def test_assigned_views_share_memory_with_their_base() -> None:
    """As in ``vector_to_parameters``; gradients are those of parameters."""

    def run(device: str) -> list[Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        versions = [p._version for p in model.parameters()]
        found: list[Any] = []
        for _ in range(3):
            vector = vector * 0.5
            nn.utils.vector_to_parameters(vector, model.parameters())
            model(torch.linspace(-1, 1, 6).view(2, 3).to(device)).sum().backward()
            vector[2:7] += 1
            found += [p.detach().clone() for p in model.parameters()]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found += [p.storage_offset() for p in model.parameters()]
            found += [p._version - version for p, version in zip(model.parameters(), versions, strict=True)]
        return [*found, vector]

    on_both(run)


def test_other_geometry_dtype_and_bits() -> None:
    def run(device: str) -> list[Any]:
        x = torch.zeros(2, 3).to(device)
        view = x[0]
        x.data = torch.arange(8.0).to(device).view(4, 2).t()
        x += 1
        whole = torch.ones(2, dtype=torch.int64).to(device)
        whole.data = torch.full((3,), 0.5).to(device)
        z = torch.ones(2, dtype=torch.complex64).to(device)
        z.data = torch.tensor([1 + 2j, 3j]).to(device).conj()
        before = z.is_conj()
        z.data = torch.tensor([1 + 2j, 3j]).to(device)
        return [x, view, whole, whole * 2, z, before, z.is_conj()]

    on_both(run)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda _: 3, TypeError),
        (lambda device: torch.ones(3, dtype=torch.int64).to(device), RuntimeError),
    ],
)
def test_what_cannot_be_assigned(wrong: Callable[[str], Any], error: type[Exception]) -> None:
    """With PyTorch's own message; the tensor stays as it was."""
    said: list[str] = []
    for device in ("cpu", DEVICE):
        x = torch.ones(2).to(device).requires_grad_()
        with pytest.raises(error) as raised:
            x.data = wrong(device)
        said.append(str(raised.value))
        with pytest.raises(RuntimeError, match="Deleting"):
            del x.data
        assert_same(x.detach().cpu(), torch.ones(2))
    assert said[0] == said[1]


def test_a_refused_assignment_leaves_a_conjugate_as_it_was() -> None:
    def run(device: str) -> list[Any]:
        z = torch.tensor([1 + 2j, 3j]).to(device).conj().requires_grad_()
        with pytest.raises(RuntimeError, match="floating point or complex"):
            z.data = torch.ones(2, dtype=torch.int64).to(device)
        return [z.is_conj(), z.detach().resolve_conj()]

    on_both(run)


def test_a_tensor_of_the_cpu_cannot_be_assigned() -> None:
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(
        RuntimeError, match=r"incompatible tensor type: .* move it first with .to\('remote_accelerator:0'\)"
    ):
        x.data = torch.ones(2)


def _dual(primal: Tensor, tangent: Tensor, change: Callable[[Tensor], object]) -> list[Any]:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primal, tangent)
        change(dual)
        found = torch.autograd.forward_ad.unpack_dual(dual)
        return [found.primal, found.tangent]


@pytest.mark.parametrize("lies", ["alone", "in more", "in rows"])
def test_derivatives_of_views_that_are_computed_forward(lies: str) -> None:
    """A derivative lies as its tensor does, in memory of the same size, so that views of both are written alike."""
    of: dict[str, Callable[[str], Tensor]] = {
        "alone": lambda device: torch.arange(4.0).to(device),
        "in more": lambda device: torch.arange(6.0).to(device)[:4],
        "in rows": lambda device: torch.arange(8.0).to(device).view(4, 2)[:, 1],
    }

    def change(dual: Tensor) -> None:
        dual[1:3].mul_(3)
        dual.as_strided((2,), (1,), 1).add_(1)

    def run(device: str) -> list[Any]:
        tangent = torch.full((4,), 2.0).to(device)
        found = [*_dual(of[lies](device), tangent, change), tangent]
        return [*found, torch.func.jvp(lambda x: (x * x.sum()).sin(), (of[lies](device),), (tangent,))[1]]

    on_both(run)
