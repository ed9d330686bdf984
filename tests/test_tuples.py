"""``LazyTuple``: operations with several results."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree

import marid
from tests.helpers import DEVICE, assert_same, on_both

MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "split": lambda x: x.split(2),
    "split sizes": lambda x: x.split([1, 3]),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(3),
    "hsplit": lambda x: x.hsplit(3),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(descending=True),
    "max": lambda x: x.max(dim=0),
    "min": lambda x: x.min(dim=1, keepdim=True),
    "median": lambda x: x.median(dim=0),
    "mode": lambda x: x.mode(dim=0),
    "kthvalue": lambda x: x.kthvalue(2),
    "cummax": lambda x: x.cummax(0),
    "aminmax": lambda x: x.aminmax(),
    "frexp": lambda x: x.frexp(),
}


def _matrix(device: str) -> torch.Tensor:
    return torch.tensor([[3.0, 1.0, 2.0], [0.5, -1.0, 4.0], [7.0, 7.5, -2.0], [1.0, 0.0, 9.0]], device=device)


@pytest.mark.parametrize("name", MAKERS)
def test_several_results_are_a_lazy_tuple(name: str) -> None:
    """A real tuple with the values that eager PyTorch gives; making it runs nothing."""
    made = MAKERS[name](_matrix(DEVICE))
    assert isinstance(made, marid.LazyTuple)
    assert isinstance(made, tuple)
    assert marid.stats().ops_executed == 0
    assert_same(tuple(made), tuple(MAKERS[name](_matrix("cpu"))))


def _image(device: str) -> torch.Tensor:
    return torch.arange(162.0, device=device).reshape(2, 1, 9, 9).sin()


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "max": lambda d: torch.max(_matrix(d), dim=0),
    "max keepdim": lambda d: torch.max(_matrix(d), 1, keepdim=True),
    "min": lambda d: torch.min(_matrix(d), 0),
    "median": lambda d: torch.median(_matrix(d), 0),
    "nanmedian": lambda d: torch.nanmedian(_matrix(d), 0),
    "mode": lambda d: torch.mode(_matrix(d), 0),
    "kthvalue": lambda d: torch.kthvalue(_matrix(d), 2),
    "cummax": lambda d: torch.cummax(_matrix(d), 0),
    "cummin": lambda d: torch.cummin(_matrix(d), 1),
    "sort": lambda d: torch.sort(_matrix(d), 0),
    "topk": lambda d: torch.topk(_matrix(d), 1),
    "aminmax": lambda d: torch.aminmax(_matrix(d)),
    "frexp": lambda d: torch.frexp(_matrix(d)),
    "svd": lambda d: torch.svd(_matrix(d)),
    "qr": lambda d: torch.qr(_matrix(d)),
    "linalg.svd": lambda d: torch.linalg.svd(_matrix(d)),
    "linalg.qr": lambda d: torch.linalg.qr(_matrix(d)),
    "linalg.slogdet": lambda d: torch.linalg.slogdet(_matrix(d)[:3]),
    "linalg.lu": lambda d: torch.linalg.lu(_matrix(d)),
    "linalg.eigh": lambda d: torch.linalg.eigh(_matrix(d)[:3] + _matrix(d)[:3].T),
    "var_mean": lambda d: torch.var_mean(_matrix(d), 0),
    "meshgrid ij": lambda d: torch.meshgrid(_matrix(d)[0], _matrix(d)[:, 0], indexing="ij"),
    "meshgrid xy": lambda d: torch.meshgrid(_matrix(d)[0], _matrix(d)[:, 0], indexing="xy"),
    "broadcast_tensors": lambda d: torch.broadcast_tensors(_matrix(d), _matrix(d)[0]),
    "atleast_2d": lambda d: torch.atleast_2d(_matrix(d)[0], _matrix(d)),
    "split": lambda d: torch.split(_matrix(d), 2),
    "split sizes": lambda d: torch.split(_matrix(d), [1, 3]),
    "chunk": lambda d: torch.chunk(_matrix(d), 2),
    "tensor_split": lambda d: torch.tensor_split(_matrix(d), 3),
    "hsplit": lambda d: torch.hsplit(_matrix(d), 3),
    "unbind": lambda d: torch.unbind(_matrix(d), 1),
    "unravel_index": lambda d: torch.unravel_index(torch.arange(5, device=d), (2, 3)),
    "max_pool1d": lambda d: F.max_pool1d(_image(d)[0], 2, return_indices=True),
    "max_pool2d": lambda d: F.max_pool2d(_image(d), 2, return_indices=True),
    "max_pool3d": lambda d: F.max_pool3d(_image(d), (1, 2, 2), return_indices=True),
    "adaptive_max_pool2d": lambda d: F.adaptive_max_pool2d(_image(d), 3, return_indices=True),
    "MaxPool2d": lambda d: torch.nn.MaxPool2d(2, return_indices=True)(_image(d)),
}


@pytest.mark.filterwarnings("ignore:torch.qr is deprecated", "ignore:torch.svd is deprecated")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_document_004_functions_return_what_pytorch_returns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tuples and ``torch.return_types``, whose elements are lazy, and read one by one have eager's values."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    made, expected = FUNCTIONS[name](DEVICE), FUNCTIONS[name]("cpu")
    assert type(made) is type(expected)
    assert all(isinstance(item, marid.LazyTensor) for item in made)
    assert marid.stats().ops_executed == 0
    assert marid.stats().fallbacks == {}
    assert not all(item.materialized for item in made)  # an input that is returned is there
    for lazy, eager in zip(made, expected, strict=True):
        assert_same(lazy, eager)
    for field in getattr(type(expected), "__match_args__", ()):
        assert getattr(made, field) is made[type(expected).__match_args__.index(field)]


def test_a_lazy_tuple_is_one_node() -> None:
    """Results of one operation are siblings."""
    values, indices = _matrix(DEVICE).topk(2)
    assert values.id == indices.id
    assert values.operation == indices.operation == "aten::topk"
    x = torch.zeros(3, device=DEVICE)
    before = marid.stats().ops_captured
    x.sort()
    assert marid.stats().ops_captured == before + 1


@pytest.mark.parametrize(
    ("make", "fields"), [("topk", "values indices"), ("aminmax", "min max"), ("frexp", "mantissa exponent")]
)
def test_named_results_keep_their_names(make: str, fields: str) -> None:
    """``sort().values`` as in PyTorch, also by position."""
    made, expected = MAKERS[make](_matrix(DEVICE)), MAKERS[make](_matrix("cpu"))
    for index, field in enumerate(fields.split()):
        assert getattr(made, field) is made[index]
        assert_same(getattr(made, field), getattr(expected, field))
    with pytest.raises(AttributeError, match="LazyTuple"):
        made.nothing


def test_reading_one_piece_runs_that_piece_only() -> None:
    """Of pieces that were each worked on, the others stay pending."""
    pieces = torch.arange(8.0, device=DEVICE).split(2)
    worked = [piece * 2 for piece in pieces]
    assert worked[1].tolist() == [4.0, 6.0]
    assert marid.stats().ops_executed == 3  # arange, split, one multiplication
    assert [w.materialized for w in worked] == [False, True, False, False]


def test_materialize_runs_all_pieces_in_one_program() -> None:
    """The result is a tuple of CPU tensors."""
    pieces = (torch.arange(6.0, device=DEVICE) + 1).chunk(3)
    epoch = marid.epoch()
    values = pieces.materialize()  # type: ignore[attr-defined]
    assert marid.epoch() == epoch + 1
    assert isinstance(values, tuple)
    assert all(type(v) is torch.Tensor and v.device.type == "cpu" for v in values)
    assert_same(values, (torch.arange(6.0) + 1).chunk(3))


def test_tuple_protocols() -> None:
    """Unpacking, slicing, concatenation, comparison by identity of elements, hashing by position."""
    made = _matrix(DEVICE).unbind()
    first, *rest = made
    assert first is made[0]
    assert len(rest) == 3
    assert made[1:] == tuple(made)[1:]
    assert len(made + (1,)) == 5
    assert next(reversed(made)) is made[-1]
    assert marid.stats().ops_executed == 0


def test_repr_runs_nothing() -> None:
    """Printing a tuple prints its lazy elements."""
    text = repr(_matrix(DEVICE).split(2))
    assert text.count("aten::split") == 2
    assert marid.stats().ops_executed == 0


def test_repr_is_that_of_pytorch() -> None:
    """Once the values are there, with the names of the fields where PyTorch has them."""
    for make in MAKERS.values():
        made = make(_matrix(DEVICE))
        marid.materialize(*made)
        assert repr(made).replace(f", device='{DEVICE}:0'", "") == repr(make(_matrix("cpu")))


def test_pieces_are_views_that_write_through() -> None:
    """Writing a piece writes the tensor it was split from."""

    def write(device: str) -> list[Any]:
        x = _matrix(device)
        for index, piece in enumerate(x.unbind()):
            piece.mul_(index)
        left, _right = x.chunk(2, dim=1)
        left.t().zero_()
        return [x, left]

    on_both(write)


def test_pytree_goes_through_a_lazy_tuple() -> None:
    """``tree_map`` keeps the type and the names."""
    made = _matrix(DEVICE).sort()
    doubled = _pytree.tree_map(lambda t: t * 2, made)
    assert isinstance(doubled, marid.LazyTuple)
    assert_same(doubled.values, _matrix("cpu").sort().values * 2)
    leaves, spec = _pytree.tree_flatten({"a": made, "b": [1]})
    assert len(leaves) == 3
    assert isinstance(_pytree.tree_unflatten(leaves, spec)["a"], marid.LazyTuple)


def test_copies_of_a_lazy_tuple() -> None:
    """``copy``, ``deepcopy`` and ``pickle`` give a lazy tuple again."""
    made = _matrix(DEVICE).topk(2)
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(copied, marid.LazyTuple)
        assert_same(copied.indices, made.indices.cpu())


def test_cpu_tensors_keep_pytorchs_own_types() -> None:
    """Importing marid does not change what CPU tensors return."""
    x = _matrix("cpu")
    assert type(x.split(2)) is tuple
    assert type(x.topk(1)).__name__ == "topk"
    assert type(torch.sort(x)).__module__ == "torch.return_types"
    assert type(torch.chunk(x, 2)) is tuple


def test_gradients_flow_through_pieces() -> None:
    """Pieces, and results picked by position or name, take part in autograd."""

    def differentiate(device: str) -> list[Any]:
        x = _matrix(device).requires_grad_()
        first, second = x.split(2)
        values = x.topk(2).values
        (first * second + 1).sum().backward(retain_graph=True)
        values.prod().backward()
        return [x.grad]

    on_both(differentiate)


def test_methods_look_like_those_of_pytorch() -> None:
    for name in ("topk", "split", "max"):
        method, other = getattr(marid.LazyTensor, name), getattr(torch.Tensor, name)
        assert method.__name__ == name
        assert method.__doc__ == other.__doc__
        assert repr(method) == repr(other)
        assert method.__wrapped__ is other
    x = torch.arange(6.0, device=DEVICE)
    assert marid.LazyTensor.topk(x, k=2).values.tolist() == [5, 4]
    with pytest.raises(TypeError, match="topk"):
        x.topk()  # type: ignore[call-arg]
