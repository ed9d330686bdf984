"""The device as PyTorch sees it: indices, device module, ``torch.accelerator``, default device, streams, threads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import marid
from tests.helpers import DEVICE, assert_same, on_both

device_module: Any = torch.remote_accelerator  # type: ignore[attr-defined]


def test_the_device_is_known_to_pytorch() -> None:
    """By name, by module and, once it is used, as the accelerator."""
    device_module.init()
    assert torch.device(DEVICE).type == DEVICE
    assert torch.get_device_module(DEVICE) is device_module
    assert torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == DEVICE
    assert device_module.is_available()
    assert device_module.is_initialized()


def test_several_indices() -> None:
    """Each index is a device of its own; work on one does not run on another."""
    x, y = torch.ones(2, device=f"{DEVICE}:0"), torch.ones(2, device=f"{DEVICE}:1") * 2
    assert device_module.device_count() == torch.accelerator.device_count() >= 2
    assert x.device.index == 0
    assert y.device.index == 1
    assert (y + 1).device.index == 1
    y.tolist()
    assert not x.materialized  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "mix", [lambda x, y: x + y, lambda x, y: torch.cat([x, y]), lambda x, y: x.mul_(y), lambda x, y: torch.equal(x, y)]
)
def test_indices_do_not_mix(mix: Any) -> None:
    """PyTorch's device error."""
    with pytest.raises(RuntimeError, match=r"(?i)same device"):
        mix(torch.ones(2, device=f"{DEVICE}:0"), torch.ones(2, device=f"{DEVICE}:1"))


def test_moving_between_indices() -> None:
    """``to`` and ``copy_`` cross them; values and strides stay."""
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3).t()
    y = x.to(f"{DEVICE}:1")
    assert y.device.index == 1
    assert_same(y, torch.arange(6.0).reshape(2, 3).t())
    x.copy_(y * 2)
    assert x.device.index == 0
    assert_same(x, torch.arange(6.0).reshape(2, 3).t() * 2)


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros,
        torch.empty,
        torch.randn,
        lambda n, device: torch.full((n,), 1, device=device),
        lambda n, device: torch.arange(n, device=device),
        lambda n, device: torch.tensor([1.0] * n, device=device),
        lambda n, device: torch.ones(n).to(device),
        lambda n, device: torch.zeros(n, device=DEVICE).new_ones(n, device=device),
        lambda n, device: torch.zeros_like(torch.zeros(n, device=DEVICE), device=device),
        lambda n, device: torch.eye(n, device=device)[0],
    ],
)
def test_factories_make_tensors_on_the_index_they_are_given(make: Any) -> None:
    """Whatever index the same call was made for before; without an index, the current one."""
    for index in (0, 1, 0, 3):
        assert make(2, device=f"{DEVICE}:{index}").device.index == index
    device_module.set_device(2)
    assert make(2, device=DEVICE).device.index == 2
    with device_module.device(1):
        assert make(2, device=DEVICE).device.index == 1
    assert make(2, device=DEVICE).device.index == 2


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_may_change() -> None:
    """It decides what operations on whole numbers and factories make, when they are written."""

    def run(device: str) -> list[Any]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            x = torch.arange(4, device=device)
            found += [x / 3, x.sqrt(), x * 0.5, x + 1j, x > 2, (x > 2) * 1.5, torch.linspace(0, 1, 3, device=device)]
            found += [
                torch.full((2,), 0.1, device=device),
                torch.tensor([0.1], device=device),
                torch.rand(2, device=device),
            ]
            found += [nn.Linear(1, 1, device=device).weight.dtype, x.to(device).float() / 3, torch.fft.fft(x)]
        return [*found, *found[:7]]

    on_both(run)
    torch.set_default_dtype(torch.float32)
    x = torch.ones(3, dtype=torch.int64, device=DEVICE) / 3
    marid.reset_stats()
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float64)
    [sync] = marid.stats().syncs
    assert sync.reason == "set_default_dtype()"
    assert sync.source is not None
    assert "test_device.py" in sync.source
    assert x.dtype is torch.float32
    assert x.cpu().dtype is torch.float32


def test_what_was_written_under_deterministic_algorithms_runs_under_them() -> None:
    """They fill memory that nobody has written."""
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.empty(3, device=DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.isnan().all()


@pytest.mark.filterwarnings("ignore")
def test_numbers_decide_the_shape_of_out() -> None:
    """The same call with another number makes another shape, also when it writes to a given tensor."""
    for end in (-8.1, -8.0, -7.9, -3.5):
        for function in (torch.arange, torch.range):
            for shape in ((2,), (0,), (2, 2)):
                expected, out = torch.empty(shape), torch.empty(shape, device=DEVICE)
                assert_same(function(0.0, end, -4.0, out=out), function(0.0, end, -4.0, out=expected))
                assert_same(out, expected)


@pytest.mark.parametrize("index", [8, 64, 127])
def test_an_index_that_does_not_exist(index: int) -> None:
    """Every way to name it raises ``RuntimeError`` with the number of devices."""
    device = f"{DEVICE}:{index}"
    for use in (
        lambda: torch.zeros(1, device=device),
        lambda: torch.tensor([1.0], device=device),
        lambda: torch.ones(1).to(device),
        lambda: nn.Linear(1, 1).to(device),
        lambda: device_module.set_device(index),
        lambda: device_module.synchronize(index),
        lambda: device_module.get_rng_state(index),
        lambda: torch.randn(1, device=device),
        lambda: torch.zeros(1, device=DEVICE).to(device),
    ):
        with pytest.raises(RuntimeError, match=r"8 device|invalid device"):
            use()
    assert torch.zeros(1, device=DEVICE).item() == 0.0


def test_current_device() -> None:
    """Set, nested, restored after an exception."""
    assert device_module.current_device() == torch.accelerator.current_device_index() == 0
    device_module.set_device(1)
    assert torch.accelerator.current_device_index() == 1
    with pytest.raises(ZeroDivisionError), device_module.device(2):
        1 / 0
    with device_module.device(2):
        assert device_module.current_device() == 2
    assert device_module.current_device() == 1
    torch.accelerator.set_device_index(0)
    assert device_module.current_device() == 0


def test_current_device_belongs_to_its_thread() -> None:
    """As for any accelerator."""
    device_module.set_device(3)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(device_module.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_default_device() -> None:
    """``set_default_device`` and device contexts reach factories and modules; a named device wins."""
    torch.set_default_device(DEVICE)
    assert torch.zeros(1).device.type == DEVICE
    assert nn.Linear(2, 2).weight.device.type == DEVICE
    assert torch.tensor([1.0]).device.type == DEVICE
    assert torch.zeros(1, device="cpu").device.type == "cpu"
    with torch.device("cpu"):
        assert torch.zeros(1).device.type == "cpu"
    torch.set_default_device(f"{DEVICE}:2")
    assert torch.arange(3).device.index == 2
    torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"
    with torch.device(DEVICE):
        x = torch.ones(2)
    assert x.device.type == DEVICE


def test_unmodified_script_under_a_default_device() -> None:
    """Data sets, loaders, models and losses written without naming a device."""
    torch.set_default_device(DEVICE)
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None], torch.arange(8.0)[:, None] * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
    assert losses[-1].item() < losses[0].item()


def test_data_loader_with_shuffling_and_workers() -> None:
    """Batches are made on the CPU by other processes and moved, as for any device."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    seen = [value for (batch,) in loader for value in batch.to(DEVICE).tolist()]
    assert sorted(seen) == list(range(8))


def test_synchronize_runs_everything_held() -> None:
    """On the device it names."""
    x, y = torch.ones(2, device=DEVICE) + 1, torch.ones(2, device=f"{DEVICE}:1") + 1
    device_module.synchronize()
    assert x.materialized  # type: ignore[attr-defined]
    assert not y.materialized  # type: ignore[attr-defined]
    torch.accelerator.synchronize()
    device_module.synchronize(1)
    assert y.materialized  # type: ignore[attr-defined]


def test_streams_and_events() -> None:
    """As much as code written for accelerators needs: they exist, and order is program order."""
    stream = device_module.current_stream()
    with device_module.stream(stream):
        x = torch.ones(2, device=DEVICE) * 2
    event = device_module.Event()
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    assert event.query()
    assert x.tolist() == [2.0, 2.0]
    assert torch.accelerator.current_stream().device.type == DEVICE


def test_a_stream_of_a_number_becomes_current() -> None:
    default = torch.accelerator.current_stream()
    numbered = torch.Stream(stream_id=1234, device_index=default.device_index, device_type=default.device_type)
    torch.accelerator.set_stream(numbered)
    try:
        assert torch.accelerator.current_stream() == numbered
    finally:
        torch.accelerator.set_stream(default)
    assert torch.accelerator.current_stream() == default


def test_a_stream_makes_its_device_current() -> None:
    """So that code for several devices can be written in terms of streams, given by name too."""
    elsewhere = device_module.Stream(1)
    with device_module.stream(stream=elsewhere):
        assert device_module.current_device() == 1
        with device_module.stream(None):
            assert device_module.current_device() == 1
    assert device_module.current_device() == 0


def test_memory_questions() -> None:
    """Allocated and peak bytes of living values."""
    before = device_module.memory_allocated()
    x = torch.zeros(1000, device=DEVICE)
    assert device_module.memory_allocated() == before
    x.materialize()  # type: ignore[attr-defined]
    assert device_module.memory_allocated() == before + 4000
    assert device_module.max_memory_allocated() >= before + 4000
    assert device_module.memory_stats()["allocated_bytes.all.current"] == before + 4000
    view = x[10:]
    view.materialize()
    assert device_module.memory_allocated() == before + 4000
    device_module.empty_cache()


def test_half_of_torch_cuda_s_names_exist() -> None:
    """What device-agnostic scripts call on a device module."""
    for name in (
        "is_available device_count current_device set_device device synchronize manual_seed manual_seed_all seed "
        "seed_all initial_seed get_rng_state set_rng_state memory_allocated max_memory_allocated memory_reserved "
        "reset_peak_memory_stats empty_cache get_device_name get_device_properties is_bf16_supported Stream Event "
        "current_stream default_stream stream is_initialized init"
    ).split():
        assert callable(getattr(device_module, name)), name
    assert "marid" in device_module.get_device_name()


def test_backward_runs_on_the_thread_that_called_it() -> None:
    """Also in threads other than the main one."""
    seen: list[Any] = []

    def work() -> None:
        x = torch.ones(2, device=DEVICE, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(threading.current_thread()))
        y.sum().backward()
        seen.append(x.grad.tolist())  # type: ignore[union-attr]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [thread, [2.0, 2.0]]


def test_threads_train_at_the_same_time() -> None:
    """Several threads record, write, read and differentiate at once; each gets what it would get alone."""

    def train(device: str, seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 4, generator=generator).to(device).requires_grad_()
        losses = []
        for _ in range(20):
            loss = (w @ w.t() - torch.eye(4, device=device)).square().mean()
            loss.backward()
            with torch.no_grad():
                w -= 0.1 * w.grad  # type: ignore[operator]
                w[0].mul_(0.99)
            w.grad = None
            losses.append(loss.item())
        return losses

    found: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda s=s: found.update({s: train(DEVICE, s)})) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: train("cpu", seed) for seed in range(4)}


def test_threads_read_one_tensor() -> None:
    """A value that many threads wait for is computed once."""
    x = torch.arange(1000.0, device=DEVICE)
    for _ in range(50):
        x = x * 0.5 + 1
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(x.sum().item())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1


def test_threads_share_a_written_tensor() -> None:
    """Writes from several threads are all there in the end."""
    total = torch.zeros(4, device=DEVICE)
    lock = threading.Lock()

    def add() -> None:
        for _ in range(50):
            with lock:
                total.add_(1)
            torch.randn(3, device=DEVICE).sum().item()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.tolist() == [200.0] * 4


def test_float64_and_integers_and_complex() -> None:
    """All dense types of the CPU exist on the device."""

    def run(device: str) -> list[torch.Tensor]:
        kinds = "uint8 int8 int16 int32 int64 uint16 bool float16 bfloat16 float32 float64 float8_e4m3fn".split()
        kinds += ["complex64", "complex128"]
        return [torch.tensor([0, 1, 1], dtype=getattr(torch, kind), device=device) for kind in kinds]

    for lazy, expected in zip(run(DEVICE), run("cpu"), strict=True):
        assert lazy.dtype == expected.dtype
        assert torch.equal(lazy.cpu().view(torch.uint8), expected.view(torch.uint8))


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, everything = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=everything, timeout=600, check=False)


_NOT_BUILT = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.13.0+elsewhere")  # for which nothing has been built
assert torch.ones(3).sum().item() == 3
try:
    if {by_use}:
        torch.ones(3, device="remote_accelerator")
    else:
        import marid
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("by_use", [False, True])
def test_where_the_cpp_half_cannot_be_built_the_import_says_what_to_install(by_use: bool, tmp_path: Path) -> None:
    """PyTorch's own import, which makes the device known, goes well."""
    done = _python(_NOT_BUILT.format(by_use=by_use), PATH=str(tmp_path), CXX="", MARID_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stdout
    assert "apt-get install g++ python3-dev" in done.stdout
    assert "2.13.0+elsewhere" in done.stdout


def test_the_number_of_devices_is_a_setting() -> None:
    """``MARID_DEVICES``; a bad value is refused at import, naming the variable."""
    code = "import torch, marid; print(torch.remote_accelerator.device_count())"
    assert _python(code, MARID_DEVICES="3").stdout.strip() == "3"
    failed = _python(code, MARID_DEVICES="many")
    assert failed.returncode != 0
    assert "MARID_DEVICES" in failed.stderr


def test_pending_work_at_interpreter_exit_is_dropped_quietly() -> None:
    """No crash, no message, exit code 0."""
    code = (
        "import torch, marid\n"
        "x = torch.randn(10, device='remote_accelerator', requires_grad=True)\n"
        "loss = (x * x).sum(); loss.backward()\n"
        "y = x.grad * 2\n"
    )
    done = _python(code)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_importing_marid_leaves_cpu_work_alone() -> None:
    """Results, types and defaults of CPU tensors are PyTorch's own."""
    x = torch.ones(2, 2)
    assert type(x @ x) is torch.Tensor
    assert torch.get_default_device().type == "cpu"
    assert marid.stats().ops_captured == 0
    assert marid.stats().ops_executed == 0


def test_a_small_program_on_every_index() -> None:
    """The same numbers everywhere."""
    expected = on_both(lambda device: torch.linspace(0, 1, 5, device=device).cumsum(0))
    for index in range(device_module.device_count()):
        assert_same(torch.linspace(0, 1, 5, device=f"{DEVICE}:{index}").cumsum(0), expected.cpu())


def test_memory_is_freed_and_taken_again_through_its_storage() -> None:
    """As FSDP does it: all aliases see it, and what was recorded before sees what was there."""
    x = torch.arange(6.0, device=DEVICE) + 1
    view, tail, after = x.view(2, 3), x[1:], x * 2
    storage = x.untyped_storage()
    for nbytes in (0, 24):
        storage.resize_(nbytes)
        assert storage.nbytes() == nbytes
    assert after.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    x.copy_(torch.arange(6.0))
    assert (view.tolist(), tail.tolist()) == ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [1.0, 2.0, 3.0, 4.0, 5.0])
    del x, view, tail
    storage.resize_(8)  # which is no tensor's any more
    assert storage.nbytes() == 8


@pytest.mark.in_process("a worker frees memory with the tensors that lie in it")
def test_freed_memory_is_given_back() -> None:
    x = torch.ones(1 << 20, device=DEVICE)
    x.sum().item()
    held = marid.frontend.device.memory_allocated()
    storage = x.untyped_storage()
    storage.resize_(0)
    assert marid.frontend.device.memory_allocated() == held - (4 << 20)
    assert storage.nbytes() == x.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="unallocated storage"):
        x.tolist()
    storage.resize_(8 << 20)
    assert x.fill_(3).sum().item() == 3 << 20
    assert storage.nbytes() == 8 << 20


def test_storages_cannot_be_made() -> None:
    """An error, and no end of the process."""
    with pytest.raises(RuntimeError, match="has no storages of its own"):
        torch.UntypedStorage(4, device=DEVICE)


def test_hooks_of_parameters_move_with_their_module() -> None:
    torch.ones(1, device=DEVICE)  # the first use of the device is not the move

    def called(device: str) -> list[Any]:
        layer, calls = nn.Linear(2, 2), list[Any]()
        first = layer.weight.register_hook(lambda _: calls.append("gradient"))
        second = layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        layer.to(device).double().float()
        layer.cpu().to(device)
        for turn in range(3):
            layer(torch.ones(1, 2, device=device)).sum().backward()
            calls.append(turn)
            (first, second, second)[turn].remove()
        return calls

    assert called(DEVICE) == called("cpu") == ["gradient", "accumulated", 0, "accumulated", 1, 2]


@pytest.mark.parametrize("back", [False, True], ids=["to the device", "and back"])
@pytest.mark.parametrize("kind", ["removed", "removed after accumulation", "unpickled"])
def test_hooks_are_called_where_none_is_left_when_a_module_moves(kind: str, back: bool) -> None:
    """A parameter then has an empty dictionary of hooks, and so has one that was unpickled."""
    torch.ones(1, device=DEVICE)
    layer = nn.Linear(2, 2)
    if kind == "unpickled":
        layer = pickle.loads(pickle.dumps(layer))
    elif kind == "removed":
        layer.weight.register_hook(lambda grad: grad).remove()
    else:
        layer.weight.register_post_accumulate_grad_hook(lambda _: None).remove()
    layer.to(DEVICE)
    x = torch.ones(1, 2, device=DEVICE)
    if back:
        layer.cpu()
        x = x.cpu()
    layer.weight.register_hook(lambda grad: grad * 10)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[10.0, 10.0]] * 2


@pytest.mark.parametrize("holds", ["a view", "a weak reference", "a graph"])
def test_parameters_that_something_else_refers_to_stay_themselves(holds: str) -> None:
    """Modules that share them, and optimizers, go on with them; what referred to them keeps what it had."""
    torch.ones(1, device=DEVICE)
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.LayerNorm(3), head)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.tensor([1, 2])).square().mean()
    before = embedding.weight.detach().clone()
    ways = {"a view": lambda p: p.view(-1), "a weak reference": weakref.ref, "a graph": lambda _: loss}
    held: Any = [ways[holds](p) for p in model.parameters()]
    if holds != "a graph":
        loss = None
    model.to(DEVICE)
    assert all(p.device.type == DEVICE for p in optimizer.param_groups[0]["params"])
    assert len(list(model.parameters())) == 3
    if holds == "a view":
        assert_same(held[0].detach(), before.view(-1))
    elif holds == "a weak reference":
        assert held[0]() is embedding.weight
    else:
        with pytest.raises(RuntimeError, match="before its module moved to another device"):
            held[0].backward()
    model(torch.tensor([1, 2], device=DEVICE)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(head.weight.cpu(), before)
    assert embedding.weight is head.weight


def test_a_parameter_that_cannot_be_swapped_is_replaced() -> None:
    """PyTorch swaps no tensor to which something in C++ refers weakly."""
    torch.ones(1, device=DEVICE)
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    before = layer.weight
    _reference = torch._C._WeakTensorRef(before)
    layer.to(DEVICE)
    assert layer.weight.device.type == DEVICE
    assert layer.weight.grad.device.type == DEVICE
    assert (type(before), before.device.type) == (nn.Parameter, "cpu")


def test_recurrent_layers_that_share_weights_move() -> None:
    """They have weak references to their weights, once they were converted."""
    torch.ones(1, device=DEVICE)
    layer, gru = nn.Linear(2, 6), nn.GRU(2, 2)
    gru.bias_ih_l0 = layer.bias
    model = nn.Sequential(layer, gru).double()
    model.to(DEVICE)
    assert layer.bias is gru.bias_ih_l0
    assert len(list(model.parameters())) == 5


@pytest.mark.parametrize("held", [False, True], ids=["free", "held by a view"])
def test_attributes_of_parameters_move_with_them(held: bool) -> None:
    """Such as marks by which an optimizer groups them; also back, and of tied ones."""
    torch.ones(1, device=DEVICE)
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    head.weight.no_decay = True  # type: ignore[attr-defined]
    view = head.weight.view(6) if held else None
    model = nn.Sequential(embedding, head)
    for move in (lambda: model.to(DEVICE), lambda: model.double(), lambda: model.cpu()):
        move()
        assert all(one.no_decay for one in model.parameters())
        assert head.weight is embedding.weight
    assert type(head.weight) is nn.Parameter
    assert vars(head.weight) == {"no_decay": True}
    del view
