"""Recording calls: C++ and Python read and record the same, and keys tell apart what must be told apart."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marid
from marid import LazyTensor, native
from marid.frontend import calls, handles, record
from marid.graph.node import Node, Output
from tests.helpers import DEVICE, on_both

_numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.complex_numbers())


@pytest.fixture(autouse=True, scope="module")
def _recorded() -> Iterator[None]:
    """What these loops read is recorded, and does not run at once."""
    kept, marid.settings.immediate_bytes = marid.settings.immediate_bytes, 0
    yield
    marid.settings.immediate_bytes = kept


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Inside, C++ knows of no recorder and leaves every call to Python."""
    native.module.use({})
    try:
        yield
    finally:
        native.module.use(record._recorders)


def _seen_by_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that reach ``__torch_dispatch__`` from now on."""
    seen: list[str] = []

    def spy(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return record.dispatch(cls, func, types, args, kwargs)

    monkeypatch.setattr(marid.LazyTensor, "__torch_dispatch__", classmethod(spy))
    return seen


def _calls() -> list[Callable[[], torch.Tensor]]:
    """One for each kind of argument that a usual call has."""
    x, y = torch.ones(2, 3, 4, 5, device=DEVICE), torch.ones(2, 3, 4, 5, device=DEVICE)
    i = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    c = torch.ones(2, dtype=torch.complex64, device=DEVICE)
    aten = torch.ops.aten
    stats = aten.native_layer_norm.default(x, [5], None, None, 1e-5)[1:]
    return [
        lambda: x + y,
        lambda: torch.add(x, y, alpha=2),
        lambda: torch.add(x, y, alpha=2.5),
        lambda: torch.add(x, y, alpha=1),  # what the schema has anyway
        *[lambda n=n: x * n for n in (2, 2.0, -1.5, True, 1e30, math.inf, math.nan)],
        *[lambda n=n: i * n for n in (2, -3, True)],
        lambda: c * (1 + 2j),
        lambda: x.sum((0, 2), keepdim=True, dtype=torch.float64),
        lambda: x.sum(),
        lambda: x.permute(3, 2, 1, 0),
        lambda: x.clamp(min=0.5),
        lambda: x.clamp(max=2),
        lambda: torch.cat([x, y], 1),
        lambda: x.to(torch.float16),
        lambda: x.clone(memory_format=torch.channels_last),
        lambda: aten.native_dropout_backward.default(x, x > 0, 2.0),
        lambda: aten.gelu.default(x, approximate="tanh"),
        lambda: aten.gelu.default(x, approximate="none"),
        lambda: x.index_select(0, i),
        lambda: x[:, i],
        lambda: aten.native_layer_norm.default(x, [5], None, None, 1e-5)[0],
        lambda: aten.constant_pad_nd.default(x, [1, 2], 0.5),
        lambda: aten.upsample_nearest2d.vec(x, None, [2.0, 2.0]),
        lambda: x.add_(1),
        lambda: x.mul_(y),
        lambda: x.as_strided((2, 2), (1, 2)),
        lambda: torch.add(x, y, out=y),
        lambda: x.detach(),
        lambda: x.split(1)[1],
        lambda: x.unbind(1)[2],
        lambda: aten.native_layer_norm_backward.default(x, x, [5], *stats, None, None, [True, False, False])[0],
        lambda: x.max(0)[1],
        lambda: (torch._foreach_add_([x, y], 1), x)[1],
        lambda: torch._foreach_mul([x, y], [1.0, 2.0])[1],
        lambda: torch.ones_like(x),
        lambda: torch.ones_like(x, memory_format=torch.preserve_format),
        lambda: torch.full_like(x, 2.5, dtype=torch.float64),
        lambda: torch.zeros_like(x, device=x.device, pin_memory=False, layout=torch.strided),
        lambda: x.new_zeros(3, 4),
        lambda: x.new_full((2,), 7, dtype=torch.int32),
    ]


def test_both_read_the_same_arguments() -> None:
    """The keys that one has filled in are those that the other looks up, and the nodes are equal."""
    for call in _calls():
        with torch.no_grad(), _in_python():
            call()
            by_python = call()
        with torch.no_grad():
            by_cpp = call()
        assert _read(by_cpp) == _read(by_python)


def _read(result: Any) -> Any:
    node = result._operation_node()
    return _shown(node.args), _shown(node.kwargs), node.op, node.spec


def _shown(part: Any) -> Any:
    """A form in which NaN equals itself, and 1 is not 1.0 or True; of values only their geometry."""
    if isinstance(part, tuple):
        return [_shown(item) for item in part]
    if isinstance(part, (Node, Output)):
        return type(part), id(part.spec)
    return (type(part), repr(part)) if isinstance(part, (int, float, complex, str)) else (type(part), id(part))


def test_usual_calls_do_not_reach_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a call is known, whichever of the two has seen it first."""
    calls = _calls()
    with torch.no_grad():
        for call in calls:
            call()
            with _in_python():
                call()
        seen = _seen_by_python(monkeypatch)
        for call in calls:
            call()
    assert seen == []


def test_where_a_factory_puts_its_result_is_followed() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(3):
        assert torch.zeros_like(x).device == x.device
        assert torch.zeros_like(x, device="cpu").device.type == "cpu"
        assert torch.zeros_like(x, device=f"{DEVICE}:1").device == torch.device(DEVICE, 1)
        assert torch.zeros_like(x, device="meta").is_meta
        with pytest.raises(RuntimeError, match="sparse"):
            torch.zeros_like(x, layout=torch.sparse_coo)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_numbers, _numbers)
def test_both_read_the_same_numbers(one: Any, other: Any) -> None:
    """Of any kind and size, also those that raise."""
    x = torch.ones(2, dtype=torch.complex128, device=DEVICE)

    def attempt(operation: Callable[[], torch.Tensor]) -> Any:
        try:
            return _read(operation())
        except (RuntimeError, TypeError) as error:
            return type(error), str(error).split(" at ")[0]

    for operation in (lambda: torch.add(x, one, alpha=other), lambda: x * one, lambda: torch.full_like(x, other)):
        with _in_python():
            first = attempt(operation)
        assert attempt(operation) == first


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_raised_while_recording_is_not_lost(requires_grad: bool) -> None:
    """By the handler of a signal, say: it surfaces at the line that records, and nothing is recorded by then."""

    class Stop(Exception):
        pass

    def raise_once(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code is calls.bucket.__code__:
            sys.settrace(None)
            raise Stop

    x = torch.ones(2, device=DEVICE, requires_grad=requires_grad)
    x * 1e30
    record.recorder_of(torch.ops.aten.mul.Tensor).forget()
    pending = len(handles.tape(0).pending())
    before = sys.gettrace()
    sys.settrace(raise_once)
    try:
        with pytest.raises(Stop):
            x * 1e30
    finally:
        sys.settrace(before)
    assert len(handles.tape(0).pending()) == pending
    assert (x * 1e30).tolist() == torch.full((2,), 1e30).tolist()


def test_reading_leaks_nothing() -> None:
    """Also where a call is left to Python halfway."""
    x, y = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    generator = torch.Generator(DEVICE)
    value, number = x._value, 1234567.5
    counted = [value, value.spec, x, y, number, torch.float16]

    def work() -> None:
        torch.add(x, y, alpha=number)
        x.sum(1, dtype=torch.float16)
        torch.cat([x, y])
        x.bernoulli(0.5, generator=generator)
        with pytest.raises(RuntimeError):
            torch.cat([x, y.cpu()])

    for _ in range(3):  # what is known of calls is kept from the second one on
        work()
    before = [sys.getrefcount(thing) for thing in counted]
    for _ in range(50):
        work()
    torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    assert [sys.getrefcount(thing) for thing in counted] == before


def test_modes_and_other_subclasses_still_see_operators() -> None:
    """A dispatch mode sees every call on the device; another subclass keeps its own ``__torch_dispatch__``."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    x = torch.ones(2, 2, device=DEVICE)
    x + x
    with Names():
        y = x + x
    assert names == ["aten.add.Tensor"]
    assert y.tolist() == [[2, 2], [2, 2]]
    with FlopCounterMode(display=False) as flops:
        x @ x
    assert flops.get_total_flops() == 16

    with torch._subclasses.FakeTensorMode() as fake:
        assert type(fake.from_tensor(torch.ones(3)) + 1).__name__ == "FakeTensor"
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            fake.from_tensor(x) + x
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        found = fake.from_tensor(x) + x
    assert (type(found).__name__, found.device, found.shape) == ("FakeTensor", x.device, x.shape)


def test_lengths_on_the_cpu() -> None:
    """A mode has ``ctc_loss`` call its operator with lengths as tensors, which may be on the CPU beside any device."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        scores = torch.randn(6, 2, 5).to(device).log_softmax(2).detach().requires_grad_()
        targets, lengths = torch.tensor([[1, 2], [3, 3]]).to(device), (torch.tensor([6, 5]), torch.tensor([2, 2]))
        losses, states = torch.ops.aten._ctc_loss.Tensor(scores, targets, *lengths)
        losses.sum().backward()
        assert scores.grad is not None
        return [losses.tolist(), states.shape, scores.grad.tolist()]

    assert run(DEVICE) == run("cpu")


def test_numbers_that_are_equal_but_not_the_same_are_told_apart() -> None:
    """``1``, ``1.0`` and ``True`` give other dtypes; so do their places in lists other shapes."""

    def run(device: str) -> list[Any]:
        found = []
        for _ in range(3):
            for number in (1, 1.0, True, 0, 0.0, False, -0.0, 1j, math.inf, -math.inf, math.nan):
                x = torch.ones(2, dtype=torch.int32, device=device)
                found += [x + number, torch.full((2,), number, device=device), x.bool() * number]
            x = torch.ones(1, 1, device=device)
            found += [x.expand(1, 2), x.expand(2, 1), x.sum(0), x.sum(1), x.sum((0, 1)), x.sum(0, keepdim=True)]
        return found

    on_both(run)


def test_tensors_of_two_devices_are_refused_every_time() -> None:
    """However often the same call was made on one device."""
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=f"{DEVICE}:1")
    for _ in range(3):
        assert (x + x).device.index == 0
        assert (y + y).device.index == 1
        with pytest.raises(RuntimeError, match="same device"):
            x + y
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, y])


def test_where_arguments_share_memory_is_part_of_the_call() -> None:
    """The same specs, written to themselves, to a view of themselves and to another tensor."""

    def run(device: str) -> list[Any]:
        found = []
        for _ in range(3):
            x = torch.arange(6.0, device=device)
            a, b = x[:3], x[3:]
            a.add_(b)
            a.add_(a)
            torch.add(a, b, out=a)
            torch.add(b, b, out=a)
            found.append(x)
        return found

    on_both(run)


def _described(device_index: int) -> list[Any]:
    """Everything about the pending nodes, with their places in the tape for identities."""
    nodes = handles.tape(device_index).pending()
    place = {id(node): index for index, node in enumerate(nodes)}

    def shown(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [shown(item) for item in value]
        if isinstance(value, Output):
            return "output", place.get(id(value.node)), value.path
        return ("node", place.get(id(value))) if isinstance(value, Node) else value

    return [
        (
            node.op,
            shown(node.args),
            shown(node.kwargs),
            node.spec,
            shown(node.root),
            node.site,
            node.scope,
            shown(node.after),
            shown(node.overwrites),
            None
            if node.outs is None
            else [(out.path, out.spec, shown(out.root)) for out in (o() for o in node.outs) if out],
        )
        for node in nodes
    ]


def test_both_recorders_record_the_same() -> None:
    """Nodes with their order, lines, modules and phases: views, writes, several results, lists and keywords."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = torch.arange(8.0, device=DEVICE).view(2, 4)

    def run() -> list[Any]:
        x = start * 2
        first, second = x.split(1)
        first.add_(second, alpha=2)
        x.t()[0].mul_(3).clamp_(min=0.5)
        x.addcmul_(start, start)
        torch.add(first, 1, out=second)
        kept = [x.sum(0, keepdim=True, dtype=torch.float64), torch.cat([x, x[:, 1:]], 1), x.max(0), x.add_(x), x + 1e6]
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [*kept, loss]

    def recorded() -> tuple[list[Any], list[Any]]:
        torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
        results = run()
        return _described(0), results

    for _ in range(2):  # the first ones are inferred
        recorded()
    before, _results = recorded()
    with _in_python():
        after, _more = recorded()
    assert len(before) > 30
    assert before == after


def test_nodes_are_none_of_the_collectors_business() -> None:
    """A long tape is not walked by Python's collector, nor does it make the collector walk everything else."""
    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(2):
        results = [x + 1, x.view(3, 2), torch.cat([x, x]), x.sum(0, keepdim=True), x.max(0)[0], x.add_(1)]
    values = [result._value for result in results[:-1]]
    nodes = [value.node for value in values] + [results[-1]._storage.last_write]
    assert all(node.args is not None for node in nodes)
    held = [item for node in nodes for item in (node, node.args, node.kwargs, node.after, node.overwrites, node.outs)]
    held += values
    held += [item for node in nodes for item in (*node.args, *(node.kwargs or ())) if type(item) is tuple]
    assert [item for item in held if gc.is_tracked(item)] == []


def test_numbers_of_foreach_operators_need_no_new_rule() -> None:
    """The bias corrections of an optimizer change at each step, and are not tried out again each time."""
    x = [torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE)]
    known = record.recorder_of(torch.ops.aten._foreach_mul.ScalarList).known
    torch._foreach_mul(x, [0.5, 0.25])
    before = len(known)
    for step in range(1, 10):
        made = torch._foreach_mul(x, [0.5 / step, 0.25 / step])
    assert len(known) == before
    assert torch.equal(made[0].cpu(), torch.ones(2) * (0.5 / 9))


def test_a_number_that_lies_on_the_device() -> None:
    """``vmap`` makes numbers tensors of the device; PyTorch asserts there, and must go on to."""
    x, end = torch.ones(2, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda start: torch.linspace(start, end, 4))(x)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda start: torch.linspace(start, 3.0, 4))(x)
    assert x.tolist() == [1, 1]


def _steps() -> dict[str, Callable[[], Any]]:
    """Training steps whose operators save outputs, are composed of others, or change types."""
    torch.manual_seed(0)
    x = torch.ones(4, 8, device=DEVICE)
    gru, lstm = torch.nn.GRUCell(8, 8).to(DEVICE), torch.nn.LSTMCell(8, 8).to(DEVICE)
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Sigmoid()).to(
        DEVICE
    )
    layer = torch.nn.GRU(8, 8).to(DEVICE)

    def cells(cell: Any) -> None:
        hidden: Any = None
        for _ in range(5):
            hidden = cell(x, hidden)
        (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()

    def autocast() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            mlp(x).float().sum().backward()

    return {
        "gru": lambda: cells(gru),
        "lstm": lambda: cells(lstm),
        "layer": lambda: layer(x.expand(5, 4, 8))[0].sum().backward(),
        "outputs": lambda: mlp(x).sum().backward(),
        "autocast": autocast,
    }


@pytest.mark.parametrize("name", list(_steps()))
def test_a_step_that_repeats_is_recorded_without_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _steps()[name]
    with marid.no_sync():
        for _ in range(4):
            step()
    marid.epoch()
    with monkeypatch.context() as patch, marid.no_sync():
        seen = _seen_by_python(patch)
        step()
    assert len(seen) <= 2, seen


_UNPREPARED = {
    "a vector times a matrix": lambda x: x[0] @ x,
    "a view in place": lambda x: (x * 1).squeeze_().t_().unsqueeze_(0),
    "a copy": lambda x: torch.empty_like(x).copy_(x),
    "a write to a part": lambda x: (x * 1)[1:].copy_(x[:-1]),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "numbers of a distribution": lambda x: (x * 0).normal_(1.0, 2.0) + (x * 0).exponential_(),
    "a choice": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "indices that are numbers": lambda x: x[(x[:, 0] > 0).long()] + x.index_put(((x[0] > 0).long(),), x[1]),
}


@pytest.mark.parametrize("name", _UNPREPARED)
@pytest.mark.parametrize(
    "at_once", [False, pytest.param(True, marks=pytest.mark.in_process("only the processor runs them at once"))]
)
def test_usual_calls_take_no_python(name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are known, calls go around ``__torch_dispatch__``, and give what the CPU gives."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40 if at_once else 0)
    work = _UNPREPARED[name]
    torch.manual_seed(0)
    expected = [work(torch.linspace(-1, 1, 16).view(4, 4)) for _ in range(4)]
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 16).view(4, 4).to(DEVICE)
    x.sum().item()
    found = [work(x) for _ in range(3)]
    seen: list[str] = []
    dispatch = LazyTensor.__torch_dispatch__

    def noted(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(LazyTensor, "__torch_dispatch__", classmethod(noted))
    before = marid.stats().ops_immediate
    found.append(work(x))
    assert seen == []
    assert (marid.stats().ops_immediate > before) is at_once
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
