"""Derivatives and composites that PyTorch works out in another way for tensor subclasses: here they are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import func

from tests.helpers import DEVICE, assert_same

Draw = Callable[..., torch.Tensor]


def _gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    given = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*given)
    first = torch.autograd.grad(result.sum(), given, create_graph=True)
    return [result, *first, *torch.autograd.grad(sum(one.square().sum() for one in first), given, allow_unused=True)]  # pyright: ignore


def _tangents(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, t: torch.Tensor) -> Any:
    return func.jvp(function, (x,), (t,))


def _masked_attention(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q = q.transpose(1, 2)
    with torch.no_grad():
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.requires_grad_())


def _inferred(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return function()


def _set_within(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, device=x.device).set_(x, 1, (2,), (2,))


CASES: dict[str, Callable[[Draw], Any]] = {
    "prod": lambda draw: _gradients(torch.prod, draw(2, 4, 4)),
    "prod with a zero": lambda draw: _gradients(lambda a: torch.prod((a * (a > -1)).t()), draw(3, 2)),
    "prod of a dimension": lambda draw: _gradients(lambda a: torch.prod(a.mT, 1), draw(2, 4, 4)),
    "det": lambda draw: _gradients(lambda a: torch.det(a.mT), draw(2, 4, 4)),
    "cumprod": lambda draw: _gradients(lambda a: torch.cumprod(a, 1), draw(2, 4, 4)),
    "signs of min": lambda draw: func.grad(lambda a: -a.min())(draw(3, 4)).signbit(),
    "infinite max": lambda draw: func.grad(lambda a: a.max() * float("inf"))(draw(3)),
    "masked_fill": lambda draw: _gradients(lambda a: (a.t() * a.t()).masked_fill(a.t() > 0, 2.0), draw(3, 4)),
    "vector_norm": lambda draw: _gradients(lambda a: torch.linalg.vector_norm(a, 1), draw(5)),
    "layer_norm forward": lambda draw: _tangents(lambda a: F.layer_norm(a, (4,)), draw(3, 4), draw(3, 4)),
    "group_norm forward": lambda draw: _tangents(lambda a: F.group_norm(a, 2), draw(3, 4), draw(3, 4)),
    "batch_norm forward": lambda draw: _tangents(
        lambda a: F.batch_norm(a, None, None, training=True), draw(3, 4), draw(3, 4)
    ),
    "a mask that requires gradients": lambda draw: _masked_attention(draw(4, 4, 3, 2), draw(4, 4)),
    "interpolate": lambda draw: _inferred(lambda: F.interpolate(draw(1, 2, 6), size=13, mode="linear")),
    "svdvals": lambda draw: torch.linalg.svdvals(draw(4, 3)),
    "set_": lambda draw: _set_within(draw(6)),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_cpu(name: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        made = CASES[name](lambda *shape, device=device: torch.randn(*shape).to(device))
        found.append([one for one in (made if isinstance(made, (list, tuple)) else [made]) if one is not None])
    assert_same(found[1], found[0])
    assert [one.stride() for one in found[1]] == [one.stride() for one in found[0]]


def test_an_operator_that_is_defined_later_is_recorded() -> None:
    x = torch.ones(3, device=DEVICE) + 1
    seen: list[str] = []

    @torch.library.custom_op("marid_tests::defined_later", mutates_args=())
    def defined_later(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return x * 2

    defined_later.register_fake(torch.empty_like)
    y = defined_later(x)
    assert y.operation == "marid_tests::defined_later"  # pyright: ignore[reportAttributeAccessIssue]
    assert y.tolist() == [4.0] * 3
    assert set(seen) == {"cpu"}


def test_zeros_like_a_part_of_a_larger_memory() -> None:
    """Forward derivatives are laid out by the size of the memory behind, which a column has more of than it spans."""

    def made(device: str) -> list[Any]:
        column = torch.randn(4, 5).to(device).t()[0]
        like = torch.ones(3, 4, 4, device=device)
        make = torch.ops.aten._new_zeros_with_same_feature_meta
        found = [make(like, column, self_num_batch_dims=count) for count in range(3)]
        return [*found, make(torch.ones(0, 4, device=device), column, self_num_batch_dims=1)]

    assert_same(made(DEVICE), made("cpu"))
    x = torch.randn(4, 5)
    function = lambda v: (v.sin() * v.sum()).sum()  # noqa: E731
    assert_same(func.hessian(function)(x.to(DEVICE).t()[0]), func.hessian(function)(x.t()[0]))
