"""``pickle``, ``torch.save`` and ``load``, ``deepcopy``: values, strides, aliases, devices."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.errors import UnsupportedOperationError
from tests.helpers import DEVICE, assert_same, train_step


def _saved(thing: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


def _through_save(thing: Any) -> Any:
    return torch.load(_saved(thing), weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "torch.save": _through_save,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "oldest pickle": lambda thing: pickle.loads(pickle.dumps(thing, protocol=2)),
    "deepcopy": copy.deepcopy,
}
# PyTorch's plain pickle writes a storage once for each tensor on it, for tensors of any device.
SHARING_WAYS = ("torch.save", "deepcopy")
TENSORS: dict[str, Callable[[str], torch.Tensor]] = {
    "plain": lambda d: torch.arange(6.0, device=d).reshape(2, 3),
    "transposed": lambda d: torch.arange(6.0, device=d).reshape(2, 3).t(),
    "slice": lambda d: torch.arange(10, device=d)[2:8:2],
    "expanded": lambda d: torch.ones(3, 1, device=d).expand(3, 4),
    "scalar": lambda d: torch.tensor(3.5, dtype=torch.float64, device=d),
    "empty": lambda d: torch.zeros(0, 3, device=d),
    "bool": lambda d: torch.tensor([True, False], device=d),
    "bfloat16": lambda d: torch.ones(3, dtype=torch.bfloat16, device=d),
    "complex": lambda d: torch.tensor([1 + 2j], device=d),
    "leaf": lambda d: torch.ones(2, device=d, requires_grad=True),
    "parameter": lambda d: nn.Parameter(torch.ones(2, device=d)),
    "frozen parameter": lambda d: nn.Parameter(torch.ones(2, device=d), requires_grad=False),
    "written": lambda d: torch.zeros(4, device=d).add_(2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TENSORS)
def test_round_trip(way: str, kind: str) -> None:
    """Value, shape, strides, dtype, gradient flag, class and device come back; the copy is separate memory."""
    original = TENSORS[kind](DEVICE)
    copied = WAYS[way](original)
    assert_same(copied, WAYS[way](TENSORS[kind]("cpu")))
    assert type(copied) is type(original)
    assert isinstance(copied, nn.Parameter) == isinstance(original, nn.Parameter)
    assert copied.device == original.device
    if kind not in ("expanded", "empty"):
        before = original.tolist()
        with torch.no_grad():
            copied.zero_()
        assert original.tolist() == before


def test_a_deep_copy_of_numbers_that_leave_bytes_over() -> None:
    """Seven bytes, four of them read as one int32. (PyTorch itself cannot load what it saved of such memory.)"""
    original = torch.arange(7, device=DEVICE, dtype=torch.uint8)[:4].view(torch.int32)
    copied = copy.deepcopy(original)
    assert_same(copied, torch.arange(7, dtype=torch.uint8)[:4].view(torch.int32))
    copied.zero_()
    assert original.item() == 0x03020100


@pytest.mark.parametrize("way", SHARING_WAYS)
def test_shared_memory_stays_shared(way: str) -> None:
    """A base, a view of it and a second name of it are one storage again, apart from the original's."""
    base = torch.arange(6.0, device=DEVICE)
    copied = WAYS[way]({"base": base, "view": base[2:4], "again": base, "transposed": base.view(2, 3).t()})
    assert copied["again"] is copied["base"]
    copied["view"].add_(10)
    copied["transposed"][0, 0] = -1
    assert copied["base"].tolist() == [-1.0, 1.0, 12.0, 13.0, 4.0, 5.0]
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def _tied_model() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model.to(DEVICE)


def test_moving_a_model_keeps_tied_parameters_tied() -> None:
    """To the device and back; an optimizer made before the move goes on with the same parameters."""
    model = _tied_model()
    assert model["head"].weight is model["embedding"].weight
    assert len(list(model.parameters())) == 1
    assert model.cpu()["head"].weight is model["embedding"].weight
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.to(DEVICE)
    before = layer.weight.detach().cpu()
    layer(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    assert_same(layer.weight.detach(), before - 0.1)


def test_deepcopy_keeps_tied_parameters_tied() -> None:
    """And apart from the original."""
    model = _tied_model()
    copied = copy.deepcopy(model)
    assert copied["head"].weight is copied["embedding"].weight
    assert copied["head"].weight is not model["head"].weight


@pytest.mark.parametrize("way", SHARING_WAYS)
def test_a_state_dict_keeps_tied_parameters_tied(way: str) -> None:
    """By the memory they share."""
    state = WAYS[way](_tied_model().state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, f"{DEVICE}:1"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        (f"{DEVICE}:2", f"{DEVICE}:2"),
        (DEVICE, f"{DEVICE}:0"),
        ({f"{DEVICE}:1": f"{DEVICE}:3"}, f"{DEVICE}:3"),
        (lambda storage, location: storage, "cpu"),
    ],
)
def test_map_location(map_location: Any, device: str, weights_only: bool) -> None:
    """Where tensors go when they are loaded."""
    saved = _saved({"x": torch.arange(3.0, device=f"{DEVICE}:1")})
    loaded = torch.load(saved, map_location=map_location, weights_only=weights_only)["x"]
    assert loaded.device == torch.device(device)
    assert loaded.tolist() == [0.0, 1.0, 2.0]


def test_a_cpu_file_is_loaded_onto_the_device() -> None:
    """Checkpoints written elsewhere."""
    saved = _saved({"w": torch.arange(6.0).reshape(2, 3).t()})
    loaded = torch.load(saved, map_location=DEVICE, weights_only=True)["w"]
    assert type(loaded) is marid.LazyTensor
    assert_same(loaded, torch.arange(6.0).reshape(2, 3).t())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_package() -> None:
    tensor = torch.arange(6.0, device=DEVICE)
    exporter = torch.package.PackageExporter(file := io.BytesIO())
    exporter.save_pickle("weights", "them.pkl", {"all": tensor, "some": tensor.view(2, 3)[1:]})
    exporter.close()
    file.seek(0)
    loaded = torch.package.PackageImporter(file).load_pickle("weights", "them.pkl")
    assert loaded["some"].device == tensor.device
    loaded["all"] += 1
    assert_same([loaded["all"], loaded["some"]], [torch.arange(6.0) + 1, torch.arange(6.0).view(2, 3)[1:] + 1])


def test_a_file_on_disk_and_the_legacy_format(tmp_path: Path) -> None:
    """By path, memory-mapped, and in the format of old files, which have to be loaded onto the CPU first."""
    x = torch.arange(5.0, device=DEVICE)
    torch.save(x, tmp_path / "new.pt")
    torch.save(x, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(torch.load(tmp_path / "new.pt", weights_only=True), torch.arange(5.0))
    assert_same(torch.load(tmp_path / "new.pt", mmap=True, map_location="cpu", weights_only=True), torch.arange(5.0))
    with pytest.raises(UnsupportedOperationError, match="map_location='cpu'"):
        torch.load(tmp_path / "old.pt", weights_only=True)
    assert_same(torch.load(tmp_path / "old.pt", map_location="cpu", weights_only=True), torch.arange(5.0))


def test_loading_onto_a_device_that_does_not_exist() -> None:
    """An error that says what to do."""
    saved = _saved(torch.ones(1, device=f"{DEVICE}:1"))
    text = saved.getvalue().replace(f"{DEVICE}:1".encode(), f"{DEVICE}:9".encode())
    assert text != saved.getvalue()
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(io.BytesIO(text), weights_only=True)


def test_saving_is_one_read_of_each_tensor() -> None:
    """A view in a file brings its storage, as for any device; saving runs what is pending."""
    x = torch.arange(6.0, device=DEVICE) * 2
    loaded = torch.load(_saved([x, x[1:3]]), weights_only=True, map_location="cpu")
    assert loaded[0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert loaded[1].untyped_storage().data_ptr() == loaded[0].untyped_storage().data_ptr()
    assert loaded[1].storage_offset() == 1


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Model, optimizer and random state saved and restored: the same losses as without the break."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1)).to(DEVICE)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        x = torch.ones(4, 3, device=DEVICE)
        return [train_step(optimizer, model(x).square().mean()).item() for _ in range(count)]

    model, optimizer = parts()
    whole = steps(model, optimizer, 6)
    model, optimizer = parts()
    first = steps(model, optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.remote_accelerator.get_rng_state(),  # type: ignore[attr-defined]
    }
    torch.save(state, tmp_path / "checkpoint.pt")
    model, optimizer = parts()
    steps(model, optimizer, 1)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    torch.remote_accelerator.set_rng_state(loaded["random"])  # type: ignore[attr-defined]
    assert first + steps(model, optimizer, 3) == whole


def test_deepcopy_of_a_module_runs_nothing() -> None:
    """Copies are recorded, not computed."""
    model = nn.Linear(2, 2).to(DEVICE)
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    executed = marid.stats().ops_executed
    copied = copy.deepcopy(model)
    assert marid.stats().ops_executed == executed
    assert copied.weight.grad is None  # as of any parameter
    with torch.no_grad():
        copied.weight.zero_()
    assert model.weight.abs().sum().item() > 0


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("part", ["whole", "slice", "leaf", "parameter"])
def test_what_autograd_sees_of_a_copy(way: str, part: str) -> None:
    """A copy is a tensor of its own, not a view, with PyTorch's version; its views follow it."""

    def facts(device: str) -> Any:
        x = torch.ones(3, device=device)
        x.add_(1)
        x = {
            "whole": lambda: x,
            "slice": lambda: x[1:],
            "leaf": lambda: x.requires_grad_(),
            "parameter": lambda: torch.nn.Parameter(x),
        }[part]()
        ways = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda t: pickle.loads(pickle.dumps(t))}
        made = ways[way](x)
        was = made._version, made._is_view(), made.is_leaf, made.requires_grad
        with torch.no_grad():
            view = made[:1]
        made.requires_grad_()
        return *was, view.requires_grad, view._base is made

    assert facts(DEVICE) == facts("cpu")


def test_deepcopy_of_a_result_is_refused() -> None:
    """As for any tensor with a history, with PyTorch's message."""
    messages = []
    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError) as caught:
            copy.deepcopy(torch.ones(2, device=device, requires_grad=True) * 2)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_shallow_copy_shares_memory() -> None:
    """``copy.copy`` is a second tensor over the same memory."""
    x = torch.ones(3, device=DEVICE)
    y = copy.copy(x)
    y.zero_()
    assert x.tolist() == [0.0, 0.0, 0.0]


def test_python_attributes_are_kept() -> None:
    """As PyTorch does for tensors and parameters."""
    for x in (torch.ones(2, device=DEVICE), nn.Parameter(torch.ones(2, device=DEVICE))):
        x.note = "mine"  # type: ignore[attr-defined]
        assert hasattr(copy.deepcopy(x), "note") is not isinstance(x, nn.Parameter)
        assert pickle.loads(pickle.dumps(x)).note == "mine"
        assert torch.load(_saved(x), weights_only=False).note == "mine"


def _double(x: torch.Tensor) -> list[float]:
    return (x * 2).tolist()


def test_tensors_go_to_another_process() -> None:
    """A spawned process gets a tensor of its own with the same values."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_double, (torch.arange(3.0, device=DEVICE),)) == [0.0, 2.0, 4.0]


def _sums(tensors: list[torch.Tensor], results: Any) -> None:
    results.put([one.sum().item() for one in tensors])


def test_several_tensors_are_arguments_of_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    tensors = [torch.full((1000,), float(number), device=DEVICE) for number in range(3)]
    process = context.Process(target=_sums, args=(tensors, results))
    with pytest.warns(UserWarning, match="what either of the two writes to them the other does not see") as warned:
        process.start()
    assert len(warned) == 1
    assert results.get(timeout=120) == [0.0, 1000.0, 2000.0]
    process.join()
    assert process.exitcode == 0


def test_a_deep_copy_of_a_parameter_is_that_of_pytorch() -> None:
    def copied(device: str) -> tuple[Any, ...]:
        layer = torch.nn.Linear(2, 2).to(device)
        layer.weight.mark = 1  # pyright: ignore[reportAttributeAccessIssue]
        layer(torch.ones(1, 2, device=device)).sum().backward()
        made = copy.deepcopy(layer)
        tied = torch.nn.ModuleList([layer, layer])
        again = copy.deepcopy(tied)
        assert again[0] is again[1]
        return made.weight.grad, hasattr(made.weight, "mark"), made.weight.requires_grad

    assert copied(DEVICE) == copied("cpu") == (None, False, True)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex32, torch.bfloat16])
def test_types_without_a_storage_class(dtype: torch.dtype) -> None:
    x = torch.arange(6, device=DEVICE).to(dtype)
    for tensor in (x, x.reshape(2, 3).t(), x[1:4]):
        for weights_only in (True, False):
            for place in (None, "cpu"):
                assert_same(
                    torch.load(_saved(tensor), map_location=place, weights_only=weights_only).cpu(), tensor.cpu()
                )
        assert_same(pickle.loads(pickle.dumps(tensor)), tensor.cpu())
        assert pickle.loads(pickle.dumps(tensor)).stride() == tensor.stride()


def test_a_leaf_with_attributes_stays_a_leaf() -> None:
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.mark = 1  # pyright: ignore[reportAttributeAccessIssue]
    for copied in (pickle.loads(pickle.dumps(x)), _through_save(x), torch.load(_saved(x), map_location="cpu")):
        assert (copied.is_leaf, copied.requires_grad, copied.mark) == (True, True, 1)
        (copied * 2).sum().backward()
        assert copied.grad.tolist() == [2.0] * 3
