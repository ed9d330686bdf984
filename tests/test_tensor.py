"""``LazyTensor``: its names, Python's protocols on it, and how it mixes with CPU tensors."""

from __future__ import annotations

import asyncio
import copy
import operator
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import marid
from marid.settings import settings
from tests.helpers import DEVICE, assert_same, on_both

# --- names -----------------------------------------------------------------------------------------------------------


def test_a_device_tensor_is_a_lazy_tensor() -> None:
    """Tensors and parameters on the device are ``LazyTensor``, and PyTorch's own types too."""
    x = torch.zeros(2, device=DEVICE)
    parameter = nn.Parameter(x)
    assert type(x) is marid.LazyTensor
    assert isinstance(x, torch.Tensor)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, marid.LazyTensor)
    assert x.device == torch.device(DEVICE, 0)
    assert x.is_remote_accelerator  # type: ignore[attr-defined]
    assert not x.is_cpu


def test_lazy_tensor_is_not_constructed_directly() -> None:
    """The constructor says what to do instead."""
    with pytest.raises(TypeError, match="lift"):
        marid.LazyTensor([1.0])


def test_ids_are_unique_and_stay() -> None:
    """Every operation gets its own identifier, and running it does not change it."""
    tensors = [torch.zeros(1, device=DEVICE) + i for i in range(100)]
    ids = [t.id for t in tensors]
    assert len(set(ids)) == 100
    marid.materialize(*tensors)
    assert [t.id for t in tensors] == ids


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: x * 2, "aten::mul"),
        (lambda x: x + x, "aten::add"),
        (lambda x: x.sum(0), "aten::sum"),
        (lambda x: x @ x, "aten::mm"),
        (lambda x: x.t(), "aten::t"),
        (lambda x: x.mul_(2), "aten::mul_"),
        (lambda x: x.clone()[0].add_(1), "aten::add_"),
        (lambda x: torch.zeros(2, device=DEVICE), "aten::zeros"),
    ],
)
def test_operation_is_the_name_without_its_overload(make: Callable[[Any], Any], name: str) -> None:
    """``aten::mul`` is neither ``aten::mul.Tensor`` nor ``mul``; a written tensor names the write."""
    y = make(torch.ones(2, 2, device=DEVICE))
    assert y.operation == name
    assert y.metadata.operation_type == name


def test_inputs_and_kwargs_are_the_arguments() -> None:
    """Tensors among them are lazy tensors of the same value."""
    x, y = torch.ones(2, device=DEVICE), torch.full((2,), 3.0, device=DEVICE)
    z = torch.add(x, y, alpha=2)
    first, second = z.inputs[:2]
    assert isinstance(first, marid.LazyTensor)
    assert z.kwargs == {"alpha": 2}
    assert (first.id, second.id) == (x.id, y.id)
    assert torch.cat([x, y]).inputs[0][1].id == y.id
    assert (x.sum(0, keepdim=True)).inputs[1:] == [[0], True]
    assert marid.stats().ops_executed == 0
    assert_same(second, torch.full((2,), 3.0))


def test_inputs_are_gone_once_it_ran() -> None:
    """History is freed as it is executed."""
    z = torch.ones(2, device=DEVICE) + 1
    z.materialize()
    assert z.inputs == []
    assert z.kwargs == {}


def test_metadata_names_geometry_and_device() -> None:
    """What is known without running."""
    metadata = torch.zeros(2, 3, dtype=torch.int32, device=f"{DEVICE}:1").metadata
    assert isinstance(metadata, marid.SemanticMetadata)
    assert metadata.tensor_shape == (2, 3)
    assert metadata.dtype is torch.int32
    assert metadata.device_hint == f"{DEVICE}:1"


def test_materialized_goes_from_false_to_true_and_back_with_a_write() -> None:
    """A pending write makes a value unmaterialised again."""
    x = torch.ones(2, device=DEVICE)
    assert not x.materialized
    assert not x.is_materialized()
    assert x.concrete_value is None
    x.tolist()
    assert x.materialized
    assert_same(x.concrete_value, torch.ones(2))
    x.add_(1)
    assert not x.materialized
    assert x.concrete_value is None
    assert_same(x.materialize(), torch.full((2,), 2.0))


def test_a_write_through_a_view_unmaterialises_the_base() -> None:
    """Views share memory, so they share pending writes."""
    x = torch.zeros(4, device=DEVICE)
    view = x[1:3]
    marid.materialize(x, view)
    assert x.materialized
    view.add_(1)
    assert not x.materialized
    assert x.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_deep_copies_of_conjugated_and_negated_views(either_way: None) -> None:
    def run(device: str) -> list[Any]:
        z = torch.tensor([[1 + 2j, 3 - 1j]], device=device)
        views = [z.conj(), z.conj().imag, z.mH, (z * 1).conj(), torch.nn.Parameter(z.conj()), z.conj()[0, 1:]]
        copies = [copy.deepcopy(view) for view in views]
        z.zero_()
        return [(one.tolist(), one.is_conj(), one.is_neg(), one.dtype) for one in copies]

    assert run(DEVICE) == run("cpu")


def test_materialize_gives_a_cpu_copy() -> None:
    """The result is a plain CPU tensor; writing to it changes nothing on the device."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    value = (x * 2).materialize()
    assert type(value) is torch.Tensor
    assert value.device.type == "cpu"
    assert not value.requires_grad
    copied = x.materialize()
    copied.zero_()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_materialize_function_runs_all_in_one_program() -> None:
    """Several tensors, one program; tensors elsewhere are ignored."""
    x = torch.ones(3, device=DEVICE)
    y, z = x * 2, x * 3
    epoch = marid.epoch()
    marid.materialize(y, z, torch.ones(1))
    assert marid.epoch() == epoch + 1
    assert y.materialized
    assert z.materialized


def test_partial_materialisation_leaves_the_rest_pending() -> None:
    """Only what the asked value needs is run."""
    x = torch.ones(3, device=DEVICE)
    needed, unrelated = x * 2, torch.zeros(5, device=DEVICE) + 1
    other_branch = x * 3
    needed.tolist()
    assert not unrelated.materialized
    assert not other_branch.materialized
    assert marid.stats().ops_executed == 2


def test_await_gives_the_tensor_with_its_value() -> None:
    """``await tensor`` runs it and returns it."""
    x = torch.ones(2, device=DEVICE) * 3

    async def read() -> torch.Tensor:
        return await x

    assert asyncio.run(read()) is x
    assert x.materialized


def test_lift_takes_a_snapshot() -> None:
    """A lifted tensor has the value of the moment, and a lazy one stays itself."""
    source = torch.arange(6.0).reshape(2, 3).t()
    lifted = marid.LazyTensor.lift(source)
    expected = source.clone()
    source.zero_()
    assert type(lifted) is marid.LazyTensor
    assert_same(lifted, expected)
    assert marid.LazyTensor.lift(lifted) is lifted


FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(2, 3, device=DEVICE),
    "rand": lambda: torch.rand(2, 3, device=DEVICE),
    "randint": lambda: torch.randint(0, 5, (2, 3), device=DEVICE),
    "zeros": lambda: torch.zeros(2, 3, device=DEVICE),
    "ones": lambda: torch.ones(2, 3, device=DEVICE),
    "empty": lambda: torch.empty(2, 3, device=DEVICE),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2), device=DEVICE),
    "full": lambda: torch.full((2, 3), 7.0, device=DEVICE),
    "arange": lambda: torch.arange(1, 7, 2, device=DEVICE),
    "linspace": lambda: torch.linspace(0, 1, 5, device=DEVICE),
    "logspace": lambda: torch.logspace(0, 1, 5, device=DEVICE),
    "randn_like": lambda: torch.randn_like(_SOURCE),
    "rand_like": lambda: torch.rand_like(_SOURCE),
    "zeros_like": lambda: torch.zeros_like(_SOURCE),
    "ones_like": lambda: torch.ones_like(_SOURCE),
    "empty_like": lambda: torch.empty_like(_SOURCE),
    "full_like": lambda: torch.full_like(_SOURCE, 2),
    "randint_like": lambda: torch.randint_like(_SOURCE, 5),
    "randperm": lambda: torch.randperm(5, device=DEVICE),
    "eye": lambda: torch.eye(3, device=DEVICE),
}
_SOURCE = torch.zeros(2, 3, device=DEVICE)
_SOURCE.materialize()


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_is_one_node(name: str) -> None:
    """A factory records itself and nothing else, and runs nothing."""
    made = FACTORIES[name]()
    assert marid.stats().ops_captured == 1
    assert marid.stats().ops_executed == 0
    assert made.operation == f"aten::{name}"
    assert marid.graph(made).get_execution_order()[-1].op.name == f"aten::{name}"


# --- printing --------------------------------------------------------------------------------------------------------


def _as_on_a_device(plain: torch.Tensor, show: Callable[[torch.Tensor], str] = str) -> str:
    """The text of a CPU tensor as PyTorch would show it in a process where the CPU is not the default device."""
    with mock.patch.object(torch._C, "_get_default_device", return_value="nothing"):
        return show(plain).replace("device='cpu'", f"device='{DEVICE}:0'")


@pytest.mark.parametrize("show", [str, "{}".format, lambda x: f"{x}", lambda x: f"{x!s}"])
def test_printing_shows_the_values(show: Callable[[torch.Tensor], str]) -> None:
    """As PyTorch shows those of a device, by a read that is counted at its line."""
    x = torch.arange(3, device=DEVICE, dtype=torch.float64) * 2
    assert show(x) == _as_on_a_device(torch.arange(3, dtype=torch.float64) * 2, show)
    assert [(sync.reason, Path(sync.source.rpartition(":")[0]).name) for sync in marid.stats().syncs] == [
        ("print", "test_tensor.py")
    ]
    with marid.no_sync():
        show(x)
        with pytest.raises(marid.errors.SyncForbiddenError, match="print"):
            show(x + 1)


def test_what_stands_behind_the_values_is_what_stands_there_in_pytorch() -> None:
    """Device, size, dtype, gradient, in this order."""
    for make in (
        lambda d: torch.ones(2, 3, device=d),
        lambda d: torch.ones(2, 3, dtype=torch.float16, device=d),
        lambda d: torch.ones(12, dtype=torch.int8, device=d),
        lambda d: torch.ones(12, device=d, requires_grad=True) * 2,
        lambda d: torch.ones(11, 11, 3, device=d, requires_grad=True),
        lambda d: nn.Parameter(torch.ones(9, device=d)),
        lambda d: torch.ones(1500, device=d).neg().detach(),
        lambda d: torch.zeros(0, 3, device=d),
        lambda d: torch.zeros(0, dtype=torch.int64, device=d),
        lambda d: torch.tensor(3 + 4j, device=d).conj(),
    ):
        assert str(make(DEVICE)).split() == _as_on_a_device(make("cpu")).split()  # lines are those of a longer name


def test_lines_are_broken_as_pytorch_breaks_them() -> None:
    """A suffix that does not fit into the line stands in the next one."""
    x = torch.arange(3.0, device=DEVICE)
    where = f"\n       device='{DEVICE}:0'"
    with torch._tensor_str.printoptions(linewidth=42):
        assert str(x) == f"tensor([0., 1., 2.],{where})"
        x.requires_grad_()
        assert (
            str(nn.Parameter(x)) == f"Parameter containing:\ntensor([0., 1., 2.],{where},\n       requires_grad=True)"
        )


@pytest.mark.parametrize("show", [repr, "{!r}".format, lambda x: str([x]), lambda x: str({1: (x,)})])
def test_repr_never_runs_anything(show: Callable[[torch.Tensor], str]) -> None:
    """It names operation, shape, dtype, device and state; once the values are there, it shows them."""
    x = torch.ones(2, 3, device=DEVICE) * 2
    text = show(x)
    for part in ("aten::mul", "(2, 3)", "torch.float32", f"{DEVICE}:0", "lazy"):
        assert part in text
    assert marid.stats().ops_executed == 0
    expected = str(x)
    executed, syncs = marid.stats().ops_executed, marid.stats().syncs
    assert expected in show(x)
    assert (marid.stats().ops_executed, marid.stats().syncs) == (executed, syncs)
    x.add_(1)
    assert "aten::add_" in show(x)
    assert marid.stats().ops_executed == executed


def test_repr_shows_a_summary_without_recording_anything() -> None:
    """Of a large tensor that has run, also inside of ``no_sync``."""
    x = torch.arange(5000, device=DEVICE).reshape(50, 100)
    marid.materialize(x)
    captured = marid.stats().ops_captured
    with marid.no_sync():
        assert "..., " in repr(x)
    assert marid.stats().ops_captured == captured


def test_repr_names_the_gradient() -> None:
    """Leaf or with a history, lazy or not."""
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "MulBackward0" in repr(x * 2)
    assert repr(x).endswith("lazy)")
    x.tolist()
    assert repr(x) == f"tensor([1., 1.], device='{DEVICE}:0', requires_grad=True)"


def test_repr_in_containers_and_modules_never_runs_anything() -> None:
    """Lists, dicts, parameters, tracebacks of test runners."""
    model = nn.Linear(2, 2).to(DEVICE)
    executed = marid.stats().ops_executed
    repr([model.weight]), repr({"a": model.weight * 2}), repr(model), repr(dict(model.named_parameters()))
    assert marid.stats().ops_executed == executed


def test_repr_of_what_failed_does_not_raise() -> None:
    """A traceback with such a value in it can be shown."""
    x = torch.zeros(2, device=DEVICE)[torch.tensor([5], device=DEVICE)]
    for _ in range(2):
        with pytest.raises(IndexError):
            str(x)
        assert "aten::index" in repr(x)


@pytest.mark.parametrize("reads", [True, False])
def test_print_materialize_decides(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """The one setting that makes both texts read, or neither."""
    monkeypatch.setattr(settings, "print_materialize", reads)
    for show in (repr, str, "{}".format):
        for make in (lambda: torch.arange(3, device=DEVICE), lambda: torch.ones((), device=DEVICE)):
            assert ("lazy" in show(make())) is not reads
    assert "[0, 1, 2]" in repr([torch.arange(3, device=DEVICE)]) or not reads
    assert f"{torch.tensor(2, device=DEVICE):03d}" == "002"


@pytest.mark.parametrize(
    "shape", [(1001,), (7, 200), (2000, 3), (3, 7, 100), (8, 8, 8, 8), (6, 500), (1,), (), (0, 5), (50_000,)]
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.float64],
)
def test_a_summary_is_that_of_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Widths, signs and exponents are chosen from what is shown alone."""
    plain = (torch.randn(shape) * 10 ** torch.randint(-3, 5, shape).double()).to(dtype)
    for view in (plain, plain.transpose(0, -1) if plain.dim() else plain):
        assert str(view.to(DEVICE)).startswith(f"tensor({torch._tensor_str._tensor_str(view, 7)},")


def test_format_of_a_single_element_follows_torch() -> None:
    """A format specification reads the value, as it does for any tensor."""
    value = torch.tensor(2.0, device=DEVICE).sqrt()
    assert f"{value:.3f}" == f"{torch.tensor(2.0).sqrt():.3f}" == "1.414"
    assert f"{torch.tensor(3, device=DEVICE):04d}" == "0003"
    assert f"{value * 2:>8.2f}" == f"{torch.tensor(2.0).sqrt() * 2:>8.2f}"


def test_format_of_several_elements_with_a_specification_raises() -> None:
    """As for any tensor; nothing runs."""
    for device in ("cpu", DEVICE):
        with pytest.raises(TypeError, match="format"):
            format(torch.ones(2, device=device), ".2f")
    assert marid.stats().ops_executed == 0


# --- Python's protocols ----------------------------------------------------------------------------------------------

PROTOCOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "len": len,
    "iter": lambda x: [row.tolist() for row in x],
    "contains": lambda x: 1 in x,
    "not": lambda x: not x,
    "and": lambda x: (x and 1) is x,
    "round": lambda x: round(x.item()),
    "range": lambda x: list(range(x)),  # type: ignore[call-overload]
    "list index": lambda x: [10, 20, 30][x],  # type: ignore[call-overload]
    "reversed": lambda x: [row.tolist() for row in reversed(x)],
    "equal": lambda x: bool(torch.equal(x, x + 0)),
    "allclose": lambda x: torch.allclose(x.double(), x.double() + 0),
    "is_nonzero": lambda x: x.is_nonzero(),
    "numpy": lambda x: x.numpy().tolist(),
    "array": lambda x: np.asarray(x).tolist(),
    "array dtype": lambda x: str(np.asarray(x, dtype=np.float64).dtype),
    "numpy function": lambda x: float(np.sum(x.numpy())),
    "dir": lambda x: "sum" in dir(x),
    "hash": lambda x: hash(x) == hash(x),
}
TENSORS: dict[str, Callable[[str], torch.Tensor]] = {
    "float": lambda d: torch.tensor(1.5, device=d),
    "zero": lambda d: torch.tensor(0.0, device=d),
    "nan": lambda d: torch.tensor(float("nan"), device=d),
    "int": lambda d: torch.tensor(2, device=d),
    "bool": lambda d: torch.tensor(True, device=d),
    "complex": lambda d: torch.tensor(1 + 2j, device=d),
    "one element": lambda d: torch.tensor([[1]], device=d),
    "several": lambda d: torch.arange(3, device=d),
    "matrix": lambda d: torch.arange(6, device=d).reshape(2, 3),
    "empty": lambda d: torch.zeros(0, device=d),
    "bfloat16": lambda d: torch.tensor(1.5, dtype=torch.bfloat16, device=d),
    "gradient": lambda d: torch.tensor(2.0, device=d, requires_grad=True),
    "conjugate": lambda d: torch.tensor([1 + 2j], device=d).conj(),
    "transposed": lambda d: torch.arange(6.0, device=d).reshape(2, 3).t(),
}


def _outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return type(error), str(error).replace(f"{DEVICE}:0", "cpu")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_protocols_mean_what_torch_means(protocol: str, kind: str) -> None:
    """Same value of the same type, or the same error with the same message."""
    make, use = TENSORS[kind], PROTOCOLS[protocol]
    assert_same(_outcome(lambda: use(make(DEVICE))), _outcome(lambda: use(make("cpu"))))


def test_numpy_of_a_tensor_that_requires_grad_raises_where_gradients_are_recorded() -> None:
    """As for any tensor."""
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    assert x.numpy(force=True).tolist() == [1.0, 1.0]
    with torch.no_grad():
        assert x.numpy().tolist() == np.asarray(x).tolist() == [1.0, 1.0]


def test_dlpack_is_refused() -> None:
    """There is no memory here to share."""
    with pytest.raises((BufferError, RuntimeError), match=r"memory|cpu"):
        np.from_dlpack(torch.ones(2, device=DEVICE))  # type: ignore[arg-type]


def test_arrays_keep_dtype_and_strides() -> None:
    """A transposed tensor is a transposed array."""
    x = torch.arange(6, dtype=torch.int16, device=DEVICE).reshape(2, 3).t()
    array = x.numpy()
    assert array.dtype == np.int16
    assert array.shape == (3, 2)
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_control_flow_runs_what_the_condition_needs() -> None:
    """An ``if`` on a tensor is a read of that tensor only."""
    x = torch.ones(3, device=DEVICE)
    other = x * 5
    branch = "positive" if (x * 2).sum() > 1 else "negative"
    assert branch == "positive"
    assert not other.materialized


def test_iteration_gives_lazy_rows() -> None:
    """Iterating does not read values."""
    rows = list(torch.arange(6.0, device=DEVICE).reshape(3, 2))
    assert len(rows) == 3
    assert all(type(row) is marid.LazyTensor for row in rows)
    assert marid.stats().ops_executed == 0


def test_attributes_stay_on_the_tensor() -> None:
    """User attributes and ``__dict__`` work as on any tensor."""
    x = torch.zeros(1, device=DEVICE)
    x.note = "mine"  # type: ignore[attr-defined]
    assert x.note == "mine"  # type: ignore[attr-defined]
    assert "note" not in (x + 1).__dict__


# --- metadata without running ----------------------------------------------------------------------------------------


def test_geometry_questions_never_run_anything() -> None:
    """Shape, strides, dtype, size, contiguity and autograd flags are known at once."""
    x = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    y = (x.transpose(0, 2) @ torch.ones(2, 5, device=DEVICE)).relu()
    y.shape, y.stride(), y.dtype, y.size(0), y.dim(), y.numel(), y.is_contiguous(), y.storage_offset(), len(y)
    y.requires_grad, y.is_leaf, y.grad_fn, y.device, y.layout, y.element_size(), y.nbytes, y.is_floating_point()
    y.data_ptr(), y.untyped_storage(), y.is_complex()
    assert marid.stats().ops_executed == 0
    assert y.shape == (4, 3, 5)


def test_storage_identity_follows_aliasing() -> None:
    """Views share a storage and differ in address; copies do not share."""
    x = torch.zeros(4, device=DEVICE)
    view, copied = x[1:], x.clone()
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert view.data_ptr() == x.data_ptr() + 4
    assert copied.data_ptr() != x.data_ptr()
    assert x.untyped_storage().nbytes() == 16
    assert x.detach().data_ptr() == x.data_ptr()


# --- mixing with CPU tensors -----------------------------------------------------------------------------------------


def test_set_takes_the_memory_and_leaves_the_conjugation() -> None:
    """A conjugate tensor stays one whatever it is set to; so does one that is not, and so it is with negation."""

    def run(device: str) -> list[Any]:
        def conjugate() -> torch.Tensor:
            return torch.tensor([1 + 2j, 3 + 4j], device=device).conj()

        x, y = conjugate(), torch.tensor([5 + 6j, 7 - 8j], device=device)
        from_tensor, from_memory, from_nothing = conjugate().set_(y), conjugate(), conjugate().set_()
        from_memory.set_(from_memory.untyped_storage(), 0, (2,), (1,))
        plain, negative = y.clone().set_(x), conjugate().imag
        negative.set_(y.real)
        y.mul_(2)
        tensors = [from_tensor, from_memory, from_nothing, plain, negative]
        return [[t.clone() for t in tensors], [(t.is_conj(), t.is_neg()) for t in tensors]]

    on_both(run)


def test_scalars_and_zero_dimensional_cpu_tensors_mix() -> None:
    """As on any device; the result has the type that PyTorch's promotion gives."""
    x = torch.arange(3, device=DEVICE)
    cpu = torch.arange(3)
    for scalar in (2, 2.5, True, torch.tensor(2), torch.tensor(2.5), torch.tensor(2.5, dtype=torch.float64)):
        assert_same(x * scalar, cpu * scalar)
        assert_same(scalar + x, scalar + cpu)


def test_a_zero_dimensional_cpu_tensor_is_taken_as_it_is_now() -> None:
    """Writing to the scalar afterwards changes nothing."""
    scale = torch.tensor(2.0)
    y = torch.ones(2, device=DEVICE) * scale
    scale.fill_(100)
    assert y.tolist() == [2.0, 2.0]


def test_scalars_of_foreach_operators_come_from_the_cpu() -> None:
    def run(device: str) -> list[torch.Tensor]:
        a, b, c = ([(torch.arange(1.0, 4.0) * (k + j)).to(device) for j in (1, 2)] for k in range(3))
        scalars = torch.tensor([0.5, -2.0])
        torch._foreach_addcdiv_(a, b, c, scalars)
        torch._foreach_addcmul_(b, a, c, scalars)
        return [*a, *b, *torch._foreach_addcdiv(a, b, c, scalars), *torch._foreach_addcmul(a, b, c, scalars)]

    assert_same(run(DEVICE), run("cpu"))


def test_cpu_indices_index_device_tensors() -> None:
    """As on any device."""
    x = torch.arange(6.0, device=DEVICE)
    assert x[torch.tensor([1, 3])].tolist() == [1.0, 3.0]
    x[torch.tensor([0, 5])] = 9.0
    assert x.tolist() == [9.0, 1.0, 2.0, 3.0, 4.0, 9.0]


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.add_(y),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.sum() + y,
        lambda x, y: nn.functional.linear(x, y[None]),
        lambda x, y: torch.stack([y, x]),
    ],
)
def test_other_cpu_tensors_do_not_mix(mix: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """PyTorch's own device error, where the operation is written."""
    with pytest.raises(RuntimeError, match=r"(?i)same device"):
        mix(torch.ones(3, device=DEVICE), torch.ones(3))


def test_cpu_tensors_are_not_written_from_device_tensors_except_by_copy() -> None:
    """``copy_`` crosses devices both ways; other in-place operations do not."""
    x, y = torch.arange(3.0, device=DEVICE), torch.zeros(3)
    y.copy_(x)
    assert y.tolist() == [0.0, 1.0, 2.0]
    x.copy_(y * 2)
    assert x.tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(RuntimeError, match=r"(?i)same device"):
        y.add_(x)


# --- capture() -------------------------------------------------------------------------------------------------------


def test_capture_makes_tensors_lazy_without_naming_a_device() -> None:
    """Factories inside are on the device, outside not."""
    with marid.capture() as graph:
        x = torch.randn(2, 2)
        y = x @ x + torch.tensor([1.0, 2.0])
    assert type(y) is marid.LazyTensor
    assert type(torch.zeros(1)) is torch.Tensor
    assert isinstance(graph, marid.ComputationGraph)
    names = [node.op.name for node in graph.nodes if node.op is not None]
    assert names[:1] == ["aten::randn"]
    assert "aten::mm" in names
    assert marid.stats().ops_executed == 0


def test_capture_lifts_cpu_tensors() -> None:
    """Mixing on purpose; the CPU tensor itself stays where it is."""
    weight = torch.full((2, 2), 3.0)
    with marid.capture():
        y = torch.ones(2, 2) @ weight
    assert_same(y, torch.ones(2, 2) @ torch.full((2, 2), 3.0))
    assert type(weight) is torch.Tensor
    with pytest.raises(RuntimeError, match=r"(?i)same device"):
        y @ weight


def test_capture_nests() -> None:
    """The inner block's operations are in both graphs; leaving it does not end the outer one."""
    with marid.capture() as outer:
        a = torch.ones(2)
        with marid.capture() as inner:
            b = a * 2
        c = b + torch.ones(2)
    assert type(c) is marid.LazyTensor
    assert [n.op.name for n in inner.operations] == ["aten::mul"]
    assert [n.op.name for n in outer.operations] == ["aten::ones", "aten::mul", "aten::ones", "aten::add"]
    assert type(torch.ones(1)) is torch.Tensor


def test_capture_cleans_up_after_an_exception() -> None:
    """Nested blocks left by an error leave nothing behind, and the graph holds what was recorded until then."""

    def fail() -> None:
        with marid.capture():
            kept.append(torch.ones(2))
            raise ValueError("inside")

    kept: list[torch.Tensor] = []
    with pytest.raises(ValueError, match="inside"), marid.capture() as graph:
        fail()
    assert type(torch.zeros(1)) is torch.Tensor
    assert len(graph) == 1
    with pytest.raises(RuntimeError, match=r"(?i)same device"):
        kept[0] + torch.ones(2)


def test_capture_belongs_to_its_thread() -> None:
    """Other threads go on making CPU tensors."""
    made = []
    with marid.capture():
        thread = threading.Thread(target=lambda: made.append(torch.ones(2)))
        thread.start()
        thread.join()
    assert type(made[0]) is torch.Tensor


def test_capture_on_another_device_index() -> None:
    """The argument chooses the device."""
    with marid.capture(1) as graph:
        x = torch.ones(2)
    assert x.device == torch.device(DEVICE, 1)
    assert len(graph) == 1


def test_capture_leaves_an_explicit_device_alone() -> None:
    """Naming a device wins."""
    with marid.capture():
        x = torch.ones(2, device="cpu")
    assert type(x) is torch.Tensor


# --- everyday code ---------------------------------------------------------------------------------------------------


def test_moving_between_devices() -> None:
    """``to``, ``cpu`` and module moves keep values, dtypes and strides."""
    cpu = torch.arange(6.0).reshape(2, 3).t()
    x = cpu.to(DEVICE)
    assert_same(x, cpu)
    assert_same(x.to("cpu"), cpu)
    assert_same(x.to(DEVICE, torch.float64), cpu.double())
    assert_same(x.cpu().to(DEVICE), cpu)
    assert x.to(DEVICE) is x
    assert x.to(f"{DEVICE}:0") is x
    assert x.remote_accelerator() is x  # type: ignore[attr-defined]


def test_interpreter_style_program() -> None:
    """A little of everything, bitwise as on the CPU."""

    def program(device: str) -> list[Any]:
        x = torch.randn(4, 4, device=device)
        y = torch.linalg.solve(x @ x.T + torch.eye(4, device=device), x)
        values, indices = y.flatten().topk(3)
        mask = y > values[-1]
        z = torch.einsum("ij,kj->ik", y, x).masked_fill(mask, 0)
        histogram = torch.bincount(indices, minlength=16)
        return [y, values, indices, z, histogram, z.norm().item(), indices.tolist()]

    on_both(program)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge])
def test_comparisons_with_parameters_are_laid_out_as_on_the_cpu(compare: Callable[[Any, Any], torch.Tensor]) -> None:
    """Python asks a parameter on the right first, and the result is laid out like the operand that is asked."""
    rows, columns = torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([[1.0, 0.0], [5.0, 1.0]]).t()
    for left, right in ((rows, columns), (columns, rows)):
        for wrap in (lambda a, b: (a, b), lambda a, b: (a, nn.Parameter(b)), lambda a, b: (nn.Parameter(a), b)):
            expected = compare(*wrap(left, right))
            got = compare(*wrap(left.to(DEVICE), right.to(DEVICE)))
            assert got.stride() == expected.stride()
            assert torch.equal(got.cpu(), expected)
    with pytest.raises(TypeError, match="not supported"):
        operator.lt(nn.Parameter(rows.to(DEVICE)), "text")


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0, 3.0]], ids=["number", "row"])
def test_masks_are_written_beside_numbers(value: Any) -> None:
    """How many elements a mask chooses has to go with how many numbers there are, so it is no matter of a trial."""
    written = []
    for device in ("cpu", DEVICE):
        x = torch.zeros(6, 4, device=device, requires_grad=True)
        y = x * 1
        mask, numbers = torch.tensor([1, 0, 1, 0, 0, 1], device=device).bool(), torch.tensor([0, 3, 2], device=device)
        y[mask, numbers] = torch.tensor(value, device=device)
        y[mask, numbers] += 1
        y.sum().backward()
        written.append((y.tolist(), x.grad.tolist()))  # pyright: ignore[reportOptionalMemberAccess]
    assert written[0] == written[1]
    assert not marid.stats().fallbacks
