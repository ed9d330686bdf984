"""Loops that read what little they make: their operations run at once, as they are written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import marid
from marid.errors import MaterializationError
from marid.frontend import materialize as materializing
from marid.frontend import special
from marid.frontend.handles import recording
from marid.frontend.handles import tape as tape_of
from marid.frontend.materialize import read, run_pending
from marid.native import module
from tests.helpers import DEVICE, assert_same

pytestmark = pytest.mark.in_process("operations run at once in this process alone")


def _immediate(work: Callable[[], object]) -> int:
    """How many operations of some work run at once."""
    before = marid.stats().ops_immediate
    work()
    return marid.stats().ops_immediate - before


def test_a_loop_that_reads_what_it_makes() -> None:
    """After ``immediate_after`` turns, with the values that the CPU has."""

    def run(device: str) -> list[float]:
        x, seen = torch.linspace(-1, 1, 8).to(device), []
        for _ in range(33):
            x = (x * 1.5).sin()
            x[4:] += x[:4]
            seen.append(x.sum().item())
        return seen

    expected = run("cpu")
    found: list[float] = []
    ran = _immediate(lambda: found.extend(run(DEVICE)))
    assert found == expected
    assert 22 * 8 <= ran <= 25 * 8
    assert marid.stats().materializations <= 11


def test_steps_that_have_run_when_their_loss_is_read() -> None:
    """An optimizer's step has a long program run, so that the read finds its value computed; it counts as a read."""
    cell, inputs = nn.GRUCell(8, 16).to(DEVICE), torch.randn(32, 4, 8).to(DEVICE)
    optimizer = torch.optim.Adam(cell.parameters())

    def run() -> None:
        for _ in range(40):
            hidden = torch.zeros(4, 16, device=DEVICE)
            for one in inputs:
                hidden = cell(one, hidden)
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    assert _immediate(run) > 20 * 32


def test_results_of_replays_are_read_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while something is recorded, which is to run with what is read."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    step = marid.compile(lambda x: (x + 1, x.sum() > 3))
    x = torch.zeros(4, device=DEVICE)
    for _ in range(4):
        x, _ = step(x)
    asked: list[str] = []
    monkeypatch.setattr(special, "read", lambda tensor, reason: asked.append(reason) or read(tensor, reason))
    x, large = step(x)
    assert (float(x[0]), bool(large), x.tolist()) == (5.0, True, [5.0] * 4)
    asked.clear()
    x, large = step(x)
    assert (bool(large), large.item()) == (True, True)
    assert asked == []
    y = x * 2
    assert large.item() is True
    assert asked == ["item()"]
    assert y.tolist() == [12.0] * 4


def test_a_loop_that_makes_much_is_recorded() -> None:
    x = torch.rand(600, 600, device=DEVICE)

    def run() -> None:
        y = x
        for _ in range(40):
            y = (y @ x).tanh()
            y.sum().item()

    assert _immediate(run) == 0


def test_a_loop_that_reads_much_and_makes_little_is_recorded() -> None:
    """As a decoder does, one token at a time."""
    weight, x = torch.rand(2048, 2048, device=DEVICE), torch.rand(1, 2048, device=DEVICE)

    def run() -> None:
        for _ in range(60):
            (x @ weight)[0, 0].item()

    assert _immediate(run) == 0


def test_what_makes_much_is_recorded_again() -> None:
    x = torch.rand(4, device=DEVICE)
    for _ in range(30):
        x = x * 0.5
        x.sum().item()
    assert marid.stats().ops_immediate > 0
    big = torch.rand(8_000_000, device=DEVICE)
    for _ in range(4):
        big = big + 1
    assert not (big * 2).materialized


def test_work_that_is_read_no_more_is_recorded_again() -> None:
    x = torch.rand(16_000, device=DEVICE)  # small ones go on at once, a few excepted
    for _ in range(30):
        x = x * 0.5
        x.sum().item()
    for _ in range(20_000):
        x = x + 1
    assert not (x * 2).materialized


@pytest.mark.parametrize("filled", ["elements", "nothing is read"])
def test_many_small_operations_run_at_once_without_a_read(filled: str) -> None:
    """A tensor filled element by element would be programs that do not come again."""

    def run(device: str) -> torch.Tensor:
        x = torch.zeros(2, 2000, device=device)
        for index in range(2000):
            if filled == "elements":
                x[0, index] = index
                x[1, index] = -index
            else:
                x = x * 0.99 + index
        return x

    expected, found = run("cpu"), []
    ran = _immediate(lambda: found.append(run(DEVICE)))
    assert ran >= 2000
    assert marid.stats().automatic_cuts == 1
    assert_same(found[0], expected)


def test_many_large_operations_are_recorded_until_they_are_read() -> None:
    def run(device: str) -> torch.Tensor:
        x = torch.zeros(150, 150, device=device)
        for index in range(1000):
            x = x * 0.5 + index
        return x

    assert _immediate(lambda: assert_same(run(DEVICE), run("cpu"))) == 0


def test_nothing_runs_where_that_is_forbidden(at_once: None) -> None:
    x = torch.rand(4, device=DEVICE)
    (x + 1).sum().item()  # operators are met in Python first
    assert (x + 1).materialized
    with marid.no_sync():
        assert not (x + 1).materialized
    assert (x + 1).materialized


def test_what_another_thread_reads_lets_nothing_run_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose operations run at once is a matter of each thread."""
    x = torch.rand(4, device=DEVICE)
    (x + 1).sum().item()
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 1 << 40)
    other = threading.Thread(target=lambda: torch.ones(2, device=DEVICE).sum().item())
    with marid.no_sync():
        other.start()
        other.join()
        assert not (x + 1).materialized
    (x + 1).sum().item()
    assert (x + 1).materialized


def test_a_write_waits_for_readers_on_the_devices_thread(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materializing, "may_go_ahead", lambda: True)
    x = torch.ones(600, 600, device=DEVICE)
    tape = tape_of(0)
    for _ in range(8):
        tape.immediate = False
        y = x @ x
        run_pending(tape, tape.pending(), ahead=True)  # takes longer than what follows
        tape.immediate = True
        module.allow_immediate(1 << 40)
        x.fill_(0)
        assert y[3, 4].item() == 600
        x.fill_(1)
    assert marid.stats().ops_immediate > 0


def test_numbers_after_a_failed_call_are_the_cpus(at_once: None) -> None:
    """Which fails after it has drawn some."""

    def draw(device: str) -> list[list[float]]:
        torch.manual_seed(1)
        right, wrong = torch.full((40,), 0.5, device=device), torch.full((40,), 0.5, device=device)
        wrong[3] = 2
        found = []
        for p in (right, right, wrong, right, right):
            try:
                found.append(torch.bernoulli(p).tolist())
            except RuntimeError:
                found.append(torch.rand(4, device=device).tolist())
        return found

    assert _immediate(lambda: draw(DEVICE)) >= 3
    assert draw(DEVICE) == draw("cpu")


def test_numbers_after_a_draw_that_is_recorded_are_the_cpus(at_once: None) -> None:
    """Its argument is not there yet, so it does not run at once, and the generator it was given has given nothing."""

    def draw(device: str) -> list[list[float]]:
        torch.manual_seed(1)
        found, x = [], torch.full((40,), 0.5, device=device)
        for turn in range(6):
            with recording():
                p = x.mul(1)
            first = torch.bernoulli(p) if turn % 2 else x
            second = torch.rand(4, device=device)
            found += [first.tolist(), second.tolist(), torch.rand(3, device=device).tolist()]
        return found

    assert _immediate(lambda: draw(DEVICE)) >= 3
    assert draw(DEVICE) == draw("cpu")


def test_a_limit_of_memory_is_kept(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "memory_limit", 1 << 40)
    x = torch.rand(4, device=DEVICE)
    x.sum().item()
    assert not (x + 1).materialized


def test_a_function_is_recorded_whole(at_once: None) -> None:
    """``marid.compile`` makes a program of it."""

    @marid.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    for n in range(6):
        x = torch.full((3,), float(n), device=DEVICE)
        assert torch.equal(function(x).cpu(), (torch.full((3,), float(n)) * 2).exp())
    (stats,) = [one for one in marid.stats().functions if "function" in one.name]
    assert stats.replays > 0


def test_results_say_where_they_come_from(at_once: None) -> None:
    torch.rand(4, device=DEVICE).exp()  # the first is recorded
    y = torch.rand(4, device=DEVICE).exp()
    assert y.materialized
    assert y.operation == "aten::exp"
    assert y.metadata.source.rpartition("/")[2].startswith("test_immediate.py:")


def test_writes_and_views(at_once: None) -> None:
    """Aliases see writes, versions grow, and what autograd saved is protected."""
    base = torch.zeros(4, 3, device=DEVICE)
    row, flat = base[1], base.view(-1)
    row.add_(2)
    assert flat.tolist() == [0.0] * 3 + [2.0] * 3 + [0.0] * 6
    flat[::2] = 5
    assert row.tolist() == [2.0, 5.0, 2.0]
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    y = w.exp()
    z = y * y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_what_was_recorded_before_runs_first(at_once: None) -> None:
    """A write at once does not overtake a reader that has been recorded."""
    with marid.no_sync():
        x = torch.arange(4.0, device=DEVICE)
        y = x * 10
    torch.ones(2, device=DEVICE).sum().item()  # at once from here on
    x.add_(1)
    assert y.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_error_is_pytorchs_at_its_line(at_once: None) -> None:
    table = torch.rand(3, 2, device=DEVICE)
    torch.embedding(table, torch.tensor([0, 2], device=DEVICE))  # the first call of its kind is recorded
    index = torch.tensor([0, 7], device=DEVICE)
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.embedding(table, index)
    assert table.sum().item() == pytest.approx(table.cpu().sum().item())


def test_what_failed_and_is_still_held_hinders_nothing_else(at_once: None) -> None:
    x = torch.linspace(0, 1, 8, device=DEVICE)
    (x * 2 + 1).sum().item()  # the first call of an operator in a process is recorded
    with marid.no_sync():
        table, index = torch.rand(3, 2, device=DEVICE), torch.tensor([0, 7], device=DEVICE)
        failed = torch.embedding(table, index)
        written = torch.zeros(3, device=DEVICE)
        part = written[:2]
    torch.ones(2, device=DEVICE).sum().item()
    with pytest.raises(MaterializationError):
        failed.cpu()
    assert _immediate(lambda: (x * 2 + 1).sum().item()) == 3
    with pytest.raises(MaterializationError):
        (failed + 1).sum().item()
    written.copy_(failed.sum())
    with pytest.raises(MaterializationError):
        (part * 2).sum().item()  # of which the write fails that comes before it
    assert (part + 1).tolist() == [1.0, 1.0]  # whoever reads it next has been told
    assert _immediate(lambda: (x * 2 + 1).sum().item()) == 3


def test_what_is_known_of_calls_has_no_part_in_it(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is what the kernel returned, also where something else would have been recorded for such a call."""
    from marid.frontend.handles import spec
    from marid.frontend.record import recorder_of

    x = torch.rand(3, 5, device=DEVICE)
    with marid.capture():
        y = x.cos()
    wrong = spec((3, 5), (1, 3), 0, torch.float32, 0)
    known = [one for one in recorder_of(torch.ops.aten.cos.default).known.values() if one.spec is y._value.spec]
    assert known
    for one in known:
        monkeypatch.setattr(one, "spec", wrong)
        monkeypatch.setattr(one, "pattern", wrong.pattern._cdata)
    z = x.cos()
    assert z.stride() == (5, 1)
    assert torch.equal(z.cpu(), x.cpu().cos())


@pytest.mark.parametrize("kind", ["batch norm", "dropout", "adam", "gru"])
def test_training_is_the_cpus(at_once: None, kind: str) -> None:
    """Steps with operators that draw, keep statistics, or write many tensors at once."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers: dict[str, Callable[[], nn.Module]] = {
            "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Softmax(-1)),
            "adam": lambda: nn.Linear(6, 3),
            "gru": lambda: nn.GRU(6, 5, batch_first=True),
        }
        model = layers[kind]()
        x = torch.randn((4, 2, 6, 6) if kind == "batch norm" else (4, 3, 6))
        model, x = model.to(device), x.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(6):
            out = model(x)
            loss = (out[0] if isinstance(out, tuple) else out).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(torch.tensor(loss.item()))
        return losses + [value.detach().cpu() for value in model.state_dict().values()]

    for one, other in zip(train(DEVICE), train("cpu"), strict=True):
        assert torch.equal(one, other)


# --- results without a node ------------------------------------------------------------------------------------------


def _both(work: Callable[[str], list[torch.Tensor]]) -> None:
    """The same bits and strides as on the CPU."""
    for found, expected in zip(work(DEVICE), work("cpu"), strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


def test_memory_is_shared_between_what_runs_at_once_and_what_is_recorded(at_once: None) -> None:
    """Views, second tensors for a value and arguments that come back, written in either way."""

    def work(device: str) -> list[torch.Tensor]:
        base = torch.arange(12.0).to(device) * 2
        row, column, second = base.view(3, 4)[1], base.view(3, 4).t()[2], base.detach()
        row += 1
        with recording():
            column *= 10
            read = base + 1
            second[0] = 7
        base.view(4, 3)[0, 0] -= 3
        again = column.add_(1)
        with recording():
            last = base * row.sum()
        return [base, row, column, second, read, again, last]

    _both(work)


def test_a_view_of_what_was_recorded(at_once: None) -> None:
    def work(device: str) -> list[torch.Tensor]:
        with recording():
            base = torch.arange(6.0).to(device) + 1
            before = base[1:]
        part, other = base[2:], before[1:]
        part *= 2
        with recording():
            before += 1
            total = other * 3
        return [base, before, part, other, total]

    _both(work)


def test_gradients_add_up_where_nobody_else_sees_them(at_once: None) -> None:
    """Autograd adds in place where it may; a gradient that is a view, or has one, it may not write to."""

    def work(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6).to(device).requires_grad_()
        seen: list[torch.Tensor] = []
        y = x * 2
        y.register_hook(lambda grad: seen.append(grad.view(2, 3)))
        (y.sum() + y.exp().sum() + (y * y).sum() + y.view(2, 3)[0].sum()).backward()
        assert x.grad is not None
        return [x.grad, seen[0]]

    _both(work)


def test_a_result_without_a_node_counts_as_memory(at_once: None) -> None:
    before = torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0
    x = torch.ones(1 << 18, device=DEVICE) * 2
    view = x[1:]
    held = torch.accelerator.memory_allocated()
    assert held - before == pytest.approx(4 << 18, abs=4096)
    del x
    assert torch.accelerator.memory_allocated() == held
    del view
    assert torch.accelerator.memory_allocated() - before <= 4096


def test_factories_run_at_once(at_once: None) -> None:
    def made() -> list[torch.Tensor]:
        return [
            torch.zeros(2, 3, device=DEVICE),
            torch.full((2,), 7, device=DEVICE),
            torch.arange(4, device=f"{DEVICE}:0"),
            torch.scalar_tensor(2.5, device=DEVICE),
            torch.ones(2, dtype=torch.bfloat16, device=DEVICE),
        ]

    made()  # an operator is met in Python first
    assert _immediate(made) == 5
    for one, text in zip(made(), ("zeros", "full", "arange", "scalar_tensor", "ones"), strict=True):
        assert one.device.type == DEVICE
        assert text in one.operation  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.dtype for one in made()] == [torch.float32, torch.int64, torch.int64, torch.float32, torch.bfloat16]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.zeros(2, device=DEVICE).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device=f"{DEVICE}:63")
    with pytest.raises(RuntimeError, match="pinned"):
        torch.zeros(2, device=DEVICE, pin_memory=True)
    with pytest.raises(RuntimeError, match="negative"):
        torch.zeros(-1, device=DEVICE)
    torch.manual_seed(3)
    drawn = torch.rand(5, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.rand(5))


@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
def test_factories_that_take_tensors(at_once: None, make: Callable[..., torch.Tensor]) -> None:
    """Limits on the device, on the host, and as numbers."""
    limits = (torch.tensor(1.0), torch.tensor(1.0, device=DEVICE), 1.0)
    for first in limits:
        for last in limits:
            for _ in range(3):
                made = make(first, last * 2, 5, device=DEVICE)
            assert torch.equal(made.cpu(), make(1.0, 2.0, 5))  # pyright: ignore[reportPossiblyUnboundVariable]


def test_copies_of_the_hosts_are_the_devices_own(at_once: None) -> None:
    host = torch.arange(6.0)
    copy, kept = host.to(DEVICE), torch.zeros(6, device=DEVICE)
    kept.copy_(host)
    host += 100
    assert copy.tolist() == kept.tolist() == [0, 1, 2, 3, 4, 5]
    kept.copy_(torch.arange(6, dtype=torch.int64).flip(0))
    assert kept.tolist() == [5, 4, 3, 2, 1, 0]


def test_copies_for_the_host_are_the_hosts_own(at_once: None) -> None:
    x = torch.arange(6.0).to(DEVICE).view(2, 3).t()
    host, other = x.cpu(), x.to("cpu", torch.int64)
    x += 100
    assert host.device.type == other.device.type == "cpu"
    assert host.tolist() == other.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert host.stride() == torch.arange(6.0).view(2, 3).t().clone().stride()
    host *= 2
    assert x[0].tolist() == [100, 103]
    assert x.requires_grad_().cpu().grad_fn is not None


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_group_norm_in_each_memory_format(at_once: None, form: torch.memory_format) -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 8, 4, 6).to(memory_format=form).to(device).requires_grad_()
        norm = nn.GroupNorm(4, 8).to(device)
        y = norm(x)
        (y * torch.linspace(0, 1, 6, device=device)).sum().backward()
        assert x.grad is not None
        assert norm.weight.grad is not None
        return [y.detach(), x.grad, norm.weight.grad]

    _both(work)


@pytest.mark.parametrize("masked", [None, "bool", "float", "turned", "learned"])
def test_attention_takes_the_kernel_that_it_takes_on_the_cpu(at_once: None, masked: str | None) -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, 9, 8).to(device).requires_grad_() for _ in range(3))
        mask = None if masked is None else (torch.rand(9, 9) > 0.3).to(device)
        if masked == "learned":
            mask = nn.Parameter(torch.randn(9, 9)).to(device)
        elif masked not in (None, "bool"):
            assert mask is not None
            mask = mask.float().t() if masked == "turned" else mask.float()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        out.sum().backward()
        assert q.grad is not None
        return [out.detach(), q.grad]

    _both(work)


def test_masks_take_what_they_take_on_the_cpu(at_once: None) -> None:
    def work(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12).to(device).view(3, 4)
        positive = x > 0
        y = x.clone()
        y[positive] = 0
        return [x[positive], y, x[:, torch.tensor([0, 2]).to(device)], torch.masked_select(x, positive)]

    _both(work)


NUMBERS_OF_THE_HOST: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, number: x * number,
    lambda x, number: number - x,
    lambda x, number: torch.where(x > 0, x, number),
    lambda x, number: torch.clamp(x, min=number),
    lambda x, number: torch.addcmul(x, x, number),
    lambda x, number: torch.pow(x.abs(), number),
    lambda x, number: torch.lerp(x, x + 1, number.float()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", NUMBERS_OF_THE_HOST)
def test_numbers_of_the_host(at_once: None, function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """A tensor of the CPU without a dimension may stand beside the device's, as it does on a GPU."""
    x, number = torch.linspace(-1, 1, 8), torch.tensor(2, dtype=dtype)
    moved, made = x.to(DEVICE), []
    function(moved, number)  # a rule is not known before

    def work() -> None:
        made.append(function(moved, number))

    assert _immediate(work) >= 1
    expected = function(x, number)
    assert made[0].device.type == DEVICE
    assert made[0].dtype == expected.dtype
    number.fill_(5)  # nothing that was made sees it
    torch.testing.assert_close(made[0].cpu(), expected, rtol=0, atol=0)


INDEXING: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, i, mask: x[i],
    lambda x, i, mask: x[:, i],
    lambda x, i, mask: x[i, i],
    lambda x, i, mask: x[mask],
    lambda x, i, mask: x.index_put((i,), x[i] + 1),
    lambda x, i, mask: x.index_put_((i, i), torch.zeros(3, device=x.device), accumulate=True),
]


@pytest.mark.parametrize("function", INDEXING)
def test_indices_of_the_host(at_once: None, function: Callable[..., torch.Tensor]) -> None:
    x, i, mask = torch.randn(5, 5), torch.tensor([0, -1, 3]), torch.tensor([True, False, True, False, True])
    moved = x.to(DEVICE)
    function(moved.clone(), i, mask)
    made = []

    def work() -> None:
        made.append(function(moved, i, mask))

    assert _immediate(work) >= 1
    expected = function(x, i.clone(), mask)
    i.zero_()
    torch.testing.assert_close(made[0].cpu(), expected, rtol=0, atol=0)


def test_numbers_of_the_host_are_not_written(at_once: None) -> None:
    x, number = torch.ones(()).to(DEVICE), torch.tensor(2.0)
    for write in (
        lambda: number.add_(x),
        lambda: torch.add(x, x, out=number),
        lambda: torch._foreach_add_([number], [x]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            write()
    assert number.item() == 2
    x.mul_(number)
    assert x.item() == 2


def test_zeros_of_transforms_run_at_once(at_once: None) -> None:
    """Those that forward derivatives begin with, which have no memory on the CPU."""

    def work() -> None:
        torch._efficientzerotensor(3, device=DEVICE)

    work()
    assert _immediate(work) == 1
    x = torch.linspace(-1, 1, 6)
    found, expected = (torch.func.hessian(lambda x: (x.sin() * x).sum())(of) for of in (x.to(DEVICE), x))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_devices_do_not_mix(at_once: None) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"same device|at least two devices"):
        x + torch.ones(3)


def test_memory_of_what_runs_at_once_is_used_again(at_once: None) -> None:
    """Blocks go to the next results of their size, never while anybody has them, and to other threads with them."""
    x = torch.rand(300, device=DEVICE)
    x * 2
    torch.remote_accelerator.empty_cache()  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)
    held: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for turn in range(200):
        size = int(torch.randint(1, 5000, ()))
        value = torch.full((size,), float(turn), device=DEVICE)
        held.append(value * 2 + 1)
        wanted.append(torch.full((size,), float(turn)) * 2 + 1)
        if turn % 3 == 0:
            del held[turn % len(held)], wanted[turn % len(wanted)]
        if turn % 50 == 49:
            gone = [held.pop() for _ in range(5)]
            del wanted[-5:]
            thread = threading.Thread(target=gone.clear)
            thread.start()
            thread.join()
    assert all(torch.equal(value.cpu(), expected) for value, expected in zip(held, wanted, strict=True))


@pytest.mark.parametrize("views_first", [False, True])
def test_copies_of_what_shares_memory_share_memory(at_once: None, views_first: bool) -> None:
    """As PyTorch's do, with their offsets."""

    def copied(device: str) -> list[object]:
        base = torch.arange(9, device=device)
        view = base.as_strided([2], [1], 3)
        given = [view, base] if views_first else [base, view]
        made = copy.deepcopy(given)
        made[views_first].add_(1)
        view = made[not views_first]
        return [view.tolist(), view.storage_offset(), view.untyped_storage().nbytes(), base.tolist()]

    for _ in range(2):  # the first call of an operator in a process is recorded
        assert copied(DEVICE) == copied("cpu")


def test_copies_to_a_device_that_does_not_exist(at_once: None) -> None:
    for make in (
        lambda on: torch.ones(2).to(on),
        lambda on: torch.tensor([1.0], device=on),
        lambda on: torch.ones(2, device=on),
    ):
        for index in (99, 70, 8):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                make(f"{DEVICE}:{index}")


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "with gaps": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "imaginary": lambda x: torch.complex(x, x + 1).imag,
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative": lambda x: torch.complex(x, x + 1).conj().imag,
    "one number": lambda x: x[0, 0, 0, 0],
    "wanting gradients": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize(
    "how", [{}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"non_blocking": True}], ids=str
)
def test_copies_of_the_host(at_once: None, layout: str, how: dict[str, object]) -> None:
    """A tensor of the host comes with the strides that a copy has there, and as it is at that moment."""
    if "dtype" in how and layout in ("imaginary", "conjugate", "negative"):
        how = {"dtype": torch.complex128}
    given = _LAYOUTS[layout](torch.randn(2, 3, 4, 6))
    expected = given.to("cpu", copy=True, **how)  # pyright: ignore[reportCallIssue, reportArgumentType]
    found = given.to(DEVICE, **how)  # pyright: ignore[reportCallIssue, reportArgumentType]
    ran = _immediate(lambda: given.detach().to(DEVICE))
    assert ran > 0
    for name in ("dtype", "shape", "requires_grad", "is_leaf"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.stride(), found.is_conj(), found.is_neg()) == (
        expected.stride(),
        expected.is_conj(),
        expected.is_neg(),
    )
    if layout != "expanded":
        given.detach().zero_()
    assert torch.equal(found.detach().cpu(), expected.detach())
    if found.requires_grad:
        found.sum().backward()
        assert given.grad is not None
        assert given.grad.device.type == "cpu"


def test_copies_of_a_tensor_and_its_view_share_memory(at_once: None) -> None:
    def run(device: str) -> list[object]:
        y = torch.ones(3, 4, device=device) * 2
        whole, rows = copy.deepcopy([y, y[1:]])
        whole.add_(1)
        rows[0].mul_(5)
        flat, turned = copy.deepcopy((y.view(12), y.t()))
        flat[3:] = 7
        return [whole, rows, flat, turned, rows.data_ptr() - whole.data_ptr()]

    assert_same(run(DEVICE), run("cpu"))
